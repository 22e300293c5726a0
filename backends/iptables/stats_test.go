// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"golang.org/x/sys/unix"
)

func withStats(o *options) { o.Stats = true }

// statsOf returns the connections of each service port and endpoint.
func statsOf(t testing.TB, b *backend) map[backends.Stats]int64 {
	t.Helper()
	all := map[backends.Stats]int64{}
	if err := b.Stats(t.Context(), func(s backends.Stats) bool {
		n := s.Connections
		s.Connections = 0
		if _, ok := all[s]; ok {
			t.Errorf("Stats yields twice: %+v", s)
		}
		all[s] = n
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestConnectionsAreCounted makes connections to services of all kinds. The counters must
// have exactly these connections, also after changes of the endpoints and after a restart.
func TestConnectionsAreCounted(t *testing.T) {
	eachVariant(t, func(t *testing.T, _ *netnstest.Namespace, v variant) {
		node, from, to := forwardingNode(t)
		large := "!10.2.1.2"
		for i := 3; i < 140; i++ {
			to.Add(t, "eth0", fmt.Sprintf("10.2.1.%d/24", i))
			large += fmt.Sprintf(" 10.2.1.%d", i)
		}
		netnstest.Listen(t, to.Do, ":8080", func(c net.Conn) {
			io.WriteString(c, c.LocalAddr().String())
			c.Close()
		})
		twoPorts := func(s *api.Service) {
			s.Ports = append(s.Ports, api.PortMapping{Name: "two", Protocol: api.TCP, Port: 81, TargetPort: 8080}, api.PortMapping{Name: "udp", Protocol: api.UDP, Port: 80, TargetPort: 8080})
		}
		manyPorts := func(s *api.Service) {
			for i := range int32(20) {
				s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: 8080 + i, TargetPort: 8080})
			}
		}
		external := func(s *api.Service) {
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.6"))
		}
		const some = "!10.2.1.2 10.2.1.3"
		views := []*api.View{
			view("web", "10.96.0.1 fd00:96::1", some+" !fd02:1::2", twoPorts),
			view("affinity", "10.96.0.2", some, affinity),
			view("large", "10.96.0.3", large),
			view("large-affinity", "10.96.0.4", large, affinity),
			view("local", "10.96.0.5", some, nodePort, externalLocal),
			view("many-ports", "10.96.0.6", some, manyPorts),
			view("all-ports", "", some, allPorts, external),
		}
		restart := func() *backend {
			b := start(t, node, v, withStats, func(o *options) { o.NodeAddresses = nodeaddr.Of(netip.MustParseAddr("10.2.0.1")) })
			mustSync(t, b, pass(views...))
			return b
		}
		b := restart()

		want := map[backends.Stats]int64{}
		count := func(service, port string, protocol api.Protocol, endpoint string) {
			s := backends.Stats{Port: port, Protocol: protocol, Endpoint: netip.MustParseAddrPort(endpoint), Active: -1, FromClients: -1, ToClients: -1}
			s.Service.Namespace, s.Service.Name = views[0].Service.Namespace, service
			if protocol == 0 {
				s.Endpoint = netip.AddrPortFrom(s.Endpoint.Addr(), 0)
			}
			want[s]++
		}
		connect := func(addr, service, port string) {
			t.Helper()
			protocol := api.TCP
			if port == "" {
				protocol = 0
			}
			if err := from.Do(func() error {
				c, err := net.DialTimeout("tcp", addr, time.Minute)
				if err != nil {
					return err
				}
				defer c.Close()
				answer, err := io.ReadAll(c)
				count(service, port, protocol, string(answer))
				return err
			}); err != nil {
				t.Fatalf("connect to %s: %v", addr, err)
			}
		}
		check := func() {
			t.Helper()
			got := statsOf(t, b)
			for s, n := range got {
				if n != want[s] {
					t.Errorf("%d connections, want %d: %+v", n, want[s], s)
				}
			}
			for s := range want {
				if _, ok := got[s]; !ok {
					t.Errorf("no connections, want %d: %+v", want[s], s)
				}
			}
		}
		for range 4 {
			connect("10.96.0.1:80", "web", "http")
			connect("[fd00:96::1]:80", "web", "http")
			connect("10.96.0.1:81", "web", "two")
			connect("10.96.0.2:80", "affinity", "http")
			connect("10.96.0.3:80", "large", "http")
			connect("10.96.0.4:80", "large-affinity", "http")
			connect("10.2.0.1:30080", "local", "http")
			connect("10.96.0.5:80", "local", "http")
			connect("10.96.0.6:8080", "many-ports", "p0")
			connect("203.0.113.6:8080", "all-ports", "")
		}
		check()

		// Three packets of one flow are one connection.
		mustSync(t, b, batch(view("udp", "10.96.0.7", "10.2.1.3", twoPorts)))
		netnstest.Send(t, from.Do, "10.96.0.7:80", 3)
		count("udp", "udp", api.UDP, "10.2.1.3:8080")
		check()
		first := batch()
		first.First, first.NodeChanged = true, true
		mustSync(t, b, first)
		check()

		// The pass deletes the service.
		maps.DeleteFunc(want, func(s backends.Stats, _ int64) bool { return s.Service.Name == "udp" })

		// A change of endpoints does not change the counters of other endpoints.
		views[0] = view("web", "10.96.0.1 fd00:96::1", some+" 10.2.1.4 !fd02:1::2 fd02:1::3", twoPorts)
		views[2] = view("large", "10.96.0.3", strings.TrimSuffix(large, " 10.2.1.139"))
		maps.DeleteFunc(want, func(s backends.Stats, _ int64) bool {
			return s.Service.Name == "large" && s.Endpoint.Addr().As16()[15] == 139
		})
		last := batch(views...)
		last.Last = true
		mustSync(t, b, last)
		check()
		connect("10.96.0.1:80", "web", "http")
		check()
		b = restart()
		check()
		calls := 0
		if err := b.Stats(t.Context(), func(backends.Stats) bool { calls++; return false }); err != nil || calls != 1 {
			t.Errorf("Stats called a function that returns false %d times, error %v", calls, err)
		}
	})
}

// TestCountersNeverDecreaseWhileRulesChange reads counters while another program changes
// table nat.
func TestCountersNeverDecreaseWhileRulesChange(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		ns.Add(t, "lo", "10.0.0.1/8")
		b := start(t, ns, v, withStats)
		mustSync(t, b, passOf(many(300))...)
		restore := programName(v.flavour, api.IPv4, "restore")
		counter := ""
		for name := range b.rulesets[0].records[many(1)[0].Key()].counted {
			counter = name
		}
		ns.RunWith(t, fmt.Sprintf("*nat\n:%s - [0:0]\n[1000:2000] -A %[1]s %s\nCOMMIT\n", counter, b.rulesets[0].chains[chainID{nat, counter}]), restore, "--noflush", "--counters", "-w")
		statsOf(t, b)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				ns.RunWith(t, fmt.Sprintf("*nat\n:OTHER - [0:0]\n-A OTHER -d 192.0.2.%d -j RETURN\nCOMMIT\n", i%256), restore, "--noflush", "-w")
			}
		}()
		for end := time.Now().Add(time.Second); time.Now().Before(end) && !t.Failed(); {
			all := slices.Collect(maps.Values(statsOf(t, b)))
			if len(all) != 3000 || slices.Max(all) != 1000 {
				t.Errorf("Stats has %d endpoints, the largest number is %d", len(all), slices.Max(all))
			}
		}
		close(stop)
		<-stopped
	})
}

func TestStatsNeedsItsOption(t *testing.T) {
	b := start(t, netnstest.New(t), variants[0])
	mustSync(t, b, pass(everything()...))
	if err := b.Stats(t.Context(), func(backends.Stats) bool { return true }); err == nil {
		t.Error("Stats without the option returns no error")
	}
}

// BenchmarkStats compares the time to connect to a service with and without counters, in
// turn, and measures reading the counters of 10,000 services.
func BenchmarkStats(b *testing.B) {
	for _, v := range []variant{{flavourNFT, false}, {flavourLegacy, false}} {
		b.Run(fmt.Sprintf("%s/connect", v), func(b *testing.B) {
			const n = 1000
			views := many(n)
			var took [2][]time.Duration
			var spaces [2]*netnstest.Namespace
			for i := range spaces {
				spaces[i] = netnstest.New(b)
				be := start(b, spaces[i], v, func(o *options) { o.Stats = i == 1 })
				mustSync(b, be, passOf(views)...)
				spaces[i].Add(b, "lo", "10.0.0.1/8")
				netnstest.Listen(b, spaces[i].Do, ":8080", func(c net.Conn) { c.Close() })
			}
			for b.Loop() {
				for i, ns := range spaces {
					if err := ns.Do(func() error {
						for range 500 {
							to := &unix.SockaddrInet4{Port: 80, Addr: views[len(took[i])*7919%n].Service.IPs.ClusterIPs.Family(api.IPv4)[0].As4()}
							d, err := netnstest.TimeConnect(to)
							if err != nil {
								return err
							}
							took[i] = append(took[i], d)
						}
						return nil
					}); err != nil {
						b.Fatal(err)
					}
				}
			}
			for i := range took {
				slices.Sort(took[i])
			}
			without, with := took[0][len(took[0])/2], took[1][len(took[1])/2]
			b.ReportMetric(float64(without.Nanoseconds())/1000, "µs/without")
			b.ReportMetric(float64(with.Nanoseconds())/1000, "µs/with")
			b.ReportMetric(float64(with)/float64(without), "ratio")
		})
		for _, endpoints := range []int{3, 10} {
			b.Run(fmt.Sprintf("%s/read/endpoints=%d", v, endpoints), func(b *testing.B) {
				views := many(10_000)
				for _, v := range views {
					v.Endpoints = v.Endpoints[:endpoints]
				}
				be := start(b, netnstest.New(b), v, withStats)
				mustSync(b, be, passOf(views)...)
				report := measureCPU(b)
				for b.Loop() {
					read := 0
					if err := be.Stats(b.Context(), func(backends.Stats) bool { read++; return true }); err != nil || read != 10_000*endpoints {
						b.Fatalf("read %d pairs, error %v", read, err)
					}
				}
				report()
			})
		}
	}
}
