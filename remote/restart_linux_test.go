// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"k8s.io/klog/v2"
)

const firstServices, firstNodes = 10_000, 5_000

var firstClients = flag.Int("first-clients", firstNodes, "number of clients of BenchmarkFirstSync and BenchmarkMove")

// firstState returns a state with objects that are as long and as different as the objects
// of a real cluster. The state is the same in all processes.
func firstState() *cluster.State {
	state := largeState(firstServices, firstNodes)
	update(state, func(to apitest.Writer) { makeReal(to, firstServices, firstNodes) })
	return state
}

// BenchmarkFirstSync connects 5,000 clients at the same time to a new server in another
// process.
//
//   - tokens: the clients have everything and tokens of this server. This case shows
//     the cost of the streams without a first answer.
//   - new: the clients have nothing. Then the server is killed with SIGKILL, and
//     another one starts. All clients have to continue with their present state.
//
// The clients do not unpack the answers, unlike the clients of
// TestAnotherServerContinues.
func BenchmarkFirstSync(b *testing.B) {
	digests := firstDigests(b)
	for _, kind := range []string{"tokens", "new"} {
		b.Run(kind, func(b *testing.B) {
			for b.Loop() {
				address := socket(b)
				server := startRestarted(b, address)
				c := &crowd{Addresses: []string{address}, PerNode: 1, Packed: true}
				for i := range *firstClients {
					n := crowdNode{Name: apitest.NodeName(i), Token: []byte{}}
					if kind == "tokens" {
						n.Token = server.tokens[n.Name]
					} else {
						n.Again = digests[i]
					}
					c.Nodes = append(c.Nodes, n)
				}
				used := server.measure(b)
				next := c.start(b)
				round := next()
				used(round, "")
				if kind == "new" && round.Resets != *firstClients {
					b.Fatalf("%d clients received everything, want %d", round.Resets, *firstClients)
				}
				if kind == "new" {
					server.kill()
					server = startRestarted(b, address)
					used = server.measure(b)
					round = next()
					used(round, "restarted-")
					if round.Resets > 0 {
						b.Errorf("%d clients started over", round.Resets)
					}
				}
				server.kill()
			}
		})
	}
}

// BenchmarkMove kills one of two relays with SIGKILL. Each relay has half of the clients.
// The clients of the killed relay connect to the other relay and continue with their
// present state.
func BenchmarkMove(b *testing.B) {
	digests := firstDigests(b)
	for b.Loop() {
		var relays [2]*restarted
		addresses := []string{socket(b), socket(b)}
		var rounds [2]func() *crowdRound
		for i := range relays {
			relays[i] = startRestarted(b, addresses[i])
			// The clients of the first relay also know the second relay, although it does not
			// run yet.
			c := &crowd{Addresses: addresses[i:], PerNode: 1, Packed: true}
			for n := i; n < *firstClients; n += 2 {
				name := apitest.NodeName(n)
				c.Nodes = append(c.Nodes, crowdNode{Name: name, Token: relays[i].tokens[name], Again: digests[n]})
			}
			rounds[i] = c.start(b)
			rounds[i]()
		}
		used := relays[1].measure(b)
		killed := time.Now()
		relays[0].kill()
		round := rounds[0]()
		used(round, "")
		b.ReportMetric(round.syncTime(0.5).Sub(killed).Seconds(), "half-synced-s")
		if round.Resets > 0 {
			b.Errorf("%d clients started over", round.Resets)
		}
		relays[1].kill()
	}
}

// firstDigests returns the digests of each client. The client sends them when it connects
// again after its first answer.
func firstDigests(b *testing.B) (all []*localv1.Digests) {
	state := firstState()
	server, snapshot := newBenchServer(b, state), state.Objects()
	for i := range *firstClients {
		node, _ := snapshot.Nodes.Get(apitest.NodeName(i))
		all = append(all, server.DigestsFor(snapshot, node))
	}
	return all
}

// restarted is a server in a process of its own.
type restarted struct {
	cmd    *exec.Cmd
	tokens map[string][]byte // the tokens of clients that have the whole state
}

// If this environment variable is set to an address, the test binary runs a server instead
// of the tests.
const restartedEnv = "KPNG_TEST_RESTARTED"

func startRestarted(b *testing.B, address string) *restarted {
	b.Helper()
	r := &restarted{cmd: exec.Command(os.Args[0])}
	r.cmd.Env = append(os.Environ(), restartedEnv+"="+address)
	r.cmd.Stderr = os.Stderr
	stdout, err := r.cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(r.kill)
	if err := json.NewDecoder(bufio.NewReader(stdout)).Decode(&r.tokens); err != nil {
		b.Fatalf("start the server: %v", err)
	}
	return r
}

// kill kills the process with SIGKILL. It may be called again.
func (r *restarted) kill() {
	r.cmd.Process.Kill()
	r.cmd.Wait()
}

// measure begins a measurement of the process. The returned function reports the result
// for a round.
func (r *restarted) measure(b *testing.B) (report func(round *crowdRound, prefix string)) {
	pid := strconv.Itoa(r.cmd.Process.Pid)
	if err := os.WriteFile("/proc/"+pid+"/clear_refs", []byte("5"), 0); err != nil {
		b.Fatal(err)
	}
	began, cpu, before := time.Now(), processTime(b, pid), residentMemory(b, pid, "VmRSS:")
	return func(round *crowdRound, prefix string) {
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(round.syncTime(1).Sub(began).Seconds(), prefix+"all-synced-s")
		b.ReportMetric((processTime(b, pid) - cpu).Seconds(), prefix+"server-cpu-s")
		b.ReportMetric(float64(round.Bytes)/float64(*firstClients)/1e3, prefix+"kB/client")
		b.ReportMetric(before/(1<<20), prefix+"rss-before-MiB")
		b.ReportMetric(residentMemory(b, pid, "VmHWM:")/(1<<20), prefix+"peak-rss-MiB")
	}
}

// processTime returns the CPU time of a process.
func processTime(b *testing.B, pid string) time.Duration {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	var ticks int
	for _, f := range strings.Fields(rest)[11:13] { // utime and stime; see proc(5)
		n, err := strconv.Atoi(f)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / 100
}

// runRestarted serves firstState until the process is killed. It writes tokens of all nodes
// to the standard output when it is ready.
func runRestarted(address string) {
	err := func() error {
		state := firstState()
		server, err := remote.NewServer(state, benchOptions)
		if err != nil {
			return err
		}
		tokens := map[string][]byte{}
		for name, node := range state.Snapshot().Nodes.All() {
			tokens[name] = server.TokenFor(node)
		}
		debug.SetGCPercent(50) // as kpng to-api
		debug.FreeOSMemory()
		l, err := remote.Listen(address, 0)
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(tokens); err != nil {
			return err
		}
		return server.Serve(klog.NewContext(context.Background(), logr.Discard()), l)
	}()
	fmt.Fprintln(os.Stderr, "server:", err)
	os.Exit(1)
}
