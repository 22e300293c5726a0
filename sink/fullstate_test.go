// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

func TestFullStateIsSorted(t *testing.T) {
	type state = []*api.View
	var calls []state
	s := sink.FullState(func(_ context.Context, services []*api.View) error {
		calls = append(calls, services)
		return nil
	})
	a, b, c := key("a"), key("b"), key("c")
	run(t, sink.Options{}, s, func(w *world) {
		step := func(what string, change func(), want ...*api.View) {
			w.Helper()
			change()
			w.waitApplied()
			if diff := cmp.Diff(want, calls[len(calls)-1], compare...); diff != "" {
				w.Errorf("%s: state (-want +got):\n%s", what, diff)
			}
		}
		step("full", w.src.MarkSynced, view(web, 1))
		step("one service added in front", func() { w.src.Set(view(b)) }, view(b), view(web, 1))
		step("one service changed, others added around it", func() { w.src.Set(view(b, 2), view(a), view(c), view(key("zoo"))) },
			view(a), view(b, 2), view(c), view(web, 1), view(key("zoo")))
		step("some deleted", func() { w.src.Delete(a, c, key("zoo")) }, view(b, 2), view(web, 1))
		step("failed and deleted", func() {
			w.script.Add(sinkscript.FailServices(errBusy, a))
			w.src.Set(view(a))
			synctest.Wait()
			w.src.Delete(a)
		}, view(b, 2), view(web, 1))
		step("full again", func() { w.src.Reset(); w.src.Delete(b) }, view(web, 1))

		var names []string
		for _, v := range calls[2] {
			names = append(names, v.Service.Name)
		}
		if want := []string{"a", "b", "c", "web", "zoo"}; !slices.Equal(names, want) {
			w.Errorf("a retained state changed to %v, want %v", names, want)
		}
	})
}

// rewriter is a StateSink with optional methods.
type rewriter struct {
	*stages
	node  *api.Node
	names []string
	fail  func(services []*api.View) error
	calls int
}

func (r *rewriter) SyncState(_ context.Context, node *api.Node, services []*api.View) error {
	r.calls++
	r.node, r.names = node, nil
	for _, v := range services {
		r.names = append(r.names, v.Service.Name+describe(v))
	}
	if r.fail != nil {
		return r.fail(services)
	}
	return nil
}

func TestFullStateOfPassesNode(t *testing.T) {
	r := &rewriter{}
	node := &api.Node{Name: "n"}
	err := sink.FullStateOf(r).Sync(t.Context(), &sink.Changes{First: true, Last: true, Node: node, Services: func(func(sink.Change) bool) {}})
	if err != nil || r.node != node {
		t.Errorf("node %v, error %v", r.node, err)
	}
}

func TestFullStateReturnsTheError(t *testing.T) {
	s := sink.FullState(func(context.Context, []*api.View) error { return errBusy })
	if err := s.Sync(t.Context(), changes(true)); !errors.Is(err, errBusy) {
		t.Errorf("Sync returned %v", err)
	}
}

// changes returns Changes like those that other packages make.
func changes(pass bool, list ...sink.Change) *sink.Changes {
	return &sink.Changes{First: pass, Last: pass, Services: slices.Values(list)}
}

// A service takes an address before its last owner is delivered. If the Changes come from
// another package, only Change.Unsure and Changes.Failing say that this may happen.
func TestFullStateOfOtherCallersHasOneOwner(t *testing.T) {
	a, b := withIP(1, view(key("a"))), withIP(2, view(key("b")))
	a.Lost = make([]api.LostClaim, 0, 8)
	next := withIP(1, view(key("b")))
	for name, before := range map[string][]*sink.Changes{
		"the change is unsure": {changes(true, sink.Change{Key: a.Key(), New: a}, sink.Change{Key: b.Key(), New: b})},
		"the owner is failing": {
			changes(true, sink.Change{Key: a.Key(), New: a}, sink.Change{Key: b.Key(), New: b}),
			{First: true, Last: true, Services: slices.Values([]sink.Change{{Key: b.Key(), New: b}}), Failing: []types.NamespacedName{a.Key()}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			owners := map[api.Claim]string{}
			s := sink.FullState(func(_ context.Context, services []*api.View) error {
				clear(owners)
				for _, v := range services {
					for f := range nodeview.Frontends(v) {
						if other := owners[f.Claim()]; other != "" {
							t.Errorf("%s has two owners, %s and %s", f.Addr, other, v.Key())
						}
						owners[f.Claim()] = v.Key().String()
					}
				}
				return nil
			})
			for _, c := range append(before, changes(false, sink.Change{Key: b.Key(), Old: b, New: next, Unsure: len(before) == 1})) {
				if err := s.Sync(t.Context(), c); err != nil {
					t.Fatal(err)
				}
			}
			if len(owners) != 1 || owners[api.Claim{IP: netip.MustParseAddr("10.96.0.1"), Protocol: api.TCP, Port: 80}] != "default/b" {
				t.Errorf("owners %v", owners)
			}
			if a.Lost[:8][0] != (api.LostClaim{}) {
				t.Error("the view of the source was modified")
			}
		})
	}
}

func TestFullStateIsCalledOncePerPass(t *testing.T) {
	r := &rewriter{stages: &stages{}}
	run(t, sink.Options{BatchSize: 2}, sink.FullStateOf(r), func(w *world) {
		w.src.Set(view(key("a"), 1), view(key("b"), 2), view(key("c"), 3))
		w.src.MarkSynced()
		w.waitApplied()
		if want := []string{"a[1]", "b[2]", "c[3]", "web[1]"}; r.calls != 1 || !slices.Equal(r.names, want) {
			t.Errorf("%d calls, the last with %v", r.calls, r.names)
		}
		w.src.Delete(key("b"))
		w.waitApplied()
		w.src.Reset()
		synctest.Wait()
		if want := []string{"a[1]", "c[3]", "web[1]"}; r.calls != 3 || !slices.Equal(r.names, want) {
			t.Errorf("after a second pass: %d calls, the last with %v", r.calls, r.names)
		}
	})
}

// The service that fails must keep its old state and must not stop the others.
func TestFullStateKeepsFailedService(t *testing.T) {
	for _, whole := range []bool{false, true} {
		r := &rewriter{stages: &stages{}}
		r.fail = func(services []*api.View) error {
			for _, v := range services {
				if v.Key() == web && len(v.Endpoints) == 2 {
					if whole {
						return errBusy
					}
					return &sink.Failed{web: errBusy}
				}
			}
			return nil
		}
		run(t, sink.Options{}, sink.FullStateOf(r), func(w *world) {
			w.src.Set(view(dns, 1))
			w.src.MarkSynced()
			w.waitApplied()
			w.src.Set(view(web, 1, 2))
			time.Sleep(10 * time.Second)
			w.src.Set(view(dns, 7))
			time.Sleep(time.Second)
			synctest.Wait()
			if want := []string{"dns[7]", "web[1]"}; !slices.Equal(r.names, want) && !slices.Equal(r.names, []string{"dns[7]", "web[1 2]"}) {
				t.Errorf("whole %t: state %v", whole, r.names)
			}
			if s := w.driver.Status(); len(s.Failing) != 1 || s.Pending != 1 {
				t.Errorf("whole %t: status %+v", whole, s)
			}
			w.src.Set(view(web, 3))
			w.waitApplied()
			if want := []string{"dns[7]", "web[3]"}; !slices.Equal(r.names, want) {
				t.Errorf("whole %t: state at the end %v", whole, r.names)
			}
		})
	}
}

// A pass does not deliver a service that fails alone and waits for its retry. The service
// must keep the last acknowledged view, except an address that moves to another service.
func TestFullStateKeepsIsolatedServiceInPass(t *testing.T) {
	r := &rewriter{stages: &stages{}}
	var served []string
	r.fail = func(services []*api.View) error {
		served = nil
		for _, v := range services {
			if v.Key() == web && len(v.Endpoints) == 2 {
				return errBusy
			}
			for f := range nodeview.Frontends(v) {
				served = append(served, v.Service.Name+describe(v)+" "+f.Addr.String())
			}
		}
		return nil
	}
	at := func(v *api.View, addrs ...string) *api.View {
		v.Service.IPFamilies = []api.Family{api.IPv4}
		for _, a := range addrs {
			v.Service.IPs.ExternalIPs.Add(netip.MustParseAddr(a))
		}
		return v
	}
	run(t, sink.Options{}, sink.FullStateOf(r), func(w *world) {
		expect := func(want ...string) {
			w.Helper()
			synctest.Wait()
			if diff := cmp.Diff(want, served); diff != "" {
				w.Errorf("frontends (-want +got):\n%s", diff)
			}
		}
		w.src.Set(at(view(dns, 1), "10.1.0.1"), at(view(web, 1), "10.1.0.2", "10.1.0.3", "10.1.0.4"))
		w.src.MarkSynced()
		expect("dns[1] 10.1.0.1", "web[1] 10.1.0.2", "web[1] 10.1.0.3", "web[1] 10.1.0.4")
		w.src.Set(at(view(web, 1, 2), "10.1.0.2"))
		time.Sleep(15 * time.Second)
		w.driver.StartOver()
		w.src.Set(at(view(dns, 1), "10.1.0.3"))
		expect("dns[1] 10.1.0.3", "web[1] 10.1.0.2", "web[1] 10.1.0.4")
		if s := w.driver.Status(); s.Passes != 2 || len(s.Failing) != 1 {
			w.Errorf("status %+v", s)
		}
		w.src.Set(at(view(dns, 1), "10.1.0.4"))
		expect("dns[1] 10.1.0.4", "web[1] 10.1.0.2")
		w.src.Set(at(view(web, 3), "10.1.0.2"))
		w.waitApplied()
		expect("dns[1] 10.1.0.4", "web[3] 10.1.0.2")
	})
}

// An address moves from a failing service to another service. The first service keeps its
// other addresses.
func TestFullStateGivesAnAddressToOneService(t *testing.T) {
	a, b := key("a"), key("b")
	at := func(v *api.View, addrs ...string) *api.View {
		for _, addr := range addrs {
			v.Service.IPFamilies = []api.Family{api.IPv4}
			v.Service.IPs.ExternalIPs.Add(netip.MustParseAddr(addr))
		}
		return v
	}
	for _, deleted := range []bool{false, true} {
		r := &rewriter{stages: &stages{}}
		var fails bool
		var served []string
		r.fail = func(services []*api.View) error {
			served = nil
			for _, v := range services {
				for f := range nodeview.Frontends(v) {
					served = append(served, v.Service.Name+" "+f.Addr.String())
				}
			}
			if fails {
				return errors.Join((&sink.Failed{a: errBusy}).Err(), nil)
			}
			return nil
		}
		run(t, sink.Options{}, sink.FullStateOf(r), func(w *world) {
			expect := func(want ...string) {
				w.Helper()
				synctest.Wait()
				if diff := cmp.Diff(want, served); diff != "" {
					w.Errorf("deleted %t: frontends (-want +got):\n%s", deleted, diff)
				}
			}
			w.src.Delete(web)
			w.src.Set(at(view(a), "10.1.0.1", "10.1.0.2"), at(view(b), "10.1.0.3"))
			w.src.MarkSynced()
			expect("a 10.1.0.1", "a 10.1.0.2", "b 10.1.0.3")
			fails = true
			if deleted {
				w.src.Fail(errBusy) // the source fails until Fail(nil), so the driver sees both changes together
				w.src.Delete(a)
				w.src.Set(at(view(b), "10.1.0.2"))
				w.src.Fail(nil)
				time.Sleep(time.Second)
				expect("b 10.1.0.2")
			} else {
				w.src.Set(at(view(a), "10.1.0.1"), at(view(b), "10.1.0.2"))
				expect("a 10.1.0.1", "b 10.1.0.2")
			}
			w.src.Set(at(view(dns), "10.1.0.9"))
			expect("a 10.1.0.1", "b 10.1.0.2", "dns 10.1.0.9")
			w.src.Set(at(view(dns), "10.1.0.1")) // if the service a is deleted, its other address moves, too
			if deleted {
				expect("b 10.1.0.2", "dns 10.1.0.1")
			}
			synctest.Wait()
			fails = false
			w.waitApplied()
		})
	}
}

// Addresses move between services at random, services fail at random, and the source
// loses changes at random, also during passes.
func TestFullStateNeverHasTwoOwnersOfAClaim(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 1))
		sinkRand := rand.New(rand.NewPCG(seed, 2))
		rw := &rewriter{stages: &stages{}}
		var works atomic.Bool
		rw.fail = func(services []*api.View) error {
			owners := map[api.Claim]types.NamespacedName{}
			for _, v := range services {
				for f := range nodeview.Frontends(v) {
					claim := f.Claim()
					for _, met := range []api.Claim{claim, {IP: claim.IP}, {IP: claim.IP, Protocol: api.TCP, Port: 80}} {
						if other, ok := owners[met]; ok && other != v.Key() && (met == claim || met.Port == 0 || claim.Port == 0) {
							t.Errorf("seed %d: %s and %s have %v", seed, other, v.Key(), claim)
						}
					}
					owners[claim] = v.Key()
				}
			}
			var failed sink.Failed
			for n := range 6 {
				if !works.Load() && sinkRand.IntN(4) == 0 {
					failed.Add(fuzzKey(n), errBusy)
				}
			}
			if !works.Load() && sinkRand.IntN(8) == 0 {
				return errBusy
			}
			return failed.Err()
		}
		run(t, sink.Options{BatchSize: 1 + r.IntN(4)}, sink.FullStateOf(rw), func(w *world) {
			w.src.Delete(web)
			services := fuzzServices{w: w, r: r}
			w.src.MarkSynced()
			for range 60 {
				services.moveAddresses()
				switch r.IntN(8) {
				case 0:
					w.src.Reset()
				case 1:
					w.driver.StartOver()
				case 2, 3:
					time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
				case 4:
					synctest.Wait()
				case 5:
					w.script.Add(func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
						time.Sleep(50 * time.Millisecond)
						return s.Sync(ctx, c)
					})
				}
			}
			synctest.Wait()
			works.Store(true)
			time.Sleep(time.Hour)
			w.waitApplied()
			var want []string
			for _, v := range w.src.Views() {
				want = append(want, v.Service.Name+describe(v))
			}
			if !slices.Equal(rw.names, want) {
				t.Errorf("seed %d: state %v, want %v", seed, rw.names, want)
			}
		})
	}
}

// BenchmarkFullState measures the time of FullState for one change.
func BenchmarkFullState(b *testing.B) {
	s := sink.FullState(func(context.Context, []*api.View) error { return nil })
	views := manyViews(50_000)
	full := func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v}) {
				return
			}
		}
	}
	if err := s.Sync(b.Context(), &sink.Changes{First: true, Last: true, Services: full}); err != nil {
		b.Fatal(err)
	}
	one := &sink.Changes{Services: slices.Values([]sink.Change{{Key: views[0].Key(), New: views[0]}})}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Sync(b.Context(), one); err != nil {
			b.Fatal(err)
		}
	}
}

// manyViews returns n views sorted by key.
func manyViews(n int) []*api.View {
	views := make([]*api.View, n)
	for i := range views {
		views[i] = view(types.NamespacedName{Namespace: "default", Name: string([]byte{
			byte('a' + i/26/26/26%26), byte('a' + i/26/26%26), byte('a' + i/26%26), byte('a' + i%26)})}, 1)
	}
	return views
}
