// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// fakeTable is a table in memory. After it writes or deletes an element, it calls check.
type fakeTable[K comparable, V any] struct {
	elements map[K]V
	max      int
	check    func()
	// err is the error of the next deletion.
	err error
	// noMemory is the number of further calls of set that fail for lack of memory.
	noMemory int
	// written and deleted count the elements.
	written, deleted int
}

var errFull = errors.New("the map is full")

func (t *fakeTable[K, V]) set(keys []K, values []V) (int, error) {
	if t.noMemory > 0 {
		t.noMemory--
		return 0, fmt.Errorf("set: %w", unix.ENOMEM)
	}
	for i, k := range keys {
		if _, ok := t.elements[k]; !ok && len(t.elements) == t.max {
			return i, errFull
		}
		t.elements[k] = values[i]
		t.written++
		t.check()
	}
	return len(keys), nil
}

func (t *fakeTable[K, V]) delete(keys []K) error {
	if err := t.err; err != nil {
		t.err = nil
		return err
	}
	for _, k := range keys {
		if _, ok := t.elements[k]; ok {
			t.deleted++
		}
		delete(t.elements, k)
		t.check()
	}
	return nil
}

func (t *fakeTable[K, V]) each(ctx context.Context, f func(K, V)) error {
	for k, v := range t.elements {
		f(k, v)
	}
	return context.Cause(ctx)
}

var unlimited = size{math.MaxInt, math.MaxInt, math.MaxInt}

// plan returns the frontends that the programs handle for a view.
func plan(v *api.View, annotation string, below nodeview.Parameters) []wanted {
	p := planner{annotation: annotation, below: below, seed: maphash.MakeSeed(), share: unlimited}
	all, _ := p.plan(v)
	return all
}

// fakeKernel is a dataplane with fake tables.
type fakeKernel struct {
	*dataplane
	t         *testing.T
	frontends fakeTable[frontendKey, list]
	slots     fakeTable[slotKey, address]
	members   fakeTable[memberKey, uint32]
	clients   fakeTable[clientKey, choice]
	counted   fakeTable[ipKey, uint64]
	// share is the planner's field of this name, and time is in nanoseconds since the boot.
	share size
	time  uint64
	// The keys of seen are the IDs of lists that frontends have used. The values are the
	// endpoints of these lists.
	seen map[uint64][]address
	// drifted is true if the dataplane has reported drift.
	drifted bool
}

func newFakeKernel(t *testing.T, frontends, slots, members int) *fakeKernel {
	k := &fakeKernel{t: t, share: unlimited}
	k.frontends = fakeTable[frontendKey, list]{elements: map[frontendKey]list{}, max: frontends, check: k.check}
	k.slots = fakeTable[slotKey, address]{elements: map[slotKey]address{}, max: slots, check: k.check}
	k.members = fakeTable[memberKey, uint32]{elements: map[memberKey]uint32{}, max: members, check: k.check}
	k.clients = fakeTable[clientKey, choice]{elements: map[clientKey]choice{}, max: 1000, check: func() {}}
	k.restart()
	return k
}

// restart makes a dataplane without records, as a new process does.
func (k *fakeKernel) restart() {
	k.seen = map[uint64][]address{}
	k.counted = fakeTable[ipKey, uint64]{elements: map[ipKey]uint64{}, max: 1000, check: func() {}}
	d := &dataplane{
		planner: planner{seed: maphash.MakeSeed(), share: k.share},
		tables: tables{
			frontends: &k.frontends, slots: &k.slots, members: &k.members,
			clientTables: clientTables{clients: &k.clients, counts: &k.counted, now: func() uint64 { return k.time }},
		},
		capacity: size{k.frontends.max, k.slots.max, k.members.max},
	}
	k.dataplane = d.open(-1, func(now bool) { k.drifted = k.drifted || now })
	k.check()
}

// check checks that the list of each frontend is complete, and that the list does not
// change while a process runs.
func (k *fakeKernel) check() {
	for f, l := range k.frontends.elements {
		endpoints := make([]address, l.Count)
		for i := range endpoints {
			a, ok := k.slots.elements[slotKey{List: l.ID, Index: uint32(i)}]
			if !ok {
				k.t.Fatalf("frontend %s: slot %d of %d is missing", f, i, l.Count)
			}
			endpoints[i] = a
			if _, ok := k.slots.elements[slotKey{List: l.ID, Index: othersFrom + uint32(i)}]; !ok && a.Other != 0 {
				k.t.Fatalf("frontend %s: slot %d has no other endpoint", f, i)
			}
			a.Other = 0
			if _, ok := k.members.elements[memberKey{List: l.ID, Endpoint: a}]; !ok && (f.Protocol == 17 || l.Affinity != 0) {
				k.t.Fatalf("frontend %s: member %s is missing", f, a)
			}
		}
		if before, ok := k.seen[l.ID]; ok && !slices.Equal(before, endpoints) {
			k.t.Fatalf("frontend %s: list %d has changed", f, l.ID)
		}
		k.seen[l.ID] = endpoints
	}
}

// changesOf returns a batch that delivers views. A nil view is a deletion.
func changesOf(c sink.Changes, views map[string]*api.View) *sink.Changes {
	c.Services = func(yield func(sink.Change) bool) {
		for _, name := range slices.Sorted(maps.Keys(views)) {
			if !yield(sink.Change{Key: types.NamespacedName{Namespace: "default", Name: name}, New: views[name], Unsure: true}) {
				return
			}
		}
	}
	return &c
}

// TestRandomChanges makes random changes of services that share addresses, and restarts
// the dataplane. The maps are too small for all services. Programs must see complete
// lists at any time, and each frontend must have the wanted list or no list.
func TestRandomChanges(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		k := newFakeKernel(t, 8, 24, 30)
		services := map[string]*api.View{}
		pass := func() {
			c := changesOf(sink.Changes{First: true, Last: true}, services)
			if err := k.sync(context.Background(), c); err != nil {
				t.Fatal(err)
			}
		}
		pass()
		for range 200 {
			// Each address belongs to at most one service.
			owners := random.Perm(6)
			changed := map[string]*api.View{}
			for i := range 6 {
				name := fmt.Sprint("s", i)
				if random.IntN(3) > 0 {
					continue
				}
				changed[name] = randomView(random, name, owners[i])
			}
			for name, v := range services {
				if _, ok := changed[name]; ok {
					continue
				}
				for _, other := range changed {
					if other != nil && other.Service.IPs.ClusterIPs == v.Service.IPs.ClusterIPs {
						changed[name] = nil
					}
				}
			}
			for name, v := range changed {
				if services[name] = v; v == nil {
					delete(services, name)
				}
			}
			if err := k.sync(context.Background(), changesOf(sink.Changes{}, changed)); err != nil {
				t.Fatal(err)
			}
			k.mustHave(services)
			if random.IntN(20) == 0 {
				k.restart()
				pass()
				k.mustHave(services)
			}
		}
	}
}

func randomView(random *rand.Rand, name string, ip int) *api.View {
	var addrs []string
	for i := range random.IntN(8) {
		addrs = append(addrs, fmt.Sprintf("10.0.0.%d", i))
		if random.IntN(3) == 0 {
			addrs[i] = "~" + addrs[i]
		}
	}
	var edit func(*api.Service)
	if random.IntN(2) == 0 {
		edit = withAffinity(int32(1 + random.IntN(2)))
	}
	v := view(name, []string{fmt.Sprintf("10.96.0.%d", ip)}, addrs, edit)
	if random.IntN(2) == 0 {
		for i := range v.Endpoints {
			v.Endpoints[i].Weight = int32(1 + random.IntN(3))
		}
	}
	if random.IntN(4) == 0 {
		return nil
	}
	return v
}

// mustHave checks that the maps have exactly the elements that these services need.
// Frontends of services that do not fit may be missing.
func (k *fakeKernel) mustHave(services map[string]*api.View) {
	k.t.Helper()
	slots, members, wanted := 0, 0, 0
	counted := map[uint64]bool{}
	for _, v := range services {
		all, _ := k.planner.plan(v)
		for _, w := range all {
			wanted++
			l, ok := k.frontends.elements[w.frontend]
			if !ok {
				if _, left := k.left[v.Key()]; !left {
					k.t.Fatalf("frontend %s is missing", w.frontend)
				}
				wanted--
				continue
			}
			if !counted[w.digest] {
				counted[w.digest] = true
				slots += w.size().endpoints
				members += len(w.members)
			}
			if !slices.Equal(k.seen[l.ID], w.endpoints) || l.Affinity != w.affinity {
				k.t.Fatalf("frontend %s has %v, want %v", w.frontend, k.seen[l.ID], w.endpoints)
			}
		}
	}
	if len(k.frontends.elements) != wanted || len(k.slots.elements) != slots || len(k.members.elements) != members {
		k.t.Fatalf("%d frontends, %d slots, %d members, want %d, %d, %d",
			len(k.frontends.elements), len(k.slots.elements), len(k.members.elements), wanted, slots, members)
	}
	if got, want := k.usage(), (usage{wanted, slots, members, len(k.left) + len(k.tooLarge)}); got != want {
		k.t.Fatalf("usage %+v, want %+v", got, want)
	}
	k.verify()
}

// verify compares the maps with the records. They must be equal.
func (k *fakeKernel) verify() {
	k.t.Helper()
	before := k.counts()
	k.drifted = false
	if err := k.reconciler.Verify(context.Background()); err != nil {
		k.t.Fatal(err)
	}
	if k.drifted || k.counts() != before {
		k.t.Fatalf("the maps differ from the records; drift reported: %t", k.drifted)
	}
}

// TestFailedDeletionRequestsAPass checks that a list that could not be deleted is deleted
// in the next pass.
func TestFailedDeletionRequestsAPass(t *testing.T) {
	k := newFakeKernel(t, 10, 10, 10)
	services := map[string]*api.View{"web": view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil)}
	ctx := t.Context()
	if err := k.sync(ctx, changesOf(sink.Changes{First: true, Last: true}, services)); err != nil {
		t.Fatal(err)
	}
	k.slots.err = errors.New("broken")
	services["web"] = view("web", []string{"10.96.0.1"}, []string{"10.0.0.2"}, nil)
	if err := k.sync(ctx, changesOf(sink.Changes{}, services)); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v, want a new pass", err)
	}
	if err := k.sync(ctx, changesOf(sink.Changes{}, services)); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("before the pass: error %v, want a new pass", err)
	}
	if err := k.sync(ctx, changesOf(sink.Changes{First: true, Last: true}, services)); err != nil {
		t.Fatal(err)
	}
	k.mustHave(services)
}

// TestChangesReachTheMapsIfTheOtherSinkFails checks that programs do not use removed
// endpoints while the other sink fails or panics.
func TestChangesReachTheMapsIfTheOtherSinkFails(t *testing.T) {
	k := newFakeKernel(t, 10, 10, 10)
	var result error
	var used []int
	observer := &backendtest.Observer{OnHolds: func(kind string, n int) {
		if kind == "frontends" {
			used = append(used, n)
		}
	}}
	b, err := newBackend(sink.Func(func(context.Context, *sink.Changes) error {
		if result == nil {
			panic("broken")
		}
		return result
	}), options{public: Options{Options: backends.Options{Observer: observer}}})
	if err != nil {
		t.Fatal(err)
	}
	b.dataplane = k.dataplane
	services := map[string]*api.View{}
	broken := errors.New("broken")
	for i, step := range []error{broken, &sink.Failed{{Namespace: "default", Name: "other"}: broken}, nil} {
		services["web"] = view("web", []string{"10.96.0.1"}, []string{fmt.Sprint("10.0.0.", i)}, nil)
		result = step
		func() {
			defer func() {
				if r := recover(); (r != nil) != (step == nil) {
					t.Errorf("step %d: panic %v", i, r)
				}
			}()
			if err := b.Sync(t.Context(), changesOf(sink.Changes{First: i == 0, Last: i == 0}, services)); err != step {
				t.Errorf("error %v, want %v", err, step)
			}
		}()
		k.mustHave(services)
	}
	if !slices.Equal(used, []int{2, 2, 2}) {
		t.Errorf("Holds got %v frontends", used)
	}
}

// TestPanicFailsOneService checks that a panic in the plan of a service fails only this
// service.
func TestPanicFailsOneService(t *testing.T) {
	k := newFakeKernel(t, 10, 10, 10)
	b, err := newBackend(noProxy, options{})
	if err != nil {
		t.Fatal(err)
	}
	b.dataplane = k.dataplane
	web, bad := view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), &api.View{}
	err = b.Sync(t.Context(), changesOf(sink.Changes{First: true, Last: true}, map[string]*api.View{"bad": bad, "web": web}))
	failed, ok := sink.Acknowledged(err)
	if key := (types.NamespacedName{Namespace: "default", Name: "bad"}); !ok || len(failed) != 1 || failed[key] == nil {
		t.Errorf("error %v, want one of service bad", err)
	}
	k.mustHave(map[string]*api.View{"web": web})
}

// TestPruneKeepsFrontendsOfFailingServices makes passes that do not deliver a failing
// service. Its frontends must stay. After a restart, all frontends without an owner may
// belong to this service. These frontends must stay until the service is delivered.
func TestPruneKeepsFrontendsOfFailingServices(t *testing.T) {
	k := newFakeKernel(t, 10, 10, 10)
	ctx := t.Context()
	goes, web := view("goes", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), view("web", []string{"10.96.0.2"}, []string{"10.0.0.2"}, nil)
	services := map[string]*api.View{"web": web}
	failing := []types.NamespacedName{{Namespace: "default", Name: "web"}}
	for _, restart := range []bool{false, true} {
		if err := k.sync(ctx, changesOf(sink.Changes{First: true, Last: true}, map[string]*api.View{"goes": goes, "web": web})); err != nil {
			t.Fatal(err)
		}
		if restart {
			k.restart()
		}
		if err := k.sync(ctx, changesOf(sink.Changes{First: true, Last: true, Failing: failing}, nil)); err != nil {
			t.Fatal(err)
		}
		if restart {
			k.mustHave(map[string]*api.View{"goes": goes, "web": web})
		} else {
			k.mustHave(services)
		}
		if err := k.sync(ctx, changesOf(sink.Changes{}, services)); err != nil {
			t.Fatal(err)
		}
		k.mustHave(services)
	}
	// A failing service that needs no frontend does not prevent pruning.
	services["none"] = view("none", []string{"10.96.0.3"}, nil, nil)
	failing[0].Name = "none"
	if err := k.sync(ctx, changesOf(sink.Changes{First: true}, map[string]*api.View{"none": services["none"]})); err != nil {
		t.Fatal(err)
	}
	if err := k.sync(ctx, changesOf(sink.Changes{Last: true, Failing: failing}, nil)); err != nil {
		t.Fatal(err)
	}
	if n := len(k.frontends.elements); n != 0 {
		t.Errorf("%d frontends, want none", n)
	}
}

// TestServicesLeftAreRetried checks that services that did not fit are added as soon as
// there is space.
func TestServicesLeftAreRetried(t *testing.T) {
	tcp := func(s *api.Service) { s.Ports = s.Ports[:1] }
	service := func(i, endpoints int) *api.View {
		var addrs []string
		for e := range endpoints {
			addrs = append(addrs, fmt.Sprintf("10.0.%d.%d", i, e))
		}
		return view(fmt.Sprint("s", i), []string{fmt.Sprint("10.96.0.", i)}, addrs, tcp)
	}
	type services = map[string]*api.View
	for name, steps := range map[string][]services{
		"in the Sync that also changes the service left": {
			{"s1": service(1, 3), "s2": service(2, 3), "s3": service(3, 3)},
			{"s1": nil, "s2": service(2, 2), "s3": service(3, 2)},
		},
		"in the only Sync of a pass, when stale lists fill a map": {
			{"s1": service(1, 3), "s2": service(2, 3)},
			nil, // a restart
			{"s3": service(3, 3), "s4": service(4, 3)},
		},
		"although another service does not fit": {
			{"s1": service(1, 3), "s2": service(2, 3)},
			{"s3": service(3, 7), "s4": service(4, 1), "s5": service(5, 1), "s6": service(6, 1)},
			{"s1": nil},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 { // repeat, because the order of services is random
				k := newFakeKernel(t, 10, 6, 10)
				all, first := services{}, true
				for _, step := range steps {
					if step == nil {
						k.restart()
						all, first = services{}, true
						continue
					}
					maps.Copy(all, step)
					maps.DeleteFunc(all, func(_ string, v *api.View) bool { return v == nil })
					if err := k.sync(t.Context(), changesOf(sink.Changes{First: first, Last: first}, step)); err != nil {
						t.Fatal(err)
					}
					first = false
				}
				k.mustHave(all)
				for key := range k.left {
					if len(all[key.Name].Endpoints) <= 6 {
						t.Fatalf("service %s was left to the other sink", key)
					}
				}
			}
		})
	}
}

// TestLackOfMemoryIsTransient checks that a service is programmed despite a short lack of
// memory. After a long lack, the other sink must handle the service.
func TestLackOfMemoryIsTransient(t *testing.T) {
	k := newFakeKernel(t, 10, 10, 10)
	services := map[string]*api.View{"web": view("web", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, nil)}
	for _, test := range []struct{ failures, left int }{{3, 0}, {1000, 1}} {
		k.slots.noMemory = test.failures
		k.slots.elements, k.members.elements, k.frontends.elements = map[slotKey]address{}, map[memberKey]uint32{}, map[frontendKey]list{}
		if err := k.sync(t.Context(), changesOf(sink.Changes{First: true, Last: true}, services)); err != nil {
			t.Fatal(err)
		}
		if len(k.left) != test.left {
			t.Errorf("after %d failures, %d services are left, want %d", test.failures, len(k.left), test.left)
		}
	}
}

// TestRestartUsesOtherIDs checks that a process does not use the ID of a list that an
// earlier process has deleted. A program may still read that list.
func TestRestartUsesOtherIDs(t *testing.T) {
	k := newFakeKernel(t, 10, 10, 10)
	services := map[string]*api.View{"web": view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil)}
	seen := map[uint64]bool{}
	for range 3 {
		if err := k.sync(t.Context(), changesOf(sink.Changes{First: true, Last: true}, services)); err != nil {
			t.Fatal(err)
		}
		for _, l := range k.lists {
			if seen[l.id] {
				t.Errorf("list %d was used twice", l.id)
			}
			seen[l.id] = true
		}
		if err := k.sync(t.Context(), changesOf(sink.Changes{}, map[string]*api.View{"web": nil})); err != nil {
			t.Fatal(err)
		}
		k.restart()
	}
}

// A parameter that the other sink does not honour is no reason to leave a service to that
// sink.
func TestPlanIgnoresParametersThatTheOtherSinkIgnores(t *testing.T) {
	plain := plan(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil), "", nodeview.Parameters{})
	ignored := plan(view("web", []string{"10.96.0.1"}, []string{"10.0.0.1"}, func(s *api.Service) {
		s.Algorithm, s.ResetConnections = api.HashClient, true
	}), "", nodeview.Parameters{})
	if len(plain) != 2 || len(ignored) != 2 {
		t.Errorf("the plan has %d frontends, and with ignored parameters %d; want 2", len(plain), len(ignored))
	}
}

func TestPlan(t *testing.T) {
	ips := []string{"10.96.0.1", "fd00:96::1"}
	all := []string{"10.0.0.2", "10.0.0.1", "~10.0.0.3", "fd00::1"}
	unequal := view("web", ips[:1], all[:2], nil)
	unequal.Endpoints[0].Weight, unequal.Endpoints[1].Weight = 1, 3
	for name, test := range map[string]struct {
		view *api.View
		want []string
	}{
		"no service": {nil, nil},
		"both families and protocols": {view("web", ips, all, nil), []string{
			"10.96.0.1:80/UDP to 10.0.0.1:8080 10.0.0.2:8080 keeping 10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080",
			"[fd00:96::1]:80/UDP to [fd00::1]:8080 keeping [fd00::1]:8080",
			// TCP needs no members, and shares the lists of UDP.
			"10.96.0.1:80/TCP to 10.0.0.1:8080 10.0.0.2:8080 keeping 10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080",
			"[fd00:96::1]:80/TCP to [fd00::1]:8080 keeping [fd00::1]:8080",
		}},
		"session affinity": {view("web", ips[:1], all, withAffinity(5)), []string{
			"10.96.0.1:80/TCP for 5 s to 10.0.0.1:8080 10.0.0.2:8080 keeping 10.0.0.1:8080 10.0.0.2:8080",
		}},
		"weights": {unequal, []string{
			"10.96.0.1:80/UDP to 10.0.0.1:8080 or 10.0.0.2:8080 10.0.0.2:8080 keeping 10.0.0.1:8080 10.0.0.2:8080",
			"10.96.0.1:80/TCP to 10.0.0.1:8080 or 10.0.0.2:8080 10.0.0.2:8080 keeping 10.0.0.1:8080 10.0.0.2:8080",
		}},
		"stable hashing": {view("web", ips, all, func(s *api.Service) { s.Algorithm = api.HashClient }), nil},
		"resets": {view("web", ips[:1], all, func(s *api.Service) { s.ResetConnections = true }), []string{
			"10.96.0.1:80/UDP to 10.0.0.1:8080 10.0.0.2:8080 keeping 10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080",
		}},
		"without endpoints": {view("web", ips, nil, nil), nil},
		"only a draining endpoint, which new clients may not use": {view("web", ips[:1], []string{"~10.0.0.3"}, local), []string{
			"10.96.0.1:80/UDP to keeping 10.0.0.3:8080",
		}},
		"SCTP": {view("web", ips, all, func(s *api.Service) {
			s.Ports = []api.PortMapping{{Protocol: api.SCTP, Port: 80, TargetPort: 8080}}
		}), nil},
		"all ports": {view("web", ips, all, func(s *api.Service) { s.AllPorts = true }), nil},
		"external addresses": {view("web", nil, all, func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.ExternalIPs.Add(netip.MustParseAddr("192.0.2.1"))
			s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("192.0.2.2"))
			s.Ports = s.Ports[:1]
		}), []string{
			"192.0.2.2:80/TCP to 10.0.0.1:8080 10.0.0.2:8080",
			"192.0.2.1:80/TCP to 10.0.0.1:8080 10.0.0.2:8080",
		}},
		"source ranges": {view("web", nil, all, func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("192.0.2.2"))
			s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
		}), nil},
		"session affinity at an external address": {view("web", nil, all, func(s *api.Service) {
			s.IPs.ExternalIPs.Add(netip.MustParseAddr("192.0.2.1"))
			s.AffinitySeconds = 5
		}), nil},
		"an annotation": {view("web", ips, all, func(s *api.Service) { s.Annotations = map[string]string{"no": "false"} }), nil},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, w := range plan(test.view, "no", nodeview.Parameters{Algorithm: true, Resets: true}) {
				line := w.frontend.String()
				if w.affinity != 0 {
					line += fmt.Sprintf(" for %d s", w.affinity)
				}
				line += " to"
				for i, a := range w.endpoints {
					line += " " + a.String()
					if a.Other != 0 {
						line += " or " + w.others[i].String()
					}
				}
				if len(w.members) > 0 {
					line += " keeping"
				}
				for _, a := range w.members {
					line += " " + a.String()
				}
				got = append(got, line)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
