// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// manyFrontends returns a view that has ports × addrs external frontends.
func manyFrontends(ports, addrs int, endpoints ...string) *api.View {
	return view(endpoints, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = apitest.IPs("198.18.0.0", addrs)
		s.Ports = nil
		for i := range ports {
			s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.UDP, Port: int32(80 + i), TargetPort: 8080})
		}
	})
}

// TestPlansAreLinear plans services with more and more frontends. The time must not grow
// with the square of their number, and frontends must share their lists of endpoints.
func TestPlansAreLinear(t *testing.T) {
	p := planner{scheduler: "rr"}
	measure := func(ports, addrs int) time.Duration {
		best := time.Hour
		v := manyFrontends(ports, addrs, "!10.1.0.1", "10.1.0.2")
		for range 5 {
			begin := time.Now()
			planned, err := p.plan(v, testList)
			if err != nil || len(planned.frontends) != ports*(addrs+1) {
				t.Fatalf("the plan has %d frontends (%v)", len(planned.frontends), err)
			}
			best = min(best, time.Since(begin))
			first := map[uint16]*frontendPlan{} // external frontends by port
			for i := range planned.frontends {
				f := &planned.frontends[i]
				if o := first[f.id.Port()]; o != nil && (&o.endpoints[0] != &f.endpoints[0] || &o.existing[0] != &f.existing[0]) {
					t.Fatalf("%s and %s have copies of their endpoints", o.id, f.id)
				}
				if f.id.Addr() != netip.MustParseAddr("10.96.0.1") {
					first[f.id.Port()] = f
				}
			}
		}
		return best
	}
	var few, many time.Duration
	for range 10 { // other programs may disturb some of the measurements
		if few, many = measure(20, 100), measure(20, 400); many <= 8*few {
			return
		}
	}
	t.Errorf("a plan with 2,020 frontends takes %v, and one with 8,020 takes %v", few, many)
}

// TestTableOfSourceRanges changes the source ranges of services. It reads the table after
// each change, and after a new process has taken it over.
func TestTableOfSourceRanges(t *testing.T) {
	ns := netnstest.New(t)
	var n *node
	var d *dataplane
	servers := fakeServers{}
	begin := func() {
		t.Helper()
		// The limit is low, so that there are several transactions.
		n = newMemoryNode(t, ns, servers, func(o *options) { o.maxElements = 1000 })
		d = n.dataplane
		if err := n.deliver(&sink.Changes{First: true, NodeChanged: true}); err != nil {
			t.Fatal(err)
		}
	}
	begin()
	from := func(name string, ip string, ranges ...netip.Prefix) *api.View {
		return view([]string{"10.1.0.1"}, func(s *api.Service) {
			s.Name, s.Type, s.IPs.ClusterIPs = name, api.LoadBalancer, api.IPSet{}
			s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr(ip))
			if len(ranges) > 0 {
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: ranges}}
			}
			s.Ports = slices.Repeat(s.Ports, 3)
			for i := range s.Ports {
				s.Ports[i].Port = int32(80 + i)
			}
		})
	}
	views := map[types.NamespacedName]*api.View{}
	sync := func(about string, list ...*api.View) {
		t.Helper()
		if err := n.deliver(&sink.Changes{}, list...); err != nil {
			t.Fatal(err)
		}
		for _, v := range list {
			views[v.Key()] = v
		}
		if err := d.reapLists(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		elements, err := d.table.read(t.Context())
		if err != nil || !maps.Equal(elements, d.elements) {
			t.Fatalf("%s: the table has %d elements (%v), want %d", about, len(elements), err, len(d.elements))
		}
		got := map[netip.Addr][]netip.Prefix{}
		for e := range elements {
			if e.set.kind == restricted && e.server().Port() == 80 {
				got[e.addr()] = nil
				for r := range elements {
					if of, ok := sourcelists.ParseKey([]byte(r.key)); ok && r.set.kind == sources && of.List == binary.NativeEndian.Uint32([]byte(e.value)) {
						got[e.addr()] = append(got[e.addr()], of.Prefix)
					}
				}
			}
		}
		for _, v := range views {
			var want []netip.Prefix
			if len(v.Service.SourceRanges) > 0 {
				want = v.Service.SourceRanges[0].Prefixes
			}
			addr := v.Service.IPs.LoadBalancerIPs.Family(api.IPv4)[0]
			if is, ok := got[addr]; sourcelists.NewRanges(api.IPv4, is) != sourcelists.NewRanges(api.IPv4, want) || ok != (want != nil) {
				t.Errorf("%s: %s admits %v, want %v", about, addr, is, want)
			}
		}
	}
	parse := netip.MustParsePrefix
	var many []netip.Prefix
	for i := range 2500 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	sync("without ranges", from("a", "203.0.113.1"), from("b", "203.0.113.2"))
	sync("with ranges", from("a", "203.0.113.1", parse("192.0.2.0/24"), parse("192.0.2.0/25")), from("b", "203.0.113.2", parse("192.0.2.0/24")))
	sync("many ranges", from("a", "203.0.113.1", many...), from("b", "203.0.113.2", many...))
	sync("fewer ranges", from("b", "203.0.113.2", many[1:]...))
	begin()
	sync("after a restart", from("a", "203.0.113.1", many...), from("b", "203.0.113.2", many[1:]...))
	sync("other ranges", from("b", "203.0.113.2", parse("192.0.2.0/24")))
	sync("no ranges any more", from("a", "203.0.113.1"), from("b", "203.0.113.2"))
	if err := n.deliver(&sink.Changes{Last: true}); err != nil {
		t.Fatal(err)
	}
	if err := d.reapLists(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	for e := range d.elements {
		if e.set.kind == sources || e.set.kind == restricted {
			t.Errorf("%s has %x without source ranges", e.set.name(), e.key)
		}
	}
}

// TestAnUpdateKeepsSourceRanges reads a table of an earlier version, in which each
// frontend has source ranges of its own. The new table must have these ranges from the
// beginning.
func TestAnUpdateKeepsSourceRanges(t *testing.T) {
	ns := netnstest.New(t)
	table := testTable(t, ns, Options{})
	ns.RunWith(t, `table inet kpng-ipvs {
		set restricted4 { type ipv4_addr . inet_proto . inet_service; elements = { 203.0.113.1 . tcp . 80, 203.0.113.2 . tcp . 80 }; }
		set restricted6 { type ipv6_addr . inet_proto . inet_service; elements = { 2001:db8::1 . tcp . 80 }; }
		set sources4 { type ipv4_addr . inet_proto . inet_service . ipv4_addr; flags interval; elements = {
			203.0.113.1 . tcp . 80 . 192.0.2.0/25, 203.0.113.1 . tcp . 80 . 192.0.2.200 }; }
		set sources6 { type ipv6_addr . inet_proto . inet_service . ipv6_addr; flags interval; elements = { 2001:db8::1 . tcp . 80 . fd00::/9 }; }
		set frontends4 { type ipv4_addr . inet_proto . inet_service; elements = { 203.0.113.1 . tcp . 80 }; }
	}
`, "nft", "-f", "-")
	elements, err := table.read(t.Context())
	if !errors.Is(err, errChanged) {
		t.Fatalf("read returns %v", err)
	}
	if err := table.create(elements); err != nil {
		t.Fatal(err)
	}
	is, err := table.read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lists := map[uint32][]string{}
	for e := range is {
		if r, ok := sourcelists.ParseKey([]byte(e.key)); ok && e.set.kind == sources {
			lists[r.List] = append(lists[r.List], r.Prefix.String())
		}
	}
	got := map[string]string{}
	for e := range is {
		if e.set.kind == restricted {
			ranges := lists[binary.NativeEndian.Uint32([]byte(e.value))]
			slices.Sort(ranges)
			got[e.server().String()] = fmt.Sprint(ranges)
		}
	}
	want := map[string]string{
		"203.0.113.1:80/TCP": "[192.0.2.0/25 192.0.2.200/32]", "203.0.113.2:80/TCP": "[]", "[2001:db8::1]:80/TCP": "[fd00::/9]",
	}
	if !maps.Equal(got, want) {
		t.Errorf("the new table has the source ranges %v, want %v", got, want)
	}
}
