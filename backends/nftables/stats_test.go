// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

func counting(addrs ...string) Options {
	var all []netip.Addr
	for _, a := range addrs {
		all = append(all, netip.MustParseAddr(a))
	}
	return Options{Options: backends.Options{Stats: true, NodeAddresses: nodeaddr.Of(all...)}}
}

// statsOf returns the connections of each service port and endpoint. It omits endpoints
// without connections.
func statsOf(t testing.TB, b *backend) map[backends.Stats]int64 {
	t.Helper()
	all := map[backends.Stats]int64{}
	if err := b.Stats(t.Context(), func(s backends.Stats) bool {
		n := s.Connections
		if s.Connections = 0; n > 0 {
			all[s] += n
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestConnectionsAreCounted makes connections to services of all kinds. The counters must
// have exactly these connections, also after a restart.
func TestConnectionsAreCounted(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, counting("192.0.2.1"))
	all := []string{"!10.0.1.2", "!10.0.2.2", "!fd01:1::2", "!fd01:2::2"}
	ports := func(s *api.Service) {
		s.Ports = []api.PortMapping{
			{Name: "one", Protocol: api.TCP, Port: 80, TargetPort: 8080},
			{Name: "two", Protocol: api.TCP, Port: 81, TargetPort: 8080},
			{Name: "udp", Protocol: api.UDP, Port: 80, TargetPort: 8080},
		}
	}
	weights := view("weights", []string{"10.96.0.3"}, all[:2], ports)
	weights.Endpoints[0].Weight = 300
	views := []*api.View{
		view("web", []string{"10.96.0.1", "fd00::1"}, all, ports),
		view("affinity", []string{"10.96.0.2"}, all[:2], func(s *api.Service) { ports(s); s.AffinitySeconds = 100 }),
		weights,
		view("hash", []string{"10.96.0.4"}, all[:2], func(s *api.Service) { ports(s); s.Algorithm = api.HashConnection }),
		view("local", []string{"10.96.0.5"}, all[:2], func(s *api.Service) {
			ports(s)
			s.Type, s.ExternalTrafficToLocal = api.NodePort, true
			s.Ports[1].NodePort = 30081
		}),
		view("all-ports", nil, all[:1], func(s *api.Service) {
			s.IPs.Headless, s.AllPorts = true, true
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.6"))
		}),
	}
	var changes []sink.Change
	for _, v := range views {
		changes = append(changes, set(v))
	}
	mustSync(t, b, batchOf(true, changes...))

	want := map[backends.Stats]int64{}
	connected := func(from *netnstest.Namespace, addr, service, port string, endpoint string) {
		if endpoint == "" {
			answer, err := ask(from, addr, patience)
			if err != nil {
				t.Fatalf("connect to %s: %v", addr, err)
			}
			pods := map[string]string{"pod1": "10.0.1.2", "pod2": "10.0.2.2"}
			if strings.HasPrefix(addr, "[") {
				pods = map[string]string{"pod1": "fd01:1::2", "pod2": "fd01:2::2"}
			}
			name, _, _ := strings.Cut(answer, " ")
			endpoint = pods[name]
		}
		s := backends.Stats{Port: port, Protocol: api.TCP, Endpoint: netip.AddrPortFrom(netip.MustParseAddr(endpoint), 8080), Active: -1, FromClients: -1, ToClients: -1}
		s.Service.Namespace, s.Service.Name = views[0].Service.Namespace, service
		switch port {
		case "":
			s.Protocol, s.Endpoint = 0, netip.AddrPortFrom(s.Endpoint.Addr(), 0)
		case "udp":
			s.Protocol = api.UDP
		}
		want[s]++
	}
	for range 7 {
		for _, from := range []*netnstest.Namespace{w.client, w.node} {
			connected(from, "10.96.0.1:80", "web", "one", "")
			connected(from, "10.96.0.1:81", "web", "two", "")
			connected(from, "10.96.0.1:81", "web", "two", "")
			connected(from, "[fd00::1]:80", "web", "one", "")
			connected(from, "10.96.0.2:80", "affinity", "one", "")
			connected(from, "10.96.0.3:80", "weights", "one", "")
			connected(from, "10.96.0.4:81", "hash", "two", "")
			connected(from, "10.96.0.5:81", "local", "two", "")
			connected(from, "192.0.2.1:30081", "local", "two", "")
			connected(from, "203.0.113.6:8080", "all-ports", "", "")
		}
	}
	// Three packets of one flow are one connection.
	udp := view("udp", []string{"10.96.0.7"}, all[:1], ports)
	mustSync(t, b, batchOf(false, set(udp)))
	netnstest.Send(t, w.client.Do, "10.96.0.7:80", 3)
	connected(nil, "", "udp", "udp", "10.0.1.2")

	check := func() {
		t.Helper()
		got := statsOf(t, b)
		for end := time.Now().Add(10 * time.Second); !maps.Equal(got, want) && time.Now().Before(end); got = statsOf(t, b) {
			time.Sleep(10 * time.Millisecond)
		}
		for s := range got {
			if got[s] != want[s] {
				t.Errorf("%d connections, want %d: %+v", got[s], want[s], s)
			}
		}
		for s := range want {
			if _, ok := got[s]; !ok {
				t.Errorf("no connections, want %d: %+v", want[s], s)
			}
		}
	}
	check()
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b = startIn(t, w.node, counting("192.0.2.1"))
	changes = append(changes, set(udp))
	mustSync(t, b, batchOf(true, changes...))
	check()
	calls := 0
	if err := b.Stats(t.Context(), func(backends.Stats) bool { calls++; return false }); err != nil || calls != 1 {
		t.Errorf("Stats called a function that returns false %d times, error %v", calls, err)
	}
}

// TestStatsOptionRewritesElementsOnce restarts with and without counters. Only a start with
// another value of the option writes elements, and only elements of endpoints.
func TestStatsOptionRewritesElementsOnce(t *testing.T) {
	ns := netnstest.New(t)
	many := []sink.Change{
		set(numberedService(1, 5)),
		set(weighted(func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.9.1")) }, 100, 200, 700)),
	}
	for _, start := range []struct {
		stats   bool
		written int
	}{{false, -1}, {true, 2 * (5 + 3)}, {true, 0}, {false, 2 * (5 + 3)}, {false, 0}} {
		opts := counting()
		opts.Stats = start.stats
		var n int
		b := startIn(t, ns, opts, countElements(&n))
		mustSync(t, b, batchOf(true, many...))
		if start.written >= 0 && n != start.written {
			t.Errorf("the start with Stats=%t wrote %d elements, want %d", start.stats, n, start.written)
		}
		mustSync(t, b, batchOf(false, sink.Change{Old: many[0].New, New: numberedService(1, 7)}))
		mustSync(t, b, batchOf(false, sink.Change{Old: numberedService(1, 7), New: many[0].New, Key: many[0].Key}))
		b.table.drift.reset(-1)
		if err := verifyAll(t, b); err != nil {
			t.Error(err)
		}
		all := 0
		err := b.Stats(t.Context(), func(backends.Stats) bool { all++; return true })
		if start.stats && (err != nil || all != 5+3) || !start.stats && err == nil {
			t.Errorf("with Stats=%t, Stats yields %d endpoints, error %v", start.stats, all, err)
		}
		counters := 0
		for _, m := range []string{"endpoints4", "numbers4"} {
			counters += strings.Count(runNFT(t, ns, "", "list", "map", "inet", "kpng", m), "counter packets 0 bytes 0")
		}
		if counters != all {
			t.Errorf("with Stats=%t, %d elements have counters", start.stats, counters)
		}
		if err := b.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkStats compares the time to connect to a service with and without counters, in
// turn, and measures reading the counters of 10,000 services.
func BenchmarkStats(b *testing.B) {
	b.Run("connect", func(b *testing.B) {
		const n = 1000
		var cases []backendtest.Case
		for _, name := range []string{"without", "with"} {
			opts := counting()
			opts.Stats = name == "with"
			be, ns := start(b, opts)
			mustSync(b, be, batchOf(true, manyServices(n, 10)...))
			addPods(b, ns)
			next := 0
			cases = append(cases, backendtest.Case{Name: name, Batch: connects(ns, 500, func() netip.AddrPort {
				next += 7919
				return netip.AddrPortFrom(numberedService(next%n, 0).Service.IPs.ClusterIPs.Family(api.IPv4)[0], 80)
			})})
		}
		backendtest.Compare(b, cases...)
	})
	for _, endpoints := range []int{3, 10} {
		b.Run(fmt.Sprintf("read/endpoints=%d", endpoints), func(b *testing.B) {
			be, _ := start(b, counting())
			mustSync(b, be, splitPass(manyServices(10_000, endpoints))...)
			before := cpuTime(b)
			for b.Loop() {
				read := 0
				if err := be.Stats(b.Context(), func(backends.Stats) bool { read++; return true }); err != nil || read != 10_000*endpoints {
					b.Fatalf("read %d pairs, error %v", read, err)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(b.N), "cpu-ms/read")
		})
	}
}

// addPods adds the networks of the services and pods to the loopback interface, and
// starts a server at all addresses.
func addPods(b *testing.B, ns *netnstest.Namespace) {
	for _, network := range []string{"10.0.0.1/8", "11.0.0.1/8"} {
		ns.Add(b, "lo", network)
	}
	serve(b, ns, "pod")
}

// connects returns a function that makes n connections. The argument to returns the address
// of the next connection.
func connects(ns *netnstest.Namespace, n int, to func() netip.AddrPort) func(func(time.Duration)) error {
	return func(took func(time.Duration)) error {
		return ns.Do(func() error {
			for range n {
				a := to()
				d, err := netnstest.TimeConnect(&unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()})
				if err != nil {
					return err
				}
				took(d)
			}
			return nil
		})
	}
}

// cpuTime returns the CPU time of this process, including its time in the kernel.
func cpuTime(t testing.TB) time.Duration {
	t.Helper()
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
