// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/apimachinery/pkg/types"
)

// Follow yields exactly the differences, also if the state no longer remembers them.
func TestFollowYieldsDifferences(t *testing.T) {
	for name, between := range map[string]int{"some changes": 1, "more changes than the state remembers": 20_000} {
		t.Run(name, func(t *testing.T) {
			state := cluster.New(cluster.Options{})
			service := func(name string) *api.Service { return &api.Service{Namespace: "ns", Name: name} }
			state.Update(func(tx *cluster.Tx) {
				for _, name := range []string{"a", "b", "c"} {
					tx.SetService(service(name))
				}
			})
			calls := make(chan []string)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan bool)
			go func() {
				defer close(ended)
				state.Follow(ctx, func(snapshot *cluster.Snapshot, changes iter.Seq[cluster.Change]) {
					var got []string
					for c := range changes {
						if now, _ := snapshot.States.Get(c.Key); now != c.New {
							t.Errorf("%s: new state differs from the snapshot", c.Key)
						}
						got = append(got, fmt.Sprint(c.Key.Name, " ", c.Old != nil, " ", c.New != nil))
					}
					slices.Sort(got)
					calls <- got
				})
			}()
			select {
			case got := <-calls:
				t.Errorf("called before the state was synced, with %q", got)
			case <-time.After(10 * time.Millisecond):
			}
			state.SetSynced()
			if diff := gocmp.Diff([]string{"a false true", "b false true", "c false true"}, <-calls); diff != "" {
				t.Error(diff)
			}
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
			got := <-calls
			for len(got) != 2 { // the goroutine may have come between two Updates
				got = append(got, <-calls...)
				got = slices.DeleteFunc(got, func(s string) bool { return s[0] == 'x' })
			}
			if diff := gocmp.Diff([]string{"a true false", "b true true"}, got); diff != "" {
				t.Error(diff)
			}
			cancel()
			for {
				select {
				case <-calls: // it may have come again
				case <-ended:
					return
				}
			}
		})
	}
}

// The merged state has the services of the first state, with the slices of both states. The
// second state loses its slices while it is stale.
// await waits until done returns true, but at most a minute.
func await(done func() bool) {
	for end := time.Now().Add(time.Minute); !done() && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
}

func TestMerge(t *testing.T) {
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
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan bool)
	go func() {
		defer close(ended)
		cluster.Merge(ctx, out, merge, first, second)
	}()
	for i, step := range []struct {
		state  *cluster.State
		update func(*cluster.Tx)
		want   []string
	}{
		{first, func(tx *cluster.Tx) {
			tx.SetService(&api.Service{Namespace: "ns", Name: "web"})
			tx.SetSlice(slice("web-1", "web"))
			tx.SetNode(&api.Node{Name: "n1"})
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
		var got []string
		await(func() bool { got = joined(out); return slices.Equal(got, step.want) })
		if diff := gocmp.Diff(step.want, got); diff != "" {
			t.Errorf("after step %d: %s", i, diff)
		}
		if i == 0 && out.IsSynced() {
			t.Error("synced before the second state")
		}
	}
	<-out.Changed(0)
	if _, ok := out.Snapshot().Nodes.Get("n1"); !ok || out.Snapshot().Nodes.Len() != 1 {
		t.Error("the nodes are not those of the first state")
	}
	cancel()
	<-ended
}

// TestMergeCopiesReasons sets and corrects problems that change no joined state.
func TestMergeCopiesReasons(t *testing.T) {
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
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan bool)
	go func() {
		defer close(ended)
		cluster.Merge(ctx, out, merge, first, second)
	}()
	defer func() { cancel(); <-ended }()
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
		var got string
		await(func() bool { got, _ = out.Snapshot().Refused.Get(web.Key()); return got == step.want })
		if got != step.want {
			t.Errorf("after step %d: reason %q, want %q", i, got, step.want)
		}
	}
}
