// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"strings"
	"testing"
	"unsafe"

	"github.com/kpng-project/kpng/api"
)

// weighed returns the state of a service with one endpoint for each given weight. The
// value -1 stands for the weight zero.
func weighed(svc *api.Service, weights ...int32) *api.ServiceState {
	slice := &api.EndpointSlice{
		Namespace: svc.Namespace, Name: "s", ServiceName: svc.Name, Family: api.IPv4,
		Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 8080}},
	}
	for i, w := range weights {
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
			Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 1)}), Weight: max(w, 0),
			Conditions: api.Conditions{Ready: true, Serving: true, Drain: w < 0},
		})
	}
	return &api.ServiceState{Service: svc, Slices: []*api.EndpointSlice{slice}}
}

func TestWeights(t *testing.T) {
	for _, test := range []struct {
		name               string
		weights            []int32
		endpoints, drained int
		verdict            Verdict
		different          bool
	}{
		{"none", []int32{0, 0}, 2, 0, Forward, false},
		{"different", []int32{1, 7}, 2, 0, Forward, true},
		{"the default beside another", []int32{0, 7}, 2, 0, Forward, true},
		{"the default, once written", []int32{0, 100}, 2, 0, Forward, false},
		{"an endpoint of weight zero drains", []int32{5, -1}, 1, 1, Forward, false},
		{"if all weights are zero, connections are rejected", []int32{-1, -1}, 0, 2, Reject, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			view := View(weighed(service(), test.weights...), &api.Node{Name: "n"})
			if len(view.Endpoints) != test.endpoints || len(view.Draining) != test.drained {
				t.Errorf("%d endpoints and %d draining, want %d and %d", len(view.Endpoints), len(view.Draining), test.endpoints, test.drained)
			}
			for f := range Frontends(view) {
				if f.Elsewhere.Verdict != test.verdict || len(f.Elsewhere.Endpoints) != test.endpoints {
					t.Errorf("%s: %s", f.FrontendKey, f.Elsewhere)
				}
				for i, e := range f.Elsewhere.Endpoints {
					if e.Weight != max(0, test.weights[i]) {
						t.Errorf("endpoint %d has weight %d, want %d", i, e.Weight, test.weights[i])
					}
				}
			}
			if got := ParametersOf(view).Weights; got != test.different {
				t.Errorf("the service has weights: %t, want %t", got, test.different)
			}
		})
	}
}

// A change of weights changes a view, but neither its lists nor their IDs.
func TestWeightsChangeNoListIDs(t *testing.T) {
	node := &api.Node{Name: "n"}
	old, new := View(weighed(service(), 1, 2), node), View(weighed(service(), 1, 3), node)
	if old.Equal(new) {
		t.Error("views with different weights are equal")
	}
	ids := func(view *api.View) (ids []ListID) {
		for f := range Frontends(view) {
			ids = append(ids, f.Elsewhere.List)
		}
		return ids
	}
	if a, b := ids(old), ids(new); len(a) == 0 || a[0] != b[0] {
		t.Errorf("the list IDs are %v, then %v", a, b)
	}
}

func TestResets(t *testing.T) {
	at := netip.MustParseAddrPort
	for _, reset := range []bool{false, true} {
		svc := service(func(s *api.Service) { s.ResetConnections = reset })
		state := weighed(svc, 1, -1, 1, 1)
		state.Slices[0].Endpoints[2].Conditions = api.Conditions{Serving: true, Terminating: true}
		state.Slices[0].Endpoints[3].Conditions = api.Conditions{Terminating: true}
		for f := range Frontends(View(state, &api.Node{Name: "n"})) {
			for endpoint, want := range map[string]bool{
				"10.1.0.1:8080": false, "10.1.0.2:8080": false, // ready, and weight zero
				"10.1.0.3:8080": true, "10.1.0.4:8080": true, "10.1.0.9:8080": true, "10.1.0.1:9": true, // terminating, and unknown
			} {
				if got := f.Existing.Resets(at(endpoint)); got != (want && reset) {
					t.Errorf("reset %t: connections to %s are reset: %t", reset, endpoint, got)
				}
			}
		}
	}
	if (Existing{}).Resets(at("10.1.0.1:80")) {
		t.Error("the zero Existing resets connections")
	}
}

func TestParametersAreExplained(t *testing.T) {
	svc := service(nodePort(30080), func(s *api.Service) {
		s.Algorithm, s.ResetConnections = api.HashClient, true
		s.SourceRanges = []api.SourceRanges{{NodePorts: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
	})
	e := Explain(weighed(svc, 1, 2), &api.Node{Name: "n"})
	for _, text := range []string{
		"traffic parameters: stable hashing, weights of endpoints, resets of connections to lost endpoints, source ranges of node ports",
		"algorithm       stable hashing by client address\n", "10.1.0.2:8080 (weight 2)", "sources         only 10.0.0.0/8",
	} {
		if !strings.Contains(e.String(), text) {
			t.Errorf("the explanation lacks %q:\n%s", text, e)
		}
	}
	if ParametersOf(nil) != (Parameters{}) || ParametersOf(&api.View{}) != (Parameters{}) {
		t.Error("a deleted service has parameters")
	}
	if (Parameters{}).Without(Parameters{}) != (Parameters{}) {
		t.Error("without parameters, some remain")
	}
	svc.Ports[0].NodePort = 0
	if ParametersOf(e.View).NodePortSources {
		t.Error("a service without node ports has sources of node ports")
	}
	svc.Ports[0].NodePort = 30080
	p := ParametersOf(e.View)
	if got := p.Without(Parameters{Algorithm: true, Resets: true}).String(); got != "weights of endpoints, source ranges of node ports" {
		t.Errorf("a backend with two parameters ignores %q", got)
	}
	if p.Without(p) != (Parameters{}) || (Parameters{}).String() != "" {
		t.Error("a backend with all parameters ignores some")
	}
}

// Services and endpoints are the most numerous objects in memory. The expected sizes are
// the sizes on 64-bit machines, without traffic parameters.
func TestParametersNeedNoMemory(t *testing.T) {
	for name, sizes := range map[string][2]uintptr{
		"Service":       {unsafe.Sizeof(api.Service{}), 416},
		"SliceEndpoint": {unsafe.Sizeof(api.SliceEndpoint{}), 40},
		"Endpoint":      {unsafe.Sizeof(api.Endpoint{}), 144},
	} {
		if sizes[0] > sizes[1] {
			t.Errorf("a %s has %d bytes, want at most %d", name, sizes[0], sizes[1])
		}
	}
}
