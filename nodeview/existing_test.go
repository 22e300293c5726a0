// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
)

// TestClassesAgreeWithFrontends checks that each frontend has the decisions of its class,
// for all policies.
func TestClassesAgreeWithFrontends(t *testing.T) {
	for _, edit := range []func(*api.Service){
		func(*api.Service) {},
		externalLocal,
		func(s *api.Service) { s.InternalTrafficToLocal = true },
		func(s *api.Service) { externalLocal(s); s.InternalTrafficToLocal = true },
	} {
		svc := service(edit, externalIPs("192.0.2.1", "192.0.2.2"), nodePort(30080), func(s *api.Service) {
			s.Ports[0].Name = "http"
			s.Ports = append(s.Ports, api.PortMapping{Name: "other", Protocol: api.TCP, Port: 81, TargetPort: 9090})
		})
		view := View(&api.ServiceState{Service: svc, Slices: endpointSlices("slice a http=8080 other=9090\n10.0.0.1 ready @here\n10.0.0.2 ready @there")}, thisNode)
		checkClasses(t, view)
		if n := len(slices.Collect(Classes(view))); n != 5 {
			t.Errorf("%d classes, want 3 of port http and 2 of the other", n)
		}
	}
	// Another service owns the frontends of the first port with a list.
	svc := service(func(s *api.Service) {
		s.Ports[0].Name = "http"
		s.Ports = append(s.Ports, api.PortMapping{Name: "also", Protocol: api.TCP, Port: 81, TargetPort: 8080})
	})
	checkClasses(t, View(&api.ServiceState{
		Service: svc, Slices: endpointSlices("slice a http=8080 also=8080\n10.0.0.1 ready @here"),
		Lost: []api.LostClaim{{Claim: api.Claim{IP: netip.MustParseAddr("10.96.0.1"), Protocol: api.TCP, Port: 80}}},
	}, thisNode))
	for range Classes(nil) {
		t.Error("a deleted service has classes")
	}
}

// checkClasses checks that each frontend has the decisions of its class.
func checkClasses(t *testing.T, view *api.View) {
	t.Helper()
	classes := map[FrontendKey]Frontend{}
	for c := range Classes(view) {
		if _, twice := classes[c.FrontendKey]; twice {
			t.Errorf("class %s comes twice", c.FrontendKey)
		}
		classes[c.FrontendKey] = c
	}
	for f := range Frontends(view) {
		key := f.FrontendKey
		key.Addr = netip.Addr{}
		want := classes[key]
		want.Addr, want.Sources = f.Addr, f.Sources
		if diff := cmp.Diff(want, f, cmpopts.EquateComparable(Existing{}, netip.Addr{}, netip.Prefix{})); diff != "" {
			t.Errorf("%s (-class +frontend):\n%s", f.FrontendKey, diff)
		}
	}
}

// checkExisting checks Existing and Hairpins against slow computations.
func checkExisting(t *testing.T, state *api.ServiceState, view *api.View, node *api.Node) {
	t.Helper()
	type hairpin struct {
		protocol api.Protocol
		at       netip.AddrPort
	}
	hairpins := map[hairpin]bool{}
	for f := range Frontends(view) {
		want := map[netip.AddrPort]bool{}
		for _, e := range slices.Concat(view.Endpoints, view.Draining) {
			var port int32
			if f.ServicePort != nil {
				if port = e.TargetPort(f.ServicePort); port == 0 {
					continue
				}
			}
			if api.FamilyOf(e.Addr) == f.Family {
				want[netip.AddrPortFrom(e.Addr, uint16(port))] = true
			}
		}
		var got []netip.AddrPort
		for e := range f.Existing.All() {
			got = append(got, e.AddrPort())
			if !want[e.AddrPort()] {
				t.Errorf("%s: flows to %s may continue", f.FrontendKey, e.AddrPort())
			}
		}
		if !slices.IsSortedFunc(got, netip.AddrPort.Compare) || len(got) != len(want) {
			t.Errorf("%s: flows may continue to %v, want %v", f.FrontendKey, got, want)
		}
		for _, e := range slices.Concat(view.Endpoints, view.Draining) {
			for _, port := range []uint16{0, 1001, 1002, 7} {
				at := netip.AddrPortFrom(e.Addr, port)
				may := want[at] || f.ServicePort == nil && want[netip.AddrPortFrom(e.Addr, 0)]
				if f.Existing.Has(at) != may {
					t.Errorf("%s: flows to %s may continue: %v, want %v", f.FrontendKey, at, !may, may)
				}
			}
		}
		// Existing flows to an endpoint that answers may continue, and also flows to all
		// endpoints of the frontend.
		for at, e := range oracleEntries(state, f.ServicePort, f.Family) {
			if (e.ep.Serving || e.ep.Ready) && !want[at] {
				t.Errorf("%s: flows to %s, which answers, may not continue", f.FrontendKey, at)
			}
		}
		for _, e := range slices.Concat(f.Elsewhere.Endpoints, f.Node.Endpoints) {
			if !f.Existing.Has(e.AddrPort()) {
				t.Errorf("%s: new flows to %s may not continue", f.FrontendKey, e.AddrPort())
			}
			if node != nil && node.Name != "" && e.NodeName == node.Name {
				hairpins[hairpin{f.Protocol, e.AddrPort()}] = true
			}
		}
		for _, e := range f.Existing.Without(f.Elsewhere.Endpoints, f.Node.Endpoints) {
			delete(want, e.AddrPort())
		}
		for _, e := range slices.Concat(f.Elsewhere.Endpoints, f.Node.Endpoints) {
			delete(want, e.AddrPort())
		}
		if len(want) != 0 {
			t.Errorf("%s: %v are neither in the lists nor in the rest", f.FrontendKey, want)
		}
	}
	for protocol, e := range Hairpins(view) {
		h := hairpin{protocol, e.AddrPort()}
		// The frontends with this endpoint may be missing, because other services own
		// their addresses.
		if !hairpins[h] && len(view.Lost) == 0 {
			t.Errorf("%s %s is a hairpin, or comes twice", protocol, e.AddrPort())
		}
		delete(hairpins, h)
	}
	if len(hairpins) > 0 {
		t.Errorf("no hairpins: %v", hairpins)
	}
}

// TestPortsShareExisting checks that two ports have equal values of Existing if they lead
// to the same endpoints and target ports. So a backend can use Existing as a map key.
func TestPortsShareExisting(t *testing.T) {
	svc := service(func(s *api.Service) {
		s.Ports = nil
		for i, name := range []string{"http", "same", "partly", "other"} {
			s.Ports = append(s.Ports, api.PortMapping{Name: name, Protocol: api.UDP, Port: int32(80 + i), TargetPortName: name})
		}
	})
	view := View(&api.ServiceState{Service: svc, Slices: endpointSlices(
		"slice a http=8080/UDP same=8080/UDP partly=8080/UDP other=9090/UDP\n10.0.0.1 ready @here\n" +
			"slice b http=8081/UDP same=8081/UDP partly=8082/UDP other=9090/UDP\n10.0.0.2 serving terminating @there")}, thisNode)
	if len(view.Draining) != 1 {
		t.Fatalf("draining endpoints %v", view.Draining)
	}
	values := map[Existing]string{}
	for f := range Frontends(view) {
		values[f.Existing] += " " + f.ServicePort.Name
	}
	if diff := cmp.Diff([]string{" http same", " other", " partly"}, slices.Sorted(maps.Values(values))); diff != "" {
		t.Errorf("ports with equal values (-want +got):\n%s", diff)
	}
}

func TestExistingOfNothing(t *testing.T) {
	var none Existing
	if none.Has(netip.MustParseAddrPort("10.0.0.1:80")) {
		t.Error("the zero value has an endpoint")
	}
	for range none.All() {
		t.Error("the zero value yields an endpoint")
	}
	for range Hairpins(nil) {
		t.Error("a deleted service has hairpins")
	}
}

func TestAddressesOfFrontends(t *testing.T) {
	node := []netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1"), netip.MustParseAddr("10.9.0.2")}
	for want, k := range map[string]FrontendKey{
		"192.0.2.1:80":                   {Kind: ExternalIP, Addr: netip.MustParseAddr("192.0.2.1"), Family: api.IPv4, Protocol: api.TCP, Port: 80},
		"192.0.2.1:0":                    {Kind: ExternalIP, Addr: netip.MustParseAddr("192.0.2.1"), Family: api.IPv4},
		"10.9.0.1:30080 10.9.0.2:30080 ": {Kind: NodePort, Family: api.IPv4, Protocol: api.TCP, Port: 30080},
		"[fd09::1]:30080 ":               {Kind: NodePort, Family: api.IPv6, Protocol: api.TCP, Port: 30080},
	} {
		got := ""
		for at := range k.At(node) {
			got += at.String()
			if k.Kind == NodePort {
				got += " "
			}
		}
		if got != want {
			t.Errorf("%s is served at %q, want %q", k, got, want)
		}
	}
}

// TestEndpointsStop checks that a loop over endpoints can end after each one.
func TestEndpointsStop(t *testing.T) {
	view := View(&api.ServiceState{
		Service: service(externalLocal, externalIPs("192.0.2.1"), ports("http=80")),
		Slices: endpointSlices(`slice a http=8080
			10.0.0.1 ready @here
			10.0.0.2 ready @here
			slice b http=9090
			10.0.0.1 ready @here
			10.0.0.3 ready @here`),
	}, thisNode)
	existing := slices.Collect(Frontends(view))[0].Existing
	stop := func(name string, count int, each func(func() bool)) {
		for n := range count {
			calls := 0
			each(func() bool { calls++; return calls <= n })
			if calls != n+1 {
				t.Errorf("%s: %d calls, want %d", name, calls, n+1)
			}
		}
	}
	stop("Existing", 4, func(next func() bool) { existing.All()(func(Target) bool { return next() }) })
	stop("Hairpins", 4, func(next func() bool) { Hairpins(view)(func(api.Protocol, Target) bool { return next() }) })
}

func TestHairpinsOfOnlyTheLocalList(t *testing.T) {
	view := View(&api.ServiceState{
		Service: service(externalLocal, externalIPs("192.0.2.1")),
		Slices:  endpointSlices("slice a\n10.0.0.1 ready @here zones=zone-2\n10.0.0.2 ready @there zones=zone-1"),
	}, thisNode)
	var got []string
	for protocol, e := range Hairpins(view) {
		got = append(got, protocol.String()+" "+e.AddrPort().String())
	}
	if diff := cmp.Diff([]string{"TCP 10.0.0.1:8080"}, got); diff != "" {
		t.Errorf("hairpins (-want +got):\n%s", diff)
	}
}

// TestExistingYieldsEachEndpointOnce has two entries for an address. Each entry is
// preferred for one port.
func TestExistingYieldsEachEndpointOnce(t *testing.T) {
	view := View(&api.ServiceState{
		Service: service(ports("http=80", "https=443")),
		Slices:  endpointSlices("slice a http=8080 https=8443\n10.0.0.1 serving terminating\nslice b http=8080\n10.0.0.1 ready"),
	}, thisNode)
	if len(view.Endpoints) != 2 {
		t.Fatalf("endpoints %v", describe(view))
	}
	for f := range Frontends(view) {
		if all := slices.Collect(f.Existing.All()); len(all) != 1 {
			t.Errorf("%s: flows may continue to %v, want one endpoint", f.FrontendKey, all)
		}
	}
}
