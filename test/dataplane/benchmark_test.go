// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/bare"
	"github.com/kpng-project/kpng/test/internal/cgroup"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/test/kubeproxy"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	// loadPatience is the maximum time in which a proxy must program all services.
	loadPatience = 40 * time.Minute
	// restPatience limits the wait until a proxy is idle.
	restPatience = 2 * time.Minute
	// changeEvery is the time between two endpoint changes.
	changeEvery = 100 * time.Millisecond
	// changePatience limits the wait for changes that are not yet programmed.
	changePatience = 5 * time.Minute
)

// proxy is one of the compared proxies.
type proxy struct {
	name string
	// command returns the program and its arguments. The argument interval is the minimum
	// time between two syncs; 0 means the proxy's default.
	command func(t testing.TB, c *cluster, interval time.Duration) []string
}

var (
	kpngProxy  = kpngWith("kpng", "nftables")
	ebpfProxy  = kpngWith("kpng-ebpf", "ebpf")
	allProxies = []proxy{
		ebpfProxy, kpngProxy, kubeProxy("kube-proxy", "nftables"),
		kpngWith("kpng-iptables", "iptables"), kubeProxy("kube-proxy-iptables", "iptables"),
		kpngWith("kpng-ipvs", "ipvs"), kubeProxy("kube-proxy-ipvs", "ipvs"),
	}
)

func kpngWith(name, backend string) proxy {
	return proxy{name, func(t testing.TB, c *cluster, interval time.Duration) []string {
		program := *kpngPath
		if program == "" {
			program = gotool.BuildOwn(t, "./cmd/kpng")
		}
		args := []string{program, "kube", "--kubeconfig", c.kubeconfig, "--node-name", nodeName, "to-local", backend, "--cluster-cidr", podCIDR.String()}
		if backend == "ebpf" {
			args = append(args, "--cgroup", c.sockets, "--bpffs", bpffs)
		}
		if interval != 0 {
			args = append(args, "--min-sync-interval", interval.String())
		} else if *profile != "" {
			args = append(args, "--profiling", "--metrics-bind-address", metricsAddr)
			go saveProfile(t, *profile)
		}
		return args
	}}
}

// saveProfile waits until kpng serves profiles, and writes a profile of four seconds to a
// file.
func saveProfile(t testing.TB, file string) {
	for t.Context().Err() == nil {
		response, err := http.Get("http://" + metricsAddr + "/debug/pprof/profile?seconds=4")
		if err != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		profile, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err == nil {
			err = os.WriteFile(file, profile, 0o644)
		}
		if err != nil {
			t.Errorf("save profile: %v", err)
		}
		return
	}
}

func kubeProxy(name, mode string) proxy {
	return proxy{name, func(t testing.TB, c *cluster, interval time.Duration) []string {
		return kubeproxy.Command(t, kubeproxy.Options{Kubeconfig: c.kubeconfig, Node: nodeName, Mode: mode, ClusterCIDR: podCIDR.String(), MinSyncPeriod: interval})
	}}
}

func Benchmark(b *testing.B) {
	answer(b)
	for _, s := range parseShapes(b, *shapes) {
		b.Run(s.String(), func(b *testing.B) {
			c := newCluster(b, s)
			for _, p := range allProxies {
				if !slices.Contains(strings.Split(*proxies, ","), p.name) {
					continue
				}
				b.Run(p.name, func(b *testing.B) {
					for range b.N {
						c.measure(b, p)
					}
				})
			}
		})
	}
}

// measure reports the metrics of one proxy. Afterwards it deletes the proxy's rules.
func (c *cluster) measure(b *testing.B, p proxy) {
	b.ReportMetric(0, "ns/op")
	b.Cleanup(func() { flush(b) })
	c.join(b)
	c.ipvs = strings.HasSuffix(p.name, "ipvs")
	if c.ipvs {
		c.loadModules(b, p)
	}

	listing := c.list(b)
	r := c.start(b, p, 0)
	r.load(b, listing)
	r.rest()
	r.latency(b, "default")
	r.connections(b)
	b.ReportMetric(float64(cgroup.Status(b, r.cmd.Process.Pid, "VmRSS"))/(1<<20), "MB-resident")
	b.ReportMetric(float64(cgroup.Status(b, r.cmd.Process.Pid, "VmHWM"))/(1<<20), "MB-peak")
	r.kill(b)

	r = c.start(b, p, time.Millisecond)
	c.changeMarker(b) // wait until the new process has read the tables of the old process
	r.rest()
	r.latency(b, "least")
	r.kill(b)

	// The cgroup has no process left, so its kernel memory is the memory of the rules.
	b.ReportMetric(float64(c.group.KernelMemory())/(1<<20), "MB-kernel")
}

// loadModules runs a proxy once until all services work. So the kernel loads the modules
// that the proxy needs. In QEMU, this takes long. Afterwards it deletes the proxy's rules.
func (c *cluster) loadModules(b *testing.B, p proxy) {
	r := c.start(b, p, 0)
	r.wait(b)
	r.kill(b)
	flush(b)
}

// flush deletes everything that proxies program in the network namespace: all nftables
// tables, including the tables of iptables, all sets of ipset, the state of IPVS, and all
// eBPF maps and links.
func flush(b testing.TB) {
	b.Helper()
	if err := os.RemoveAll(filepath.Join(bpffs, "kpng-ebpf")); err != nil {
		b.Error(err)
	}
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		b.Errorf("nft flush ruleset: %v\n%s", err, out)
	}
	if out, err := exec.Command("ipset", "destroy").CombinedOutput(); err != nil {
		b.Errorf("ipset destroy: %v\n%s", err, out)
	}
	if err := flushIPVS(); err != nil {
		b.Error(err)
	}
}

type running struct {
	*cluster
	cmd   *exec.Cmd
	begin time.Time
}

func (c *cluster) start(b testing.TB, p proxy, interval time.Duration) *running {
	b.Helper()
	args := c.group.Command(p.command(b, c, interval)...)
	log, err := os.Create(filepath.Join(b.TempDir(), p.name+".log"))
	if err != nil {
		b.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r := &running{cluster: c, cmd: cmd, begin: time.Now()}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		r.kill(b)
		if b.Failed() {
			text, _ := os.ReadFile(log.Name())
			b.Logf("%s logged:\n%s", p.name, text[max(0, len(text)-4<<10):])
		}
	})
	return r
}

func (r *running) kill(b testing.TB) {
	if r.cmd.ProcessState != nil {
		return
	}
	r.cmd.Process.Kill()
	r.cmd.Wait() // the error only says that the process was killed
}

// wait waits until a connection to every service succeeds. It returns the time at which
// the last of the services began to work.
func (r *running) wait(b testing.TB) time.Time {
	b.Helper()
	deadline := time.Now().Add(loadPatience)
	var reached time.Time
	// A proxy may program services in several transactions, in the order of names. So begin
	// with the last service.
	for service := r.services - 1; service >= 0; service-- {
		for {
			_, err := connect(service, 20*time.Millisecond)
			if err == nil {
				break
			}
			reached = time.Time{}
			if time.Now().After(deadline) {
				b.Fatalf("service %s does not work after %s: %v", name(service), loadPatience, err)
			}
			time.Sleep(time.Millisecond)
		}
		if reached.IsZero() {
			reached = time.Now()
		}
	}
	return reached
}

// load reports the time from the proxy's start until all services work. It also reports
// this time without the time for listing the cluster.
func (r *running) load(b *testing.B, listing time.Duration) {
	b.Helper()
	took := r.wait(b).Sub(r.begin)
	b.ReportMetric(took.Seconds(), "s-start→programmed")
	b.ReportMetric((took - listing).Seconds(), "s-listed→programmed")
	b.ReportMetric(r.group.CPU().Seconds(), "cpu-s-start")
}

// rest waits until the proxy uses almost no CPU time, or less than half of a CPU
// for ten seconds, but at most for restPatience. In QEMU, an idle kube-proxy uses a sixth of
// a CPU, and its syncs may take longer than the time between syncs.
func (r *running) rest() {
	deadline := time.Now().Add(restPatience)
	for quiet := 0; quiet < 10 && time.Now().Before(deadline); {
		before := r.group.CPU()
		time.Sleep(time.Second)
		switch used := r.group.CPU() - before; {
		case used <= 20*time.Millisecond:
			return
		case used < 500*time.Millisecond:
			quiet++
		default:
			quiet = 0
		}
	}
}

// list reads all objects of the cluster five times, each time like a proxy that starts.
// It returns the median duration.
func (c *cluster) list(b *testing.B) time.Duration {
	b.Helper()
	config := c.server.Config()
	config.ContentType = runtime.ContentTypeProtobuf
	config.DisableCompression = true
	took := make([]time.Duration, 5)
	for i := range took {
		ctx, cancel := context.WithCancel(b.Context())
		begin := time.Now()
		err := bare.Reflect(ctx, config)
		took[i] = time.Since(begin)
		cancel()
		if err != nil {
			b.Fatalf("list cluster: %v", err)
		}
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// latency changes endpoints and reports two durations. Both end when a change
// is in the kernel. The first duration begins with the write to the API server, and the
// second duration begins with the watch event of the change.
func (r *running) latency(b *testing.B, interval string) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	watched := r.follow(b, ctx)
	programmed, expect := r.programmed(b, ctx)

	type change struct {
		pod     netip.Addr
		written time.Time
	}
	var made []change
	// Change different services, because a proxy that syncs rarely may never program an
	// endpoint that is soon replaced.
	services := rand.New(rand.NewPCG(1, 2)).Perm(r.services)
	before := r.group.CPU()
	tick := time.NewTicker(changeEvery)
	defer tick.Stop()
	for i := range *changes {
		<-tick.C
		service, pod := services[i%r.services], r.newPodIP()
		made = append(made, change{netip.MustParseAddr(pod), time.Now()})
		expect(service, made[i].pod)
		if err := r.change(ctx, service, i/r.services%r.endpoints, pod); err != nil {
			b.Fatal(err)
		}
	}
	var fromWrite, fromWatch []time.Duration
	deadline := time.Now().Add(changePatience)
	for _, c := range made {
		for {
			kernel, ok := programmed.of(c.pod)
			seen, ok2 := watched.of(c.pod)
			if ok && ok2 {
				fromWrite = append(fromWrite, kernel.Sub(c.written))
				fromWatch = append(fromWatch, kernel.Sub(seen))
				break
			}
			if time.Now().After(deadline) {
				b.Fatalf("endpoint %s: seen in the kernel %t, seen in the watch %t", c.pod, ok, ok2)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	used := r.group.CPU() - before
	report := func(from string, list []time.Duration) {
		slices.Sort(list)
		for _, p := range []int{50, 99} {
			b.ReportMetric(float64(list[(len(list)-1)*p/100].Microseconds())/1000, fmt.Sprintf("ms-%s-p%d-%s", from, p, interval))
		}
	}
	report("write→kernel", fromWrite)
	report("watch→kernel", fromWatch)
	b.ReportMetric(used.Seconds()*1000/float64(*changes), "cpu-s/1000-changes-"+interval)
}

// connections connects to random services, one after the other, and reports
// how long the connections take.
func (r *running) connections(b *testing.B) {
	b.Helper()
	random := rand.New(rand.NewPCG(3, 4))
	times := make([]time.Duration, 0, *connects)
	refused := 0
	begin := time.Now()
	for range *connects {
		took, err := connect(random.IntN(r.services), 5*time.Second)
		if err != nil {
			refused++
			continue
		}
		times = append(times, took)
	}
	took := time.Since(begin)
	b.ReportMetric(float64(refused), "connects-failed")
	if len(times) == 0 {
		b.Fatal("no service works")
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1000, "µs-connect-p50")
	b.ReportMetric(float64(len(times))/took.Seconds(), "connects/s")
}
