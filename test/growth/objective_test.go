// SPDX-License-Identifier: Apache-2.0

package growth

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"
)

var (
	objectiveFor      = flag.Duration("objective-for", 10*time.Second, "how `long` TestObjective makes changes")
	objectiveServices = flag.Int("objective-services", 1000, "the `number` of services of TestObjective, with ten endpoints each")
	objectiveRate     = flag.Int("objective-rate", 200, "changes per second of TestObjective")
	objectivePasses   = flag.Duration("objective-passes", 5*time.Second, "`interval` of the passes that TestObjective forces")
	objectiveLimit    = flag.Duration("objective-limit", 0, "the `time` within which TestObjective requires 99 % of changes; 0 means that it only reports them")
)

// TestObjective measures the network programming objective of docs/history/benchmarks.md with
// packets. It changes EndpointSlices of probe services. Each has one endpoint, which is ready
// or not. A change lasts from the write of the watch event until the service accepts a
// connection, or refuses a connection if the endpoint becomes unready. Meanwhile kpng makes
// passes, and another process adds and deletes tables, without a pause.
//
// Connections are tried again every 100 µs, so a change may be up to 100 µs shorter.
func TestObjective(t *testing.T) {
	const probes = 20
	h := newHarness(t, "nftables")
	all := repeat(*objectiveServices, func(i int) []object {
		objects := one(i+probes, 0, 10, nil)
		for e := range objects[1].(*discoveryv1.EndpointSlice).Endpoints {
			objects[1].(*discoveryv1.EndpointSlice).Endpoints[e].NodeName = new("another")
		}
		return objects
	})
	h.server.write(all, nil)
	for i := range probes {
		h.server.write(probe(i, false), nil)
	}
	if !h.converge() {
		t.Fatalf("kpng does not apply the services\n%s", h.logged())
	}

	ctx, stop := context.WithTimeout(t.Context(), *objectiveFor)
	defer stop()
	var storms atomic.Int64
	var others sync.WaitGroup
	others.Go(func() { storm(ctx, h, &storms) })
	passes := 0
	others.Go(func() {
		for tick := time.NewTicker(*objectivePasses); ; passes++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				fmt.Fprintln(h.stdin, "pass")
			}
		}
	})
	results := make([]changeTimes, probes)
	used := h.usage()
	var probers sync.WaitGroup
	for i := range probes {
		probers.Go(func() {
			err := h.ns.Do(func() error {
				return results[i].measure(ctx, h, i, time.Second*time.Duration(probes)/time.Duration(*objectiveRate))
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	probers.Wait()
	others.Wait()
	now := h.usage()

	var total changeTimes
	for i := range results {
		total.ready, total.refused = append(total.ready, results[i].ready...), append(total.refused, results[i].refused...)
	}
	t.Logf("%d services, %.0f changes/s, %d passes, %d transactions of another program, %.1f s of kpng's CPU time",
		*objectiveServices, float64(len(total.ready)+len(total.refused))/objectiveFor.Seconds(), passes, storms.Load(), (now.all - used.all).Seconds())
	t.Logf("ready until accepted:\n%s", histogram(total.ready))
	t.Logf("not ready until refused:\n%s", histogram(total.refused))
	if passes == 0 || storms.Load() == 0 || len(total.ready) == 0 {
		t.Error("the test made no passes, no transactions, or no changes")
	}
	if p99 := quantile(total.ready, 0.99); *objectiveLimit > 0 && p99 > *objectiveLimit {
		t.Errorf("the 99th percentile is %v, want at most %v", p99, *objectiveLimit)
	}
}

// probe returns a service with one endpoint, which is ready or not.
func probe(number int, ready bool) []object {
	s := service(number, nil)
	step := 1
	if ready {
		step = 0
	}
	return []object{s, slice(s, 0, step, []string{offset("10.128.2.0", number).String()})}
}

// changeTimes has the durations of changes.
type changeTimes struct{ ready, refused []time.Duration }

// measure changes a probe at an interval until ctx ends. It must run in the namespace.
func (c *changeTimes) measure(ctx context.Context, h *harness, number int, interval time.Duration) error {
	to := &unix.SockaddrInet4{Port: 80, Addr: offset(clusterIP(number), 0).As4()}
	for change := 1; ctx.Err() == nil; change++ {
		ready := change%2 == 1
		begin := time.Now()
		h.server.write(probe(number, ready)[1:], nil)
		for {
			_, err := netnstest.TimeConnect(to)
			took := time.Since(begin)
			if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
				return fmt.Errorf("connect to probe %d: %w", number, err)
			}
			if ready == (err == nil) {
				if ready {
					c.ready = append(c.ready, took)
				} else {
					c.refused = append(c.refused, took)
				}
				break
			}
			if took > time.Minute {
				return fmt.Errorf("change %d of probe %d has not arrived after %v", change, number, took)
			}
			time.Sleep(100 * time.Microsecond)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Until(begin.Add(interval))):
		}
	}
	return nil
}

// storm adds and deletes tables in the namespace, in other processes, until ctx ends. It
// counts the transactions.
func storm(ctx context.Context, h *harness, count *atomic.Int64) {
	const rules = `add table inet storm
add chain inet storm c { type filter hook input priority 0; }
add rule inet storm c meta mark 1 counter
add set inet storm s { type ipv4_addr; }
add element inet storm s { 192.0.2.1 }
delete table inet storm
`
	args := h.ns.Command("nft", "-f", "-")
	for ctx.Err() == nil {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			h.Errorf("nft: %v: %s", err, out)
			return
		}
		count.Add(1)
		time.Sleep(20 * time.Millisecond)
	}
}

// quantile returns the time that the given part of times does not exceed.
func quantile(times []time.Duration, part float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	return sorted[min(int(part*float64(len(sorted))), len(sorted)-1)]
}

// histogram returns a table of limits. For each limit, it has the part of times up to this
// limit.
func histogram(times []time.Duration) string {
	var out strings.Builder
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	fmt.Fprintf(&out, "%d changes, median %.2f ms, p99 %.2f ms, p99.9 %.2f ms, longest %.2f ms\n",
		len(times), ms(quantile(times, 0.5)), ms(quantile(times, 0.99)), ms(quantile(times, 0.999)), ms(quantile(times, 1)))
	rest, n := slices.Sorted(slices.Values(times)), 0
	for _, limit := range []int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 60_000} {
		count := 0
		for len(rest) > 0 && rest[0] <= time.Duration(limit)*time.Millisecond {
			rest = rest[1:]
			count++
		}
		n += count
		fmt.Fprintf(&out, "%6d ms: %8d  %7.3f %%\n", limit, count, 100*float64(n)/float64(max(len(times), 1)))
		if len(rest) == 0 {
			break
		}
	}
	return out.String()
}
