// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"k8s.io/apimachinery/pkg/types"
)

// FuzzView derives services, EndpointSlices and nodes from its input. It checks the
// guarantees of View and Frontends. It also compares the results with another
// implementation (oracle_test.go) of the rules that kube-proxy does not have.
func FuzzView(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		seed := make([]byte, 100+r.IntN(400))
		for i := range seed {
			seed[i] = byte(r.Uint32())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d := &dice{data}
		state, node := d.state(), d.node()
		checkView(t, state, node)
		before := View(state, node)
		checkView(t, d.change(state), node)
		checkDiff(t, before, View(d.change(state), node))
	})
}

// dice makes choices that depend on the fuzzed bytes. When no bytes remain, it always
// chooses the first option.
type dice struct{ data []byte }

func (d *dice) n(n int) int {
	if len(d.data) == 0 {
		return 0
	}
	b := d.data[0]
	d.data = d.data[1:]
	return int(b) % n
}

func (d *dice) bool() bool { return d.n(2) == 1 }

func pick[T any](d *dice, from ...T) T { return from[d.n(len(from))] }

func (d *dice) addrs() api.IPSet {
	var s api.IPSet
	for range d.n(3) {
		s.Add(netip.MustParseAddr(pick(d, "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2")))
	}
	return s
}

func (d *dice) state() *api.ServiceState {
	svc := &api.Service{
		Namespace: "default", Name: "web",
		Type: pick(d, api.ClusterIP, api.NodePort, api.LoadBalancer),
		IPs: api.ServiceIPs{
			ClusterIPs: d.addrs(), ExternalIPs: d.addrs(), LoadBalancerIPs: d.addrs(), Headless: d.bool(),
		},
		AllPorts:               d.n(8) == 7,
		ExternalTrafficToLocal: d.bool(),
		InternalTrafficToLocal: d.bool(),
		IPFamilies: pick(d,
			[]api.Family{api.IPv4}, []api.Family{api.IPv6, api.IPv4}, []api.Family{api.IPv6}, nil),
	}
	names := []string{"a", "b", "c"}
	if d.bool() {
		names = names[:1]
	}
	if len(names) == 1 && d.bool() {
		names[0] = ""
	}
	count := 1 + d.n(len(names))
	if d.n(8) == 7 {
		count = 0
	}
	for _, name := range names[:count] {
		svc.Ports = append(svc.Ports, api.PortMapping{
			Name:           name,
			Protocol:       pick(d, api.TCP, api.TCP, api.TCP, api.UDP, api.SCTP, api.UnknownProtocol),
			Port:           pick[int32](d, 1, 2, 3, 1, 2, 3, 0),
			NodePort:       pick[int32](d, 0, 30001, 30002),
			TargetPort:     pick[int32](d, 0, 1001, 1002),
			TargetPortName: pick(d, "", "x"),
		})
	}
	s := &api.ServiceState{Service: svc}
	for i := range pick(d, 2, 1, 3, 2, 3, 0) {
		s.Slices = append(s.Slices, d.slice(fmt.Sprint("web-", i), svc))
	}
	for range d.n(3) {
		lost := api.LostClaim{Winner: types.NamespacedName{Name: "older"}}
		if lost.IP = pick(d, append(slices.Collect(svc.IPs.ExternalIPs.All()), netip.Addr{})...); !lost.IP.IsValid() {
			lost.Family = pick(d, api.IPv4, api.IPv6)
		}
		if !svc.AllPorts {
			lost.Protocol, lost.Port = api.TCP, pick[int32](d, 1, 2, 30001)
		}
		s.Lost = append(s.Lost, lost)
	}
	return s
}

// slice chooses an EndpointSlice. It has most of the ports of the service svc, and other
// ports.
func (d *dice) slice(name string, svc *api.Service) *api.EndpointSlice {
	s := &api.EndpointSlice{
		Namespace: "default", Name: name, ServiceName: "web", Family: pick(d, api.IPv4, api.IPv4, api.IPv6),
	}
	for _, p := range svc.Ports {
		if d.n(4) != 3 {
			s.Ports = append(s.Ports, api.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: pick[int32](d, 1001, 1002, 1001, 1002, 0)})
		}
	}
	for range d.n(2) {
		s.Ports = append(s.Ports, api.EndpointPort{
			Name:     pick(d, "", "a", "b", "c"),
			Protocol: pick(d, api.TCP, api.UDP, api.SCTP, api.UnknownProtocol),
			Port:     pick[int32](d, 1001, 1002, 0),
		})
	}
	pool := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}
	if s.Family == api.IPv6 {
		pool = []string{"fd00::1", "fd00::2"}
	}
	for range 1 + d.n(5) {
		addr := netip.MustParseAddr(pick(d, pool...))
		details := &api.EndpointDetails{Hostname: pick(d, "", "web-0"), NodeName: pick(d, "here", "there", "")}
		ep := api.SliceEndpoint{
			Addr:       addr,
			Details:    details,
			Conditions: d.conditions(),
		}
		switch d.n(3) {
		case 1:
			details.Hints = &api.Hints{ForZones: pick(d, []string{"zone-1"}, []string{"zone-2"}, []string{""})}
		case 2:
			details.Hints = &api.Hints{
				ForNodes: pick(d, []string{"here"}, []string{"there", "here"}, []string{"there"}, []string{""}),
				ForZones: pick(d, nil, []string{"zone-1"}),
			}
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

func (d *dice) conditions() api.Conditions {
	return api.Conditions{Ready: d.bool(), Serving: d.bool(), Terminating: d.bool()}
}

func (d *dice) node() *api.Node {
	return pick(d, thisNode, &api.Node{Name: "there", Labels: map[string]string{"topology.kubernetes.io/zone": "zone-2"}},
		&api.Node{Name: "here"}, &api.Node{Labels: map[string]string{"topology.kubernetes.io/zone": "zone-1"}}, nil)
}

// change returns a copy of s with other endpoint conditions. The copy may lack the first
// EndpointSlice.
func (d *dice) change(s *api.ServiceState) *api.ServiceState {
	c := copyState(s)
	for _, slice := range c.Slices {
		for i := range slice.Endpoints {
			slice.Endpoints[i].Conditions = d.conditions()
		}
	}
	if len(c.Slices) > 0 && d.bool() {
		c.Slices = c.Slices[1:]
	}
	return c
}

func copyState(s *api.ServiceState) *api.ServiceState {
	c := *s
	c.Slices = make([]*api.EndpointSlice, len(s.Slices))
	for i := range s.Slices {
		slice := *s.Slices[i]
		slice.Endpoints = slices.Clone(slice.Endpoints)
		c.Slices[i] = &slice
	}
	return &c
}

func checkView(t *testing.T, state *api.ServiceState, node *api.Node) {
	t.Helper()
	view := View(state, node)
	checkArrival(t, state, node, view)
	checkEndpoints(t, state, view)
	checkOldClient(t, view)
	checkCompetition(t, state, view)
	checkAllPorts(t, state, node, view)
	checkFrontends(t, state, view)
	checkClasses(t, view)
	checkExisting(t, state, view, node)
	checkLists(t, view)
	if e := Explain(state, node); !e.View.Equal(view) || e.String() == "" {
		t.Errorf("the view of Explain differs from View")
	}
	if t.Failed() {
		state, _ := json.Marshal(state)
		t.Logf("state: %s, node: %+v", state, node)
		t.FailNow()
	}
}

// checkArrival checks that the result of View does not depend on the order of
// EndpointSlices and endpoints, and that View does not modify its input.
func checkArrival(t *testing.T, state *api.ServiceState, node *api.Node, view *api.View) {
	t.Helper()
	shuffled := copyState(state)
	if !View(state, node).Equal(view) {
		t.Errorf("View differs when called again")
	}
	if !slices.EqualFunc(shuffled.Slices, state.Slices, (*api.EndpointSlice).Equal) {
		t.Errorf("View changed its input")
	}
	r := rand.New(rand.NewPCG(3, 4))
	r.Shuffle(len(shuffled.Slices), func(i, j int) {
		shuffled.Slices[i], shuffled.Slices[j] = shuffled.Slices[j], shuffled.Slices[i]
	})
	for _, s := range shuffled.Slices {
		r.Shuffle(len(s.Endpoints), func(i, j int) { s.Endpoints[i], s.Endpoints[j] = s.Endpoints[j], s.Endpoints[i] })
	}
	if again := View(shuffled, node); !again.Equal(view) {
		t.Errorf("the view depends on the order of arrival (-original +shuffled):\n%s", cmp.Diff(describe(view), describe(again)))
	}
}

// checkEndpoints checks that Endpoints and Draining are sorted and have no key in common.
// The elements of Endpoints must have scopes, the elements of Draining must have none,
// and keys must depend only on addresses and ports.
func checkEndpoints(t *testing.T, state *api.ServiceState, view *api.View) {
	t.Helper()
	possible := possibleKeys(state)
	seen := map[string]bool{}
	for _, list := range [][]api.Endpoint{view.Endpoints, view.Draining} {
		for i := range list {
			e := &list[i]
			if i > 0 && ordering.Endpoints(&list[i-1], e) >= 0 {
				t.Errorf("%s is listed after %s", e.Key(), list[i-1].Key())
			}
			if seen[e.Key()] {
				t.Errorf("%s comes twice", e.Key())
			}
			seen[e.Key()] = true
			if !possible[e.Key()] {
				t.Errorf("no slice has the key %s", e.Key())
			}
			if !e.Addr.IsValid() || e.Addr != e.Addr.Unmap() {
				t.Errorf("%s has the address %s", e.Key(), e.Addr)
			}
		}
	}
	for i := range view.Endpoints {
		if view.Endpoints[i].Scopes == (api.Scopes{}) {
			t.Errorf("%s is in the view, but on no list", view.Endpoints[i].Key())
		}
	}
	for i := range view.Draining {
		if e := &view.Draining[i]; e.Scopes != (api.Scopes{}) || e.PortScopes != nil {
			t.Errorf("%s is draining, but on a list", e.Key())
		}
	}
}

func possibleKeys(state *api.ServiceState) map[string]bool {
	keys := map[string]bool{}
	for _, slice := range state.Slices {
		for i := range slice.Endpoints {
			keys[oracleKey(state.Service, slice, slice.Endpoints[i].Addr)] = true
		}
	}
	return keys
}

// If EndpointSlices have several entries with the same address and port, checkCompetition
// checks that the view has the preferred entry. It also checks that the draining
// endpoints are exactly the serving or ready endpoints without scopes.
func checkCompetition(t *testing.T, state *api.ServiceState, view *api.View) {
	t.Helper()
	listed, drains := map[string]bool{}, map[string]bool{}
	for i := range view.Endpoints {
		listed[view.Endpoints[i].Key()] = true
	}
	for _, p := range oraclePorts(state.Service) {
		for _, family := range state.Service.Families() {
			entries := oracleEntries(state, p, family)
			for i := range view.Endpoints {
				e := &view.Endpoints[i]
				if api.FamilyOf(e.Addr) != family || scopesOf(e, p) == (api.Scopes{}) {
					continue
				}
				var port int32
				if p != nil {
					port = e.TargetPort(p)
				}
				best, ok := entries[netip.AddrPortFrom(e.Addr, uint16(port))]
				if !ok || best.ep.Conditions != e.Conditions || best.ep.Details.Value().NodeName != e.NodeName || oracleKey(state.Service, best.slice, e.Addr) != e.Key() {
					t.Errorf("%s is listed for %s, and the best entry is %+v", e.Key(), portText(p), best.ep)
				}
			}
			for _, e := range entries {
				if key := oracleKey(state.Service, e.slice, e.ep.Addr); (e.ep.Serving || e.ep.Ready) && !listed[key] {
					drains[key] = true
				}
			}
		}
	}
	var got []string
	for i := range view.Draining {
		got = append(got, view.Draining[i].Key())
	}
	slices.Sort(got)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(drains)), got); diff != "" {
		t.Errorf("draining endpoints differ from the rules (-rules +View):\n%s", diff)
	}
}

// checkAllPorts compares the view of an all-ports service with the view of a service with
// one port. All EndpointSlices serve this port.
func checkAllPorts(t *testing.T, state *api.ServiceState, node *api.Node, view *api.View) {
	t.Helper()
	if !state.Service.AllPorts {
		return
	}
	const port = 7
	one, svc := copyState(state), *state.Service
	svc.AllPorts, svc.Ports = false, []api.PortMapping{{Protocol: api.TCP, Port: port, TargetPort: port}}
	one.Service, one.Lost = &svc, nil
	for _, slice := range one.Slices {
		slice.Ports = []api.EndpointPort{{Protocol: api.TCP, Port: port}}
	}
	want := View(one, node)
	for i := range want.Unusable {
		want.Unusable[i].Protocol, want.Unusable[i].Port = 0, 0
	}
	got := *view
	got.Service, got.Lost = want.Service, nil
	if !got.Equal(want) {
		t.Errorf("all ports differ from one port:\n%s", cmp.Diff(describe(want), describe(&got)))
	}
}

// checkOldClient checks that an old client finds the port of every endpoint. Such a
// client knows only PortOverrides and the numeric targetPort.
func checkOldClient(t *testing.T, view *api.View) {
	t.Helper()
	for f := range Frontends(view) {
		for _, e := range slices.Concat(f.Elsewhere.Endpoints, f.Node.Endpoints) {
			if f.ServicePort == nil {
				continue
			}
			old := f.ServicePort.TargetPort
			name := f.ServicePort.Name
			if name == "" {
				name = f.ServicePort.TargetPortName
			}
			for _, o := range e.PortOverrides {
				if o.Name == name {
					old = o.Port
				}
			}
			if old != e.Port || e.Port == 0 {
				t.Errorf("%s of %s: an old client finds port %d, a new client %d", f.FrontendKey, e.Key(), old, e.Port)
			}
		}
	}
}

// checkFrontends checks that each frontend that a Service defines occurs exactly once in
// the results of Frontends and Unserved. Each endpoint of a frontend must be in the view
// and have the frontend's family.
func checkFrontends(t *testing.T, state *api.ServiceState, view *api.View) {
	t.Helper()
	served := map[api.Claim]map[api.Family]bool{}
	for f := range Frontends(view) {
		if served[f.Claim()][f.Family] {
			t.Errorf("%s comes twice", f.FrontendKey)
		}
		if served[f.Claim()] == nil {
			served[f.Claim()] = map[api.Family]bool{}
		}
		served[f.Claim()][f.Family] = true
		for _, e := range slices.Concat(f.Elsewhere.Endpoints, f.Node.Endpoints) {
			if !slices.ContainsFunc(view.Endpoints, func(o api.Endpoint) bool { return o.Equal(e.Endpoint) }) {
				t.Errorf("%s: %s is not in the view", f.FrontendKey, e.Key())
			}
			if api.FamilyOf(e.Addr) != f.Family {
				t.Errorf("%s: %s is of another family", f.FrontendKey, e.Key())
			}
		}
	}
	for _, u := range unserved(view) {
		if served[u.Claim()][u.Family] && (u.Fault == lostClaim || u.Fault == otherFamily) {
			t.Errorf("%s is served and unserved", u.FrontendKey)
		}
	}
	for claim, families := range oracleClaims(state) {
		for family := range families {
			if !served[claim][family] {
				t.Errorf("%v is not served in %s", claim, family)
			}
			delete(served[claim], family)
		}
	}
	for claim, families := range served {
		for family := range families {
			t.Errorf("%v is served in %s although the service does not name it", claim, family)
		}
	}
}

// checkLists checks that two lists have the same ListID if and only if they are equal.
func checkLists(t *testing.T, view *api.View) {
	t.Helper()
	ids, texts := map[string]ListID{}, map[ListID]string{}
	for f := range Frontends(view) {
		for _, traffic := range []Traffic{f.Elsewhere, f.Node} {
			if (traffic.List == 0) != (traffic.Verdict != Forward) {
				t.Errorf("%s: %s has list %d", f.FrontendKey, traffic, traffic.List)
			}
			if traffic.List == 0 {
				continue
			}
			text := traffic.String()
			for _, e := range traffic.Endpoints {
				text += " " + e.Key()
			}
			if id, ok := ids[text]; ok && id != traffic.List {
				t.Errorf("%s: the list %s has the IDs %d and %d", f.FrontendKey, text, id, traffic.List)
			}
			if other, ok := texts[traffic.List]; ok && other != text {
				t.Errorf("%s: the lists %s and %s have the ID %d", f.FrontendKey, text, other, traffic.List)
			}
			ids[text], texts[traffic.List] = traffic.List, text
		}
	}
}

// checkDiff compares two views. It applies the differences to a map with the endpoints of
// the first view. Afterwards, the map must have the endpoints of the second view.
func checkDiff(t *testing.T, before, after *api.View) {
	t.Helper()
	programmed := map[string]api.Endpoint{}
	for _, e := range before.Endpoints {
		programmed[e.Key()] = e
	}
	// Both lists are sorted, so a single loop finds the difference.
	old, new := before.Endpoints, after.Endpoints
	for len(old) > 0 || len(new) > 0 {
		switch {
		case len(new) == 0 || len(old) > 0 && ordering.Endpoints(&old[0], &new[0]) < 0:
			delete(programmed, old[0].Key())
			old = old[1:]
		case len(old) == 0 || ordering.Endpoints(&old[0], &new[0]) > 0:
			if _, ok := programmed[new[0].Key()]; ok {
				t.Fatalf("%s is added, but exists already", new[0].Key())
			}
			programmed[new[0].Key()] = new[0]
			new = new[1:]
		default:
			programmed[new[0].Key()] = new[0]
			old, new = old[1:], new[1:]
		}
	}
	if len(programmed) != len(after.Endpoints) {
		t.Fatalf("%d endpoints after the difference is applied, want %d", len(programmed), len(after.Endpoints))
	}
	for _, e := range after.Endpoints {
		if got := programmed[e.Key()]; !got.Equal(&e) {
			t.Fatalf("%s differs after the difference is applied", e.Key())
		}
	}
}
