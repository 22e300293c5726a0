// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/apimachinery/pkg/types"
)

// Follow yields exactly the differences, even if the state no longer remembers
// deletions.
func TestFollowYieldsDifferences(t *testing.T) {
	for name, between := range map[string]int{"some changes": 1, "more changes than the state remembers": 20_000} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := cluster.New(cluster.Options{})
				service := func(name string) *api.Service { return &api.Service{Namespace: "ns", Name: name} }
				state.Update(func(tx *cluster.Tx) {
					for _, name := range []string{"a", "b", "c"} {
						tx.SetService(service(name))
					}
				})
				var calls [][]string
				go state.Follow(t.Context(), func(snapshot *cluster.Snapshot, changes iter.Seq[cluster.Change]) {
					var got []string
					for c := range changes {
						if now, _ := snapshot.States.Get(c.Key); now != c.New {
							t.Errorf("%s: new state differs from the snapshot", c.Key)
						}
						got = append(got, fmt.Sprint(c.Key.Name, " ", c.Old != nil, " ", c.New != nil))
					}
					slices.Sort(got)
					calls = append(calls, got)
					time.Sleep(time.Second) // the reader is busy during the Updates
				})
				synctest.Wait()
				if len(calls) > 0 {
					t.Errorf("called before the state was synced, with %q", calls)
				}
				state.SetSynced()
				synctest.Wait()
				for i := range between {
					state.Update(func(tx *cluster.Tx) {
						tx.DeleteService(service("a").Key())
						tx.SetSlice(slice("b-1", "b"))
						tx.SetService(service(fmt.Sprint("x", i)))
						if i == between-1 {
							for i := range between {
								tx.DeleteService(service(fmt.Sprint("x", i)).Key())
							}
						}
					})
				}
				time.Sleep(time.Hour)
				synctest.Wait()
				want := [][]string{{"a false true", "b false true", "c false true"}, {"a true false", "b true true"}}
				if diff := gocmp.Diff(want, calls); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// The merged state has the services of the first state, with the slices of both states. The
// second state loses its slices while it is stale.
func TestMerge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second, out := cluster.New(cluster.Options{}), cluster.New(cluster.Options{}), cluster.New(cluster.Options{})
		key := types.NamespacedName{Namespace: "ns", Name: "web"}
		merge := func(key types.NamespacedName, in []*cluster.Snapshot) (*api.Service, []*api.EndpointSlice) {
			var all api.ServiceState
			for i, snapshot := range in {
				if snapshot == nil || snapshot.Stale {
					continue
				}
				if state, ok := snapshot.States.Get(key); ok {
					if i == 0 {
						all.Service = state.Service
					}
					all.Slices = append(all.Slices, state.Slices...)
				}
			}
			return all.Service, all.Slices
		}
		go cluster.Merge(t.Context(), out, merge, first, second)
		for i, step := range []struct {
			state  *cluster.State
			update func(*cluster.Tx)
			want   []string
		}{
			{first, func(tx *cluster.Tx) {
				tx.SetService(&api.Service{Namespace: "ns", Name: "web"})
				tx.SetSlice(slice("web-1", "web"))
				tx.SetNode(&api.Node{Name: "n1"})
				tx.SetNode(&api.Node{Name: "n3"})
			}, []string{"web web-1"}},
			{second, func(tx *cluster.Tx) { tx.SetSlice(slice("web-2", "web")); tx.SetNode(&api.Node{Name: "n2"}) }, []string{"web web-1 web-2"}},
			{second, func(tx *cluster.Tx) { tx.SetStale(true) }, []string{"web web-1"}},
			{second, func(tx *cluster.Tx) { tx.SetStale(false) }, []string{"web web-1 web-2"}},
			{first, func(tx *cluster.Tx) { tx.DeleteSlice(slice("web-1", "web").Key()) }, []string{"web web-2"}},
			{first, func(tx *cluster.Tx) { tx.DeleteService(key) }, []string{"(web) web-2"}},
			{second, func(tx *cluster.Tx) { tx.DeleteSlice(slice("web-2", "web").Key()) }, []string{}},
		} {
			step.state.Update(step.update)
			if i < 2 {
				step.state.SetSynced()
			}
			synctest.Wait()
			if diff := gocmp.Diff(step.want, joined(out)); diff != "" {
				t.Errorf("after step %d: %s", i, diff)
			}
			if synced := i > 0; out.IsSynced() != synced {
				t.Errorf("after step %d: synced is %t", i, !synced)
			}
		}
		if _, ok := out.Snapshot().Nodes.Get("n3"); !ok || out.Snapshot().Nodes.Len() != 2 {
			t.Error("the nodes are not those of the first state")
		}
	})
}

// TestReaderThatIsLate keeps a reader busy while the state changes. The reader is busy for
// longer than the state remembers deletions.
func TestReaderThatIsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state, out := cluster.New(cluster.Options{}), cluster.New(cluster.Options{})
		service := func(name string) *api.Service { return &api.Service{Namespace: "ns", Name: name} }
		state.Update(func(tx *cluster.Tx) {
			for _, name := range []string{"a", "b", "c", "d"} {
				tx.SetService(service(name))
			}
			tx.SetServiceProblems(service("a").Key(), []error{errors.New("x")})
		})
		state.SetSynced()
		var calls [][]string
		var merged []string
		busy := func() { time.Sleep(20 * time.Minute) }
		go state.Follow(t.Context(), func(_ *cluster.Snapshot, changes iter.Seq[cluster.Change]) {
			var got []string
			for c := range changes {
				got = append(got, fmt.Sprint(c.Key.Name, " ", c.Old != nil, " ", c.New != nil))
			}
			slices.Sort(got)
			calls = append(calls, got)
			busy()
		})
		go cluster.Merge(t.Context(), out, func(key types.NamespacedName, in []*cluster.Snapshot) (*api.Service, []*api.EndpointSlice) {
			if merged = append(merged, key.Name); len(merged) == 4 {
				busy()
			}
			joined, ok := in[0].States.Get(key)
			if !ok {
				return nil, nil
			}
			return joined.Service, joined.Slices
		}, state)
		synctest.Wait()
		state.Update(func(tx *cluster.Tx) {
			tx.DeleteService(service("a").Key())
			tx.DeleteService(service("b").Key())
			tx.SetSlice(slice("c-1", "c"))
		})
		time.Sleep(15 * time.Minute)
		state.Update(func(tx *cluster.Tx) { tx.SetService(service("e")) }) // forgets deletions
		time.Sleep(time.Hour)
		synctest.Wait()
		want := [][]string{
			{"a false true", "b false true", "c false true", "d false true"},
			{"a true false", "b true false", "c true true", "e false true"},
		}
		if diff := gocmp.Diff(want, calls); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
		slices.Sort(merged)
		if want := []string{"a", "a", "b", "b", "c", "c", "d", "e"}; !slices.Equal(merged, want) {
			t.Errorf("merged %v, want %v", merged, want)
		}
		if got := served(out); !slices.Equal(got, []string{"c [] c-1=0", "d []", "e []"}) {
			t.Errorf("the merged state has %q", got)
		}
	})
}

// TestMergeReportsNewReasonsOnly has a merged state that refuses a service for two
// reasons: one of its own, and one from another state.
func TestMergeReportsNewReasonsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports []string
		state := cluster.New(cluster.Options{})
		out := cluster.New(cluster.Options{MaxElements: 11, OnRefused: func(key types.NamespacedName, reason error) {
			reports = append(reports, reason.Error())
		}})
		state.SetSynced()
		go cluster.Merge(t.Context(), out, func(key types.NamespacedName, in []*cluster.Snapshot) (*api.Service, []*api.EndpointSlice) {
			joined, ok := in[0].States.Get(key)
			if !ok {
				return nil, nil
			}
			return joined.Service, nil
		}, state)
		x := errors.New("x")
		small, large := service("a", 1, "10.0.0.1", 1), service("a", 1, "10.0.0.1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
		for i, step := range []struct {
			service  *api.Service
			problems []error
			reports  int
		}{
			{small, nil, 0},
			{small, []error{x}, 1},
			{large, []error{x}, 1},
			{small, []error{x}, 0},
			{small, nil, 0},
		} {
			reports = nil
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(step.service)
				tx.SetServiceProblems(step.service.Key(), step.problems)
			})
			synctest.Wait()
			if len(reports) != step.reports {
				t.Errorf("step %d: reports %q, want %d", i, reports, step.reports)
			}
		}
	})
}

// TestMergeCopiesReasons sets and corrects problems that change no joined state.
func TestMergeCopiesReasons(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second, out := cluster.New(cluster.Options{}), cluster.New(cluster.Options{}), cluster.New(cluster.Options{})
		web := &api.Service{Namespace: "ns", Name: "web"}
		merge := func(key types.NamespacedName, in []*cluster.Snapshot) (*api.Service, []*api.EndpointSlice) {
			for _, snapshot := range in {
				if snapshot != nil {
					if state, ok := snapshot.States.Get(key); ok {
						return state.Service, nil
					}
				}
			}
			return nil, nil
		}
		go cluster.Merge(t.Context(), out, merge, first, second)
		set := func(state *cluster.State, problems ...error) {
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(web)
				tx.SetServiceProblems(web.Key(), problems)
			})
		}
		set(first)
		set(second)
		first.SetSynced()
		second.SetSynced()
		x, y := errors.New("x"), errors.New("y")
		for i, step := range []struct {
			change func()
			want   string
		}{
			{func() { set(first, x) }, "invalid fields ignored: x"},
			{func() { set(second, y) }, "invalid fields ignored: x; invalid fields ignored: y"},
			{func() { set(second, x) }, "invalid fields ignored: x"},
			{func() { set(first) }, "invalid fields ignored: x"},
			{func() { second.Update(func(tx *cluster.Tx) { tx.DeleteService(web.Key()) }) }, ""},
		} {
			step.change()
			synctest.Wait()
			if got, _ := out.Snapshot().Refused.Get(web.Key()); got != step.want {
				t.Errorf("after step %d: reason %q, want %q", i, got, step.want)
			}
		}
	})
}
