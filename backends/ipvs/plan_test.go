// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
)

// view returns the result of [backendtest.View] for the cluster IP 10.96.0.1.
func view(endpoints []string, edit func(*api.Service)) *api.View {
	onlyIPv4 := func(s *api.Service) { s.IPFamilies = []api.Family{api.IPv4} }
	return backendtest.View(&api.Node{Name: "node"}, "web", []string{"10.96.0.1"}, endpoints, onlyIPv4, edit)
}

// describe returns a plan as lines: virtual servers with endpoints, and elements.
func describe(p *plan) (lines []string) {
	var all []element
	for _, f := range p.frontends {
		line := fmt.Sprintf("%s %s %v", f.id, f.scheduler, f.endpoints)
		if f.weights != nil {
			line += fmt.Sprintf(" weights %d", f.weights)
		}
		if f.local {
			line += " local"
		}
		lines = append(lines, line)
		all = append(all, f.elements...)
	}
	for _, e := range append(all, p.elements...) {
		line := e.set.name() + " " + e.addr().String()
		rest := e.key[e.addr().BitLen()/8:]
		if e.set.kind == restricted {
			line += fmt.Sprintf(" to list %d", binary.NativeEndian.Uint32([]byte(e.value)))
		}
		if e.set.kind == healthChecks {
			a, _ := netip.AddrFromSlice([]byte(e.value[:4]))
			line += fmt.Sprintf(" port %d to %s port %d", int(rest[4])<<8|int(rest[5]), a, int(e.value[4])<<8|int(e.value[5]))
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// testList returns the number of a frontend's source-range list.
func testList(*nodeview.Frontend) uint32 { return 5 }

func TestPlan(t *testing.T) {
	loadBalancer := func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
	}
	clusterIP := []string{"addresses4 10.96.0.1", "cluster-ips4 10.96.0.1", "frontends4 10.96.0.1"}
	for name, test := range map[string]struct {
		endpoints []string
		edit      func(*api.Service)
		weights   []int32
		healthz   uint16
		want      []string
	}{
		"a cluster IP": {
			endpoints: []string{"10.1.0.2", "10.1.0.1"},
			want:      append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080 10.1.0.2:8080] local"),
		},
		"an endpoint on this node has a hairpin element": {
			endpoints: []string{"!10.1.0.1"},
			want:      append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local", "hairpins4 10.1.0.1"),
		},
		"without endpoints connections are rejected": {
			want: append(clusterIP, "10.96.0.1:80/TCP rr [] local", "rejects4 10.96.0.1"),
		},
		"a scheduler by annotation": {
			endpoints: []string{"10.1.0.1"},
			edit:      func(s *api.Service) { s.Annotations = map[string]string{"scheduler": "mh"} },
			want:      append(clusterIP, "10.96.0.1:80/TCP mh [10.1.0.1:8080] local"),
		},
		"different weights need a scheduler with weights": {
			endpoints: []string{"10.1.0.2", "10.1.0.1"},
			weights:   []int32{0, 700},
			want:      append(clusterIP, "10.96.0.1:80/TCP wrr [10.1.0.1:8080 10.1.0.2:8080] weights [100 700] local"),
		},
		"equal weights need none": {
			endpoints: []string{"10.1.0.2", "10.1.0.1"},
			weights:   []int32{700, 700},
			want:      append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080 10.1.0.2:8080] local"),
		},
		"the scheduler sh has no weights": {
			endpoints: []string{"10.1.0.2", "10.1.0.1"},
			weights:   []int32{700, 1},
			edit:      func(s *api.Service) { s.Annotations = map[string]string{"scheduler": "sh"} },
			want:      append(clusterIP, "10.96.0.1:80/TCP sh [10.1.0.1:8080 10.1.0.2:8080] local"),
		},
		"source ranges of node ports": {
			endpoints: []string{"10.1.0.1"},
			edit: func(s *api.Service) {
				s.Type, s.Ports[0].NodePort = api.NodePort, 30080
				s.SourceRanges = []api.SourceRanges{{NodePorts: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
			},
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local",
				"192.0.2.1:30080/TCP rr [10.1.0.1:8080]", "192.0.2.2:30080/TCP rr [10.1.0.1:8080]",
				"frontends4 192.0.2.1", "frontends4 192.0.2.2", "masquerades4 192.0.2.1", "masquerades4 192.0.2.2",
				"restricted4 192.0.2.1 to list 5", "restricted4 192.0.2.2 to list 5"),
		},
		"a node port has a virtual server at each address of the node": {
			endpoints: []string{"10.1.0.1"},
			edit:      func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 },
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local",
				"192.0.2.1:30080/TCP rr [10.1.0.1:8080]", "192.0.2.2:30080/TCP rr [10.1.0.1:8080]",
				"frontends4 192.0.2.1", "frontends4 192.0.2.2", "masquerades4 192.0.2.1", "masquerades4 192.0.2.2"),
		},
		"an external IP that the machine has is already local": {
			endpoints: []string{"10.1.0.1"},
			edit:      func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1")) },
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local", "192.0.2.1:80/TCP rr [10.1.0.1:8080]",
				"frontends4 192.0.2.1", "masquerades4 192.0.2.1"),
		},
		"an external IP that another node has": {
			endpoints: []string{"10.1.0.1"},
			edit:      func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.9")) },
			want:      append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local"),
		},
		"a load-balancer IP that the machine has keeps its health-check ports": {
			endpoints: []string{"10.1.0.1"},
			edit: func(s *api.Service) {
				loadBalancer(s)
				s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
			},
			healthz: 10256,
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local", "192.0.2.1:80/TCP rr [10.1.0.1:8080]",
				"frontends4 192.0.2.1", "masquerades4 192.0.2.1"),
		},
		"a health-check node port of a service with policy Cluster does not count": {
			endpoints: []string{"10.1.0.1"},
			edit: func(s *api.Service) {
				loadBalancer(s)
				s.HealthCheckNodePort = 30999
			},
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local", "203.0.113.1:80/TCP rr [10.1.0.1:8080] local",
				"addresses4 203.0.113.1", "frontends4 203.0.113.1", "masquerades4 203.0.113.1"),
		},
		"a cluster IP becomes local even if the machine has it, for example on the interface of kube-proxy": {
			endpoints: []string{"10.1.0.1"},
			edit:      func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1")) },
			want:      []string{"addresses4 192.0.2.1", "cluster-ips4 192.0.2.1", "frontends4 192.0.2.1", "192.0.2.1:80/TCP rr [10.1.0.1:8080] local"},
		},
		"health checks at a load-balancer IP that has the port of the service": {
			endpoints: []string{"!10.1.0.1"},
			edit: func(s *api.Service) {
				loadBalancer(s)
				s.ExternalTrafficToLocal, s.HealthCheckNodePort = true, 30999
			},
			want: []string{"health-checks4 203.0.113.1 port 30999 to 192.0.2.1 port 30999"},
		},
		"health checks at a load-balancer IP that has the port of the program": {
			endpoints: []string{"10.1.0.1"},
			edit:      loadBalancer,
			healthz:   10256,
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local", "203.0.113.1:80/TCP rr [10.1.0.1:8080] local",
				"addresses4 203.0.113.1", "frontends4 203.0.113.1", "masquerades4 203.0.113.1",
				"health-checks4 203.0.113.1 port 10256 to 192.0.2.1 port 10256"),
		},
		"source ranges": {
			endpoints: []string{"10.1.0.1"},
			edit: func(s *api.Service) {
				loadBalancer(s)
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{
					netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("198.51.100.128/25"),
				}}}
			},
			want: append(clusterIP, "10.96.0.1:80/TCP rr [10.1.0.1:8080] local", "203.0.113.1:80/TCP rr [10.1.0.1:8080] local",
				"addresses4 203.0.113.1", "frontends4 203.0.113.1", "masquerades4 203.0.113.1", "restricted4 203.0.113.1 to list 5"),
		},
		"with internal policy Local, connections are dropped if all endpoints are elsewhere": {
			endpoints: []string{"10.1.0.2"},
			edit:      func(s *api.Service) { s.InternalTrafficToLocal = true },
			want:      append(clusterIP, "10.96.0.1:80/TCP rr [] local", "drops4 10.96.0.1"),
		},
		"a service that IPVS cannot serve": {
			endpoints: []string{"!10.1.0.1"},
			edit:      func(s *api.Service) { s.AffinitySeconds = 90 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := planner{scheduler: "rr", annotation: "scheduler", healthzPort: test.healthz, nodeNetworks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, nodePortAddrs: []netip.Addr{
				netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1"),
			}}
			p.machineAddrs = p.nodePortAddrs
			v := view(test.endpoints, test.edit)
			for i, weight := range test.weights {
				v.Endpoints[i].Weight = weight
			}
			got, err := p.plan(v, testList)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(slices.Sorted(slices.Values(test.want)), describe(got)); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOnlyUDPFlowsToRemovedEndpointsEnd(t *testing.T) {
	p := planner{scheduler: "rr"}
	wantedBy := func(protocol api.Protocol) *wanted {
		got, err := p.plan(view([]string{"10.1.0.1", "~10.1.0.2"}, func(s *api.Service) { s.Ports[0].Protocol = protocol }), testList)
		if err != nil {
			t.Fatal(err)
		}
		return &got.frontends[0].wanted
	}
	w, tcp := wantedBy(api.UDP), wantedBy(api.TCP)
	draining, removed := netip.MustParseAddrPort("10.1.0.2:8080"), netip.MustParseAddrPort("10.1.0.3:8080")
	has := func(w *wanted, at netip.AddrPort) bool { _, ok := w.index(at); return ok }
	if has(w, draining) || !w.keeps(draining, api.UDP) {
		t.Error("a draining endpoint must keep its flows and get no new ones")
	}
	if w.keeps(removed, api.UDP) || !tcp.keeps(removed, api.TCP) {
		t.Error("a removed endpoint must keep its TCP connections only")
	}
	if has(tcp, draining) || !tcp.keeps(draining, api.TCP) {
		t.Error("a draining endpoint must keep its TCP connections and get no new ones")
	}
}

func TestInvalidSchedulerIsNamedAndServiceUsesDefault(t *testing.T) {
	p := planner{scheduler: "rr", annotation: "scheduler"}
	got, err := p.plan(view([]string{"10.1.0.1"}, func(s *api.Service) { s.Annotations = map[string]string{"scheduler": "no such one"} }), testList)
	if err == nil || !strings.Contains(err.Error(), `annotation scheduler: "no such one"`) {
		t.Errorf("error %v does not name the annotation", err)
	}
	if got.frontends[0].scheduler != "rr" {
		t.Errorf("scheduler %q", got.frontends[0].scheduler)
	}
}

// TestNodePortWinsAgainstExternalIP checks conflicts in any order of delivery.
func TestNodePortWinsAgainstExternalIP(t *testing.T) {
	address := netip.MustParseAddr("192.0.2.1")
	nodePort := view([]string{"10.1.0.1"}, func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 })
	external := view([]string{"10.1.0.2"}, func(s *api.Service) {
		s.Name, s.Ports[0].Port, s.IPs.ExternalIPs = "other", 30080, api.NewIPSet(address)
		s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	})
	both := view([]string{"10.1.0.2"}, func(s *api.Service) {
		s.Name, s.Type, s.Ports[0].Port, s.Ports[0].NodePort, s.IPs.ExternalIPs = "both", api.NodePort, 30080, 30080, api.NewIPSet(address)
	})
	type batch []*api.View
	for name, test := range map[string]struct {
		batches []batch
		fails   *api.View
	}{
		"in one batch":         {[]batch{{external, nodePort}}, external},
		"node port first":      {[]batch{{nodePort}, {external}}, external},
		"external IP first":    {[]batch{{external}, {nodePort}}, external},
		"external IP again":    {[]batch{{nodePort}, {external}, {external}}, external},
		"both of one service":  {[]batch{{both}}, both},
		"a service comes back": {[]batch{{both}, {both}}, both},
	} {
		servers := fakeServers{}
		n := newMemoryNode(t, netnstest.New(t), servers)
		err := n.pass()
		for _, views := range test.batches {
			err = n.deliver(&sink.Changes{}, views...)
		}
		failed, _ := sink.Acknowledged(err)
		if err := failed[test.fails.Key()]; len(failed) != 1 || err == nil || !strings.Contains(err.Error(), "192.0.2.1:30080/TCP") {
			t.Errorf("%s: failed services %v, want %s", name, failed, test.fails.Key())
		}
		want := nodePort
		if test.fails == both {
			want = both
		}
		to := servers[id("192.0.2.1:30080", api.TCP)].destinations
		if got := to[netip.AddrPortFrom(want.Endpoints[0].Addr, 8080)]; got.weight != 1 {
			t.Errorf("%s: the destinations are %v, want %s", name, to, want.Endpoints[0].Addr)
		}
	}
}

func TestNewAddressOfNodeNetworkCausesPass(t *testing.T) {
	d := newDataplane(&options{verifyInterval: -1, public: Options{NodeNetworks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}})
	for _, step := range []struct {
		addr string
		want bool
	}{{"10.1.0.1", true}, {"192.0.2.9", false}} {
		next := d.planner
		next.machineAddrs = []netip.Addr{netip.MustParseAddr(step.addr)}
		if got := d.follow(next); got != step.want {
			t.Errorf("after the machine got %s: follow is %t", step.addr, got)
		}
	}
}

// stopSink counts the calls of its method Stop.
type stopSink struct {
	sink.Func
	stops int
}

func (s *stopSink) Stop(context.Context) error {
	s.stops++
	return nil
}

func TestFailedStartStopsWhatItStarted(t *testing.T) {
	connections := &stopSink{}
	const notOpen = 1 << 20
	b, err := newBackend(options{public: Options{Options: backends.Options{NetNS: notOpen, Sysctls: backends.IgnoreSysctls, NodeAddresses: nodeaddr.Of(), Conntrack: connections}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.start(t.Context()); err == nil || connections.stops != 1 {
		t.Errorf("error %v, connection tracking was stopped %d times, want once", err, connections.stops)
	}
}

func TestOwnersOfInstancesDiffer(t *testing.T) {
	if a, b := owner("kpng-ipvs"), owner("kpng-ipvs-b"); a == b || (a|b)&^ownerMask != 0 {
		t.Errorf("owners %#x and %#x", a, b)
	}
}

func TestInvalidOptionsAreRefused(t *testing.T) {
	for name, opts := range map[string]Options{
		"instance":   {Options: backends.Options{Instance: "a b"}},
		"interface":  {Interface: "much-too-long-name"},
		"scheduler":  {Scheduler: "r r"},
		"bit":        {Options: backends.Options{MasqueradeMark: 3}},
		"kube-proxy": {Options: backends.Options{MasqueradeMark: 0x4000}},
		"CIDR":       {Options: backends.Options{ClusterCIDRs: []netip.Prefix{{}}}},
		"nodes":      {NodeNetworks: []netip.Prefix{{}}},
		"needs":      {Options: backends.Options{MasqueradeOutsiders: true}},
		"without a":  {Options: backends.Options{Instance: "ipvs"}},
	} {
		if _, err := newBackend(options{public: opts}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// Each virtual server has its own destinations, so 50 ports, 1,001 addresses and 100
// endpoints need 5 million.
func TestTooManyDestinationsAreRefused(t *testing.T) {
	var endpoints []string
	for i := range 100 {
		endpoints = append(endpoints, fmt.Sprint("10.1.0.", i+1))
	}
	v := view(endpoints, func(s *api.Service) {
		s.IPs.ExternalIPs = apitest.IPs("198.51.0.0", 1000)
		for i := range 49 {
			port := s.Ports[0]
			port.Name, port.Port = fmt.Sprint("port-", i), int32(1000+i)
			s.Ports = append(s.Ports, port)
		}
	})
	p := planner{scheduler: "rr"}
	got, err := p.plan(v, testList)
	if got != nil || err == nil || !strings.Contains(err.Error(), "more than 1000000 destinations") {
		t.Errorf("the error is %v", err)
	}
	v.Service.Ports = v.Service.Ports[:9]
	if got, err := p.plan(v, testList); err != nil || len(got.frontends) != 9*1001 {
		t.Errorf("9 ports: %v", err)
	}
}
