// SPDX-License-Identifier: Apache-2.0

package growth

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ovstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/cgroup"
	"github.com/kpng-project/kpng/test/kubeproxy"
	"github.com/kpng-project/kpng/watcher"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

const (
	nodeName           = "node"
	allPortsAnnotation = "all-ports"
	// proxyVariable is the environment variable with the name of the proxy that the process
	// runs. The arguments of the process are a kubeconfig file and the flags of the
	// backend.
	proxyVariable = "KPNG_GROWTH_PROXY"
)

// proxyNames are the proxies that the benchmark knows. Core is kpng with a sink that does
// nothing.
var proxyNames = []string{"core", "nftables", "iptables", "ebpf", "ovs", "userspace", "ipvs", "kube-proxy", "kube-proxy-iptables", "kube-proxy-ipvs"}

// backends has the backends of kpng. Each process uses one of them once.
var backends = map[string]func() sink.Sink{
	"nftables":  program.NFTables,
	"iptables":  program.IPTables,
	"ebpf":      program.EBPF,
	"ovs":       program.OVS,
	"userspace": func() sink.Sink { return program.Userspace() },
	"ipvs":      program.IPVS,
}

// sinks has the other sinks with which kpng runs.
var sinks = map[string]sink.Func{
	"core": func(_ context.Context, c *sink.Changes) error {
		for range c.Services {
		}
		return nil
	},
	// The time of this sink grows with the square of the endpoints of a service.
	"quadratic": func(_ context.Context, c *sink.Changes) error {
		for change := range c.Services {
			if change.New == nil {
				continue
			}
			for range len(change.New.Endpoints) * len(change.New.Endpoints) {
				for range 20_000 {
					wasted = wasted*31 + 1
				}
			}
		}
		return nil
	},
}

var wasted uint64 // the result of useless work

func TestMain(m *testing.M) {
	name := os.Getenv(proxyVariable)
	if name == "" {
		os.Exit(m.Run())
	}
	if err := runProxy(name, os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runProxy runs kpng in this process until the standard input ends. It prints "applied"
// when the dataplane has a change of the innocent service. The line "wait NUMBER" on the
// standard input requests the line "done" when all sinks have applied the state that
// contains the marker with the number. The line "collect" requests the line "done" after
// unused memory was freed. The line "pass" requests a pass.
func runProxy(name, kubeconfig string, args []string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	opts := kpng.Options{
		Kubeconfig: kubeconfig, NodeName: nodeName,
		Services: watcher.Options{AllPorts: watcher.AllPortsAnnotated(allPortsAnnotation)},
	}
	add := func(s sink.Sink, o sink.Options) { opts.Sinks = append(opts.Sinks, kpng.Sink{Sink: s, Options: o}) }
	observed := sink.Options{Name: name, Observer: sink.Observer{Applied: func(time.Duration) { fmt.Println("applied") }}}
	if make := backends[name]; make != nil {
		b, _ := sink.As[*command.Backend](make())
		fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
		b.Register(fs)
		if err := fs.Parse(args); err != nil {
			return err
		}
		if err := b.Configure(); err != nil {
			return err
		}
		add(b, observed)
		for suffix, companion := range b.Parts().Beside {
			add(companion, sink.Options{Name: name + "-" + suffix})
		}
	} else {
		add(sinks[name], observed)
	}
	p, err := kpng.New(opts)
	if err != nil {
		return err
	}
	go func() {
		defer cancel()
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			if lines.Text() == "collect" {
				debug.FreeOSMemory()
				fmt.Println("done")
				continue
			}
			if lines.Text() == "pass" {
				p.StartOver()
				continue
			}
			number, _ := strconv.Atoi(strings.TrimPrefix(lines.Text(), "wait "))
			// Each snapshot costs CPU time. So the waits get longer with time.
			for begin := time.Now(); !hasMarker(p, number); time.Sleep(max(time.Millisecond, time.Since(begin)/4)) {
			}
			if err := p.WaitApplied(ctx); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return
			}
			fmt.Println("done")
		}
	}()
	return p.Run(ctx)
}

// hasMarker reports whether the state of p contains the marker with this number.
func hasMarker(p *kpng.Proxy, number int) bool {
	state, _ := p.State().Snapshot().States.Get(types.NamespacedName{Namespace: innocents, Name: "marker"})
	if state == nil || state.Service == nil || len(state.Slices) != 1 {
		return false
	}
	port, address := marker(number)
	return state.Service.Ports[0].Port == port && state.Slices[0].Endpoints[0].Addr.String() == address
}

// node is a network namespace in which one proxy runs, with an API server of its own.
type node struct {
	testing.TB
	proxy       string
	dir         string
	ns          *netnstest.Namespace
	kubeconfig  string
	environment []string        // additional environment variables of the proxy
	switches    *ovstest.Switch // for the proxy ovs
	switched    time.Duration   // CPU time that ovs-vswitchd had used when the proxy started

	cmd     *exec.Cmd
	ended   chan struct{} // closed when the process has ended
	stdin   io.Writer
	applied chan struct{} // one value for each line "applied"
	done    chan struct{} // one value for each line "done"
}

// isKubeProxy reports whether the proxy is not kpng.
func (n *node) isKubeProxy() bool { return strings.HasPrefix(n.proxy, "kube-proxy") }

// prepare makes the objects that the proxy needs in addition to the namespace.
func (n *node) prepare(host string) {
	n.kubeconfig = apiserver.Kubeconfig(n, &rest.Config{Host: host})
	switch n.proxy {
	case "ebpf":
		n.mount("bpf", n.bpffs())
		n.mount("cgroup2", filepath.Join(n.dir, "cgroups"))
		// The programs handle sockets of this empty cgroup, so they handle none.
		if err := os.Mkdir(n.sockets(), 0o755); err != nil {
			n.Fatal(err)
		}
		n.Cleanup(func() { os.Remove(n.sockets()) })
	case "ovs":
		n.switches = ovstest.New(n, n.ns.Start)
	}
}

func (n *node) bpffs() string { return filepath.Join(n.dir, "bpf") }

func (n *node) sockets() string {
	return filepath.Join(n.dir, "cgroups", fmt.Sprintf("kpng-growth-%d", os.Getpid()))
}

// mount mounts a file system until the test ends.
func (n *node) mount(kind, dir string) {
	err := os.Mkdir(dir, 0o755)
	if err == nil {
		err = unix.Mount(kind, dir, kind, 0, "")
	}
	if err != nil {
		n.Fatalf("mount %s, which needs root: %v", kind, err)
	}
	n.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			n.Errorf("unmount %s: %v", kind, err)
		}
	})
}

// command returns the command line of the proxy.
func (n *node) command() []string {
	if n.isKubeProxy() {
		return kubeproxy.Command(n, kubeproxy.Options{
			Kubeconfig: n.kubeconfig, Node: nodeName, Mode: strings.TrimPrefix(strings.TrimPrefix(n.proxy, "kube-proxy"), "-"),
			MinSyncPeriod: time.Millisecond, ClusterCIDR: podCIDR.String(),
		})
	}
	args := []string{must(os.Executable()), n.kubeconfig}
	switch n.proxy {
	case "nftables", "iptables", "ipvs":
		args = append(args, "--cluster-cidr", podCIDR.String())
	case "ebpf":
		args = append(args, "--cluster-cidr", podCIDR.String(), "--bpffs", n.bpffs(), "--cgroup", n.sockets())
	case "ovs":
		args = append(args, "--cluster-cidr", podCIDR.String(), "--bridge", ovstest.Bridge, "--ovs-rundir", n.switches.Dir,
			"--masquerade-addresses", nodeIP.String()+",fd00:99::1", "--hairpin-addresses", "169.254.77.1,fd00:169:254::1")
	}
	return args
}

// start starts the proxy in a cgroup.
func (n *node) start(group *cgroup.Group) {
	n.switched = n.switchUsage()
	args := group.Command(n.command()...)
	n.cmd = exec.Command(args[0], args[1:]...)
	n.cmd.Env = append(append(os.Environ(), n.environment...), proxyVariable+"="+n.proxy)
	log := must(os.OpenFile(filepath.Join(filepath.Dir(n.kubeconfig), "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644))
	defer log.Close()
	n.cmd.Stderr = log
	if n.isKubeProxy() {
		n.cmd.Stdout = log
	} else {
		n.stdin = must(n.cmd.StdinPipe())
		stdout := must(n.cmd.StdoutPipe())
		n.applied, n.done = make(chan struct{}, 1000), make(chan struct{}, 1)
		go func(applied, done chan struct{}) {
			for lines := bufio.NewScanner(stdout); lines.Scan(); {
				switch lines.Text() {
				case "applied":
					applied <- struct{}{}
				case "done":
					done <- struct{}{}
				}
			}
		}(n.applied, n.done)
	}
	ended, err := n.ns.Start(n.cmd)
	if err != nil {
		n.Fatalf("start %s: %v", n.proxy, err)
	}
	n.ended = make(chan struct{})
	go func(closed chan struct{}) {
		<-ended
		close(closed)
	}(n.ended)
}

// kill kills the proxy. Its dataplane stays.
func (n *node) kill() {
	if n.cmd == nil {
		return
	}
	n.cmd.Process.Kill()
	<-n.ended
	n.cmd = nil
}

// logged returns the end of the proxy's log.
func (n *node) logged() string {
	text, _ := os.ReadFile(filepath.Join(filepath.Dir(n.kubeconfig), "log"))
	return string(text[max(0, len(text)-4<<10):])
}

// usage is the CPU time that the proxy has used since it started.
type usage struct {
	all    time.Duration // in the process, in the kernel, and in its children that have ended
	kernel time.Duration // the part of the field all in the kernel, plus the time of ovs-vswitchd
}

func (n *node) usage() usage {
	pid := n.cmd.Process.Pid
	times, ok := cgroup.Times(n, pid)
	if !ok {
		n.Fatalf("%s ended\n%s", n.proxy, n.logged())
	}
	switched := n.switchUsage() - n.switched
	return usage{
		all:    n.cpuTime(pid) + times[2] + times[3] + switched,
		kernel: times[1] + times[3] + switched,
	}
}

// switchUsage returns the CPU time of ovs-vswitchd, if it runs.
func (n *node) switchUsage() time.Duration {
	if n.switches == nil {
		return 0
	}
	return n.cpuTime(n.switches.Daemon.Pid)
}

// cpuTime returns the CPU time of a process, without its children.
func (n *node) cpuTime(pid int) time.Duration {
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &used); err != nil { // see clock_getcpuclockid
		n.Fatalf("read the CPU time of %s: %v\n%s", n.proxy, err, n.logged())
	}
	return time.Duration(used.Nano())
}

// peakMemory returns the peak of the proxy's resident memory since the last call of
// collect or start.
func (n *node) peakMemory() int64 { return cgroup.Status(n, n.cmd.Process.Pid, "VmHWM") }

// collect makes kpng free unused memory, and resets the peak of the resident memory.
func (n *node) collect() {
	if !n.isKubeProxy() {
		fmt.Fprintln(n.stdin, "collect")
		<-n.done
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", n.cmd.Process.Pid), []byte("5"), 0); err != nil {
		n.Fatal(err)
	}
}

// parseProxies returns the proxies of a list in their usual order.
func parseProxies(t testing.TB, list string) (names []string) {
	t.Helper()
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(list, ",") {
		wanted[name] = true
	}
	for _, name := range proxyNames {
		if wanted[name] {
			names = append(names, name)
			delete(wanted, name)
		}
	}
	if len(wanted) > 0 {
		t.Fatalf("unknown proxies %v; known are %v", slices.Sorted(maps.Keys(wanted)), proxyNames)
	}
	return names
}
