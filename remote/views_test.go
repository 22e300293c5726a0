// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/nodeview"
	"google.golang.org/protobuf/proto"
)

func stateOf(name string, slices ...*api.EndpointSlice) *api.ServiceState {
	return &api.ServiceState{Service: &api.Service{Namespace: "ns", Name: name, Type: api.ClusterIP}, Slices: slices}
}

func TestViewsAreEvicted(t *testing.T) {
	const limit = 100_000
	v := newViews(limit)
	used := stateOf("used")
	first := v.viewFor(new(cluster.Snapshot), used, "n", "z", false)
	for i := range 1000 {
		v.viewFor(new(cluster.Snapshot), stateOf(fmt.Sprint("s", i)), "n", "z", false)
		if v.viewFor(new(cluster.Snapshot), used, "n", "z", false) != first {
			t.Fatal("a view in use was evicted")
		}
		if v.size > limit {
			t.Fatalf("%d bytes are cached", v.size)
		}
	}
	if n := v.lru.Len(); n != len(v.states) || n > 200 || n < 50 {
		t.Errorf("%d states are cached, of which %d are known", n, len(v.states))
	}
	sum := 0
	for e := v.lru.Front(); e != nil; e = e.Next() {
		sum += e.Value.(*sharedState).size
	}
	if sum != v.size {
		t.Errorf("size is %d, want %d", v.size, sum)
	}
}

// While a view of a state is computed, the state is evicted and added again.
func TestViewOfEvictedState(t *testing.T) {
	v := newViews(1) // only the last state fits into the cache
	state := stateOf("s")
	first := v.shared(state)
	v.shared(stateOf("another"))
	again := v.shared(state)
	v.grow(first, 1000)
	if v.size != again.size {
		t.Errorf("size is %d, want %d", v.size, again.size)
	}
}

// The test computes the view of each node twice: with a cache and without a cache. In the
// cache, nodes share marshalled endpoints. Both views must be equal.
func TestClassesShareEndpoints(t *testing.T) {
	const nodes = 8
	r := rand.New(rand.NewPCG(1, 1))
	random := func() bool { return r.IntN(2) > 0 }
	for range 100 {
		slice := &api.EndpointSlice{Family: api.IPv4, Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 80}}}
		for i := range byte(2 * nodes) {
			slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
				Addr: netip.AddrFrom4([4]byte{10, 0, 0, i}), Details: &api.EndpointDetails{NodeName: apitest.NodeName(r.IntN(nodes))},
				Conditions: api.Conditions{Ready: random(), Serving: random(), Terminating: random()},
			})
		}
		state := stateOf("s", slice)
		state.Service.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, 1, 0, 0}))
		state.Service.Ports = []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 80}}
		state.Service.InternalTrafficToLocal = random()
		v := newViews(1 << 20)
		for n := range nodes {
			name := apitest.NodeName(n)
			got := v.viewFor(new(cluster.Snapshot), state, name, "", false)
			want, err := newWireView(got.id, nodeview.View(state, &api.Node{Name: name}), new(marshalled))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want.endpoints, got.endpoints, cmp.AllowUnexported(wireEndpoint{})); diff != "" {
				t.Fatalf("%s (- computed alone, + computed with others):\n%s", name, diff)
			}
		}
		// Each endpoint is marshalled at most twice: for its own node, and for all other nodes.
		if got, most := int(v.values.Load()), nodes+2*len(slice.Endpoints); got > most {
			t.Errorf("%d values were marshalled, want at most %d", got, most)
		}
	}
}

func TestConcurrentRequestsComputeViewOnce(t *testing.T) {
	v := newViews(1 << 20)
	s := stateOf("s")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() { v.viewFor(new(cluster.Snapshot), s, fmt.Sprint("node-", i), fmt.Sprint("zone-", i%2), false) })
	}
	wg.Wait()
	if n := v.computed.Load(); n != 1 {
		t.Errorf("%d views", n)
	}
}

func TestClasses(t *testing.T) {
	s := newSharedState(stateOf("s", &api.EndpointSlice{Endpoints: []api.SliceEndpoint{
		{Details: &api.EndpointDetails{NodeName: "runs"}},
		{},
		{Details: &api.EndpointDetails{Hints: &api.Hints{ForNodes: []string{"hinted"}, ForZones: []string{"zone"}}}},
	}}))
	for _, test := range []struct {
		name, node, zone string
		want             class
	}{
		{"an endpoint runs there", "runs", "", class{node: "runs"}},
		{"a hint names it", "hinted", "", class{node: "hinted"}},
		{"a hint names the zone", "n", "zone", class{zone: "zone"}},
		{"both", "runs", "zone", class{node: "runs", zone: "zone"}},
		{"neither", "n", "another", class{}},
		{"no node", "", "", class{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := s.classOf(test.node, test.zone, false); got != test.want {
				t.Errorf("class %+v, want %+v", got, test.want)
			}
		})
	}
}

// FuzzDelta applies the difference of two random views to a client's copy of the first
// view. The result must be the second view.
func FuzzDelta(f *testing.F) {
	for seed := range uint64(10) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		old, new := randomView(r, 1), randomView(r, 2)
		for _, who := range []audience{standard, complete} {
			has := map[string]string{}
			for _, step := range []*wireDelta{delta(nil, old, who), delta(old, new, who)} {
				apply(t, has, step)
			}
			if once := delta(old, new, who); once != delta(old, new, who) {
				t.Error("a difference was computed twice")
			}
			want := map[string]string{}
			apply(t, want, delta(nil, new, who))
			if fmt.Sprint(has) != fmt.Sprint(want) {
				t.Errorf("audience %d: client has\n%q\nwant\n%q", who, has, want)
			}
			apply(t, has, delta(new, nil, who))
			if len(has) > 0 {
				t.Errorf("audience %d: %q remains", who, has)
			}
		}
	})
}

func randomView(r *rand.Rand, id uint64) *wireView {
	v := &api.View{Service: &api.Service{Namespace: "ns", Name: "s", AllPorts: r.IntN(2) > 0}}
	seen := map[string]bool{}
	for range r.IntN(8) {
		e := apitest.Random[api.Endpoint](r)
		e.PortOverrides = nil // a key contains the overrides, so more keys are equal without overrides
		if seen[e.Key()] {
			continue
		}
		seen[e.Key()] = true
		if r.IntN(3) > 0 {
			v.Endpoints = append(v.Endpoints, e)
		} else {
			v.Draining = append(v.Draining, e)
		}
	}
	w, err := newWireView(id, v, new(marshalled))
	if err != nil {
		panic(err)
	}
	return w
}

// apply applies the operations of d to a client's values. The keys of the map are paths.
func apply(t *testing.T, has map[string]string, d *wireDelta) {
	t.Helper()
	for _, frames := range d {
		for _, f := range frames {
			var item localv1.OpItem
			if err := proto.Unmarshal(f.item(), &item); err != nil {
				t.Fatal(err)
			}
			switch op := item.Op.(type) {
			case *localv1.OpItem_Set:
				has[op.Set.Ref.Path] = string(op.Set.Bytes)
			case *localv1.OpItem_Delete:
				if _, ok := has[op.Delete.Path]; !ok {
					t.Errorf("%s is deleted but does not exist", op.Delete.Path)
				}
				delete(has, op.Delete.Path)
			}
		}
	}
}
