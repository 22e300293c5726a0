// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// comparedView returns a view with a frontend that has sources. Views of two calls share no memory.
func comparedView() *api.View {
	addr := netip.MustParseAddr
	service := &api.Service{
		Namespace: "default", Name: "web", Type: api.LoadBalancer,
		IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(addr("10.96.0.1")), LoadBalancerIPs: api.NewIPSet(addr("192.0.2.1"))},
		Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}},
	}
	service.SourceRanges = []api.SourceRanges{{TargetIPs: service.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.0/24")}}}
	view := &api.View{Service: service}
	for _, a := range []string{"10.0.0.1", "10.0.0.2"} {
		view.Endpoints = append(view.Endpoints, api.Endpoint{Addr: addr(a), Scopes: api.Scopes{Internal: true, External: true, Cluster: true}})
	}
	return view
}

func frontendOf(t *testing.T, v *api.View) nodeview.Frontend {
	for f := range nodeview.Frontends(v) {
		if f.Kind == nodeview.LoadBalancerIP {
			return f
		}
	}
	t.Fatal("the view lacks the frontend")
	panic("unreachable")
}

// TestEachFieldOfAFrontendIsCompared changes each field of one of two equal frontends.
func TestEachFieldOfAFrontendIsCompared(t *testing.T) {
	type change func(*nodeview.Frontend)
	changes := map[string][]change{
		"FrontendKey": {func(f *nodeview.Frontend) { f.Port++ }, func(f *nodeview.Frontend) { f.Kind = nodeview.NodePort }},
		"ServicePort": {
			func(f *nodeview.Frontend) { f.ServicePort = nil },
			func(f *nodeview.Frontend) { p := *f.ServicePort; p.Name = "other"; f.ServicePort = &p },
		},
		"Elsewhere": {
			func(f *nodeview.Frontend) { f.Elsewhere.Verdict++ },
			func(f *nodeview.Frontend) { f.Elsewhere.List++ },
			func(f *nodeview.Frontend) { f.Elsewhere.Endpoints = nil },
			func(f *nodeview.Frontend) { f.Elsewhere.Endpoints = f.Elsewhere.Endpoints[:1] },
			func(f *nodeview.Frontend) { f.Elsewhere.Endpoints[1].Port++ },
			func(f *nodeview.Frontend) {
				e := *f.Elsewhere.Endpoints[1].Endpoint
				e.Local = !e.Local
				f.Elsewhere.Endpoints[1].Endpoint = &e
			},
		},
		"Node": {
			func(f *nodeview.Frontend) { f.Node.Verdict++ },
			func(f *nodeview.Frontend) { f.Node.List++ },
			func(f *nodeview.Frontend) { f.Node.Endpoints = f.Node.Endpoints[:1] },
		},
		"Existing": {func(f *nodeview.Frontend) {
			v := comparedView()
			v.Draining = []api.Endpoint{{Addr: netip.MustParseAddr("10.0.0.3"), Scopes: v.Endpoints[0].Scopes}}
			f.Existing = frontendOf(t, v).Existing
		}},
		"Sources": {
			func(f *nodeview.Frontend) { f.Sources.Restricted = !f.Sources.Restricted },
			func(f *nodeview.Frontend) { f.Sources.Ranges = f.Sources.Ranges[:1] },
			func(f *nodeview.Frontend) { f.Sources.Ranges[0] = netip.MustParsePrefix("10.0.0.0/9") },
			func(f *nodeview.Frontend) { f.Sources.Own = append(f.Sources.Own, netip.MustParseAddr("192.0.2.9")) },
		},
		"Masquerade": {func(f *nodeview.Frontend) { f.Masquerade += "x" }},
		"Affinity":   {func(f *nodeview.Frontend) { f.Affinity = time.Second }},
		"Algorithm":  {func(f *nodeview.Frontend) { f.Algorithm = api.HashClient }},
	}
	equal, other := frontendOf(t, comparedView()), frontendOf(t, comparedView())
	if !new(comparison).frontends(&equal, &other) || !new(comparison).frontends(&equal, &equal) {
		t.Error("equal frontends differ")
	}
	without := equal
	without.ServicePort = nil
	if !new(comparison).frontends(&without, &without) {
		t.Error("equal frontends of an all-ports service differ")
	}
	for i := range reflect.TypeFor[nodeview.Frontend]().NumField() {
		name := reflect.TypeFor[nodeview.Frontend]().Field(i).Name
		if len(changes[name]) == 0 {
			t.Errorf("the test has no change of %s", name)
		}
		for n, change := range changes[name] {
			a, b := frontendOf(t, comparedView()), frontendOf(t, comparedView())
			change(&b)
			var c comparison
			for range 2 { // in the second round, the lists are the same as in the last comparison
				if c.frontends(&a, &b) {
					t.Errorf("%s: change %d is not found", name, n)
				}
				if c.frontends(&b, &a) {
					t.Errorf("%s: change %d is not found in the other order", name, n)
				}
			}
		}
	}
}

// TestExistingFlowsAreComparedAgain compares several frontends by one comparison.
func TestExistingFlowsAreComparedAgain(t *testing.T) {
	v := comparedView()
	v.Draining = []api.Endpoint{{Addr: netip.MustParseAddr("10.0.0.3"), Scopes: v.Endpoints[0].Scopes}}
	x, y, other := frontendOf(t, comparedView()).Existing, frontendOf(t, comparedView()).Existing, frontendOf(t, v).Existing
	var c comparison
	for i, step := range []struct {
		a, b nodeview.Existing
		same bool
	}{{x, y, true}, {other, y, false}, {x, y, true}, {x, other, false}, {x, other, false}, {other, other, true}, {nodeview.Existing{}, x, false}} {
		if same := c.sameExisting(step.a, step.b); same != step.same {
			t.Errorf("step %d: same %t", i, same)
		}
	}
}

// TestListsAreComparedOnce counts the comparisons of elements. The frontends of a service
// share their lists, so a service with many ports and endpoints costs their sum.
func TestListsAreComparedOnce(t *testing.T) {
	count := 0
	equal := func(a, b int) bool { count++; return a == b }
	a, b, c, d := []int{1, 2, 3}, []int{1, 2, 3}, []int{1, 2, 4}, []int{1, 2, 4}
	var last lastCompared[int]
	for i, step := range []struct {
		a, b  []int
		same  bool
		count int
	}{
		{a, b, true, 3}, {a, b, true, 0}, {a, c, false, 3}, {a, c, false, 0},
		{a[:2], c[:2], true, 2}, {a[:2], c[:2], true, 0}, {b, c, false, 3}, {a, a, true, 0},
		{nil, nil, true, 0}, {a, nil, false, 0}, {nil, a, false, 0}, {b, c, false, 0}, {d, c, true, 3}, {d, b, false, 3},
	} {
		count = 0
		if same := last.equal(step.a, step.b, equal); same != step.same || count != step.count {
			t.Errorf("step %d: same %t after %d comparisons, want %t after %d", i, same, count, step.same, step.count)
		}
	}
}
