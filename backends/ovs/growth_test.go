// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/sink"
)

// shape is the size of a service of type LoadBalancer.
type shape struct {
	ports, addresses, endpoints, ranges int
	protocol                            api.Protocol
	affinity                            bool
}

// view returns a service of this size. Its first endpoint is on this node.
func (s shape) view(name string) *api.View {
	var endpoints []string
	for i := range s.endpoints {
		endpoints = append(endpoints, netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}).String())
	}
	if s.endpoints > 0 {
		endpoints[0] = "!" + endpoints[0]
	}
	return view(name, "10.96.0.1", endpoints, func(svc *api.Service) {
		svc.Type = api.LoadBalancer
		svc.Ports = nil
		for i := range s.ports {
			p := api.PortMapping{Name: fmt.Sprint("p", i), Protocol: s.protocol, Port: int32(i + 1), TargetPort: 8080}
			if p.Protocol == 0 {
				p.Protocol = api.TCP
			}
			svc.Ports = append(svc.Ports, p)
		}
		svc.IPs.LoadBalancerIPs = apitest.IPs("198.18.0.0", s.addresses)
		if s.ranges > 0 {
			var prefixes []netip.Prefix
			for i := range s.ranges {
				prefixes = append(prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{203, byte(i >> 8), byte(i), 0}), 25))
			}
			svc.SourceRanges = []api.SourceRanges{{TargetIPs: svc.IPs.LoadBalancerIPs, Prefixes: prefixes}}
		}
		if s.affinity {
			withAffinity(svc)
		}
	})
}

// planSize is the number of flows, groups and buckets of a plan.
type planSize struct{ flows, groups, buckets int }

func (s shape) planned() (size planSize) {
	p, _ := planned(s.view("web"))
	size.flows, size.groups = len(p.flows), len(p.groups)
	for _, g := range p.groups {
		size.buckets += len(g.buckets)
	}
	return size
}

// TestPlansAreFrontendsPlusLists checks that endpoints, source ranges, and the endpoints of
// clients with session affinity are written once, and not for each port and address.
func TestPlansAreFrontendsPlusLists(t *testing.T) {
	for name, test := range map[string]struct {
		shape
		want planSize
	}{
		"endpoints":        {shape{ports: 50, addresses: 100, endpoints: 100}, planSize{50 + 5000, 1, 100}},
		"session affinity": {shape{ports: 50, addresses: 10, endpoints: 100, affinity: true}, planSize{50 + 500 + 1 + 100, 2, 100}},
		"source ranges":    {shape{ports: 30, addresses: 10, endpoints: 1, ranges: 1000}, planSize{30 + 2*300 + 1000, 2, 1}},
	} {
		if got := test.planned(); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

// TestAddressesShareTheirSourceRanges checks that a plan does not compute the source ranges
// once for each address.
func TestAddressesShareTheirSourceRanges(t *testing.T) {
	allocated := func(s shape) uint64 {
		view := s.view("web")
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		planned(view)
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	const limit = 1 << 23
	if n := allocated(shape{ports: 1, addresses: 500, endpoints: 1, ranges: 1000}); n > limit {
		t.Errorf("the plan of 500 addresses with 1,000 ranges allocates %d bytes, more than %d", n, limit)
	}
}

// TestFrontendsShareTheirRecords checks that the backend does not store copies of the
// endpoints of UDP frontends, or of actions, for each frontend.
func TestFrontendsShareTheirRecords(t *testing.T) {
	p, _ := planned(shape{ports: 20, addresses: 20, endpoints: 5, protocol: api.UDP}.view("web"))
	seen := map[*kept]bool{}
	for _, d := range p.kept {
		seen[d] = true
	}
	if len(p.kept) != 20*21 || len(seen) != 1 {
		t.Errorf("%d frontends have %d lists of endpoints, want 420 and 1", len(p.kept), len(seen))
	}
	actions := map[*byte]bool{}
	for _, a := range p.flows {
		actions[unsafe.StringData(string(a))] = true
	}
	if len(actions) != 2 { // with and without masquerading
		t.Errorf("%d actions", len(actions))
	}
}

// TestAServiceHasAShareOfNumbers checks a service that needs too many groups. It fails by
// name before the groups are made, and keeps no numbers.
func TestAServiceHasAShareOfNumbers(t *testing.T) {
	n := newNode(t, func(o *options) { o.maxGroups = 3 })
	n.mustPass()
	d := n.backend.dataplane
	lists := func(ports int) *api.View {
		v := shape{ports: ports, endpoints: 1, affinity: true}.view("web")
		v.Endpoints[0].PortOverrides = nil
		for i := range v.Service.Ports { // a list for each port
			v.Endpoints[0].PortOverrides = append(v.Endpoints[0].PortOverrides, api.PortName{Name: v.Service.Ports[i].Name, Port: int32(8000 + i)})
		}
		slices.SortStableFunc(v.Endpoints[0].PortOverrides, func(a, b api.PortName) int { return cmp.Compare(a.Name, b.Name) })
		return v
	}
	var failed *sink.Failed
	if err := n.sync(sink.Changes{}, "", lists(40)); !errors.As(err, &failed) || (*failed)[key("web")] == nil || !strings.Contains(err.Error(), "needs more than 3 groups") {
		t.Fatalf("error %v", err)
	}
	if len(d.numbers.names) != 0 {
		t.Errorf("a service that failed keeps %d numbers", len(d.numbers.names))
	}
	n.mustSync(lists(2))
	n.mustMatch()
}

// TestNumbersAreFreedOnce deletes a service in the last batch of a pass. Two units of this
// batch delete its groups.
func TestNumbersAreFreedOnce(t *testing.T) {
	n := newNode(t)
	a := view("a", "10.96.0.1", []string{"10.244.2.1"})
	n.mustPass(a)
	if err := n.sync(sink.Changes{First: true, NodeChanged: true}, "", a); err != nil {
		t.Fatal(err)
	}
	if err := n.sync(sink.Changes{Last: true}, "a"); err != nil {
		t.Fatal(err)
	}
	n.mustSync(view("b", "10.96.0.2", []string{"10.244.2.2"}), view("c", "10.96.0.3", []string{"10.244.2.3"}))
	n.mustMatch()
	if got := len(n.backend.dataplane.groups); got != 2 {
		t.Errorf("two services have %d groups", got)
	}
}

// TestBundlesAreBounded writes, changes and deletes a service that needs many flows. Each
// bundle must be small, so that the switch can handle other requests between them.
func TestBundlesAreBounded(t *testing.T) {
	n := newNode(t)
	n.mustPass()
	empty := n.Listing(t)
	var bundles, messages, largest, current atomic.Int64
	const bundleControl, bundleAdd, open = 33, 34, 0
	n.restart(t, throughProxy(t, func(m []byte) []byte {
		switch {
		case m[1] == bundleControl && m[13] == open:
			bundles.Add(1)
			current.Store(0)
		case m[1] == bundleAdd:
			messages.Add(1)
			largest.Store(max(largest.Load(), current.Add(1)))
		}
		return nil
	}))
	s := shape{ports: 25, addresses: 200, endpoints: 20, ranges: 10}
	step := func(name string, sync func(), minMessages, maxMessages int64) {
		t.Helper()
		bundles.Store(0)
		messages.Store(0)
		largest.Store(0)
		sync()
		n.mustMatch()
		if got := messages.Load(); got < minMessages || got > maxMessages {
			t.Errorf("%s: %d messages, want %d to %d", name, got, minMessages, maxMessages)
		}
		if largest.Load() > maxBundle || bundles.Load() > messages.Load()/(maxBundle/2)+1 {
			t.Errorf("%s: %d bundles, one with %d messages", name, bundles.Load(), largest.Load())
		}
	}
	n.mustPass()
	step("load", func() { n.mustSync(s.view("web")) }, 10_000, 10_100)
	small := s
	small.endpoints--
	step("lose an endpoint", func() { n.mustSync(small.view("web")) }, 1, 3)
	step("change nothing", func() { n.mustSync(small.view("web")) }, 0, 0)
	n.restart(t)
	step("restart", func() { n.mustPass(small.view("web")) }, 0, 0)
	step("delete", func() {
		if err := n.sync(sink.Changes{}, "web"); err != nil {
			t.Fatal(err)
		}
	}, 5_000, 5_100) // the group's flows need no messages
	n.mustBe(empty)
}

// TestStaleConnectionsOfManyFrontends checks that the endpoints of UDP frontends are compared
// once for each list.
func TestStaleConnectionsOfManyFrontends(t *testing.T) {
	s := shape{ports: 20, addresses: 20, endpoints: 50, protocol: api.UDP}
	old, d := planned(s.view("web"))
	s.endpoints--
	var ops []op
	for frontend, now := range d.planner.mustPlan(s.view("web")).kept {
		var before, now any = old.kept[frontend], now
		ops = append(ops, op{Key: frontend, Old: &before, New: &now})
	}
	stale := d.collectStale(ops)
	if len(stale) != 20*21 {
		t.Errorf("%d stale connections, want one for each frontend", len(stale))
	}
	for c := range stale {
		if c.Endpoint != netip.MustParseAddrPort("10.244.0.49:8080") {
			t.Fatalf("stale %+v", c)
		}
	}
}
