// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"github.com/kpng-project/kpng/internal/revstore"
	"k8s.io/apimachinery/pkg/types"
)

func slice(name, service string) *api.EndpointSlice {
	return &api.EndpointSlice{Namespace: "ns", Name: name, ServiceName: service, Family: api.IPv4}
}

// revisions returns a snapshot of a store with the methods for revisions.
func revisions[K, V any](s *diffstore.Snapshot[K, V]) *revstore.Snapshot[K, V] {
	return (*revstore.Snapshot[K, V])(s)
}

// changedSince returns the names of the services that changed after a snapshot.
func changedSince(t *testing.T, state *cluster.State, before *cluster.Snapshot) []string {
	t.Helper()
	changes, ok := revisions(state.Snapshot().States).Since(revisions(before.States).Revision())
	if !ok {
		t.Fatal("the changes are no longer known")
	}
	names := []string{}
	for key := range changes {
		names = append(names, key.Name)
	}
	slices.Sort(names)
	return names
}

// joined returns the joined slices of each service in the form "service: slices".
func joined(state *cluster.State) []string {
	list := []string{}
	for k, s := range state.Snapshot().States.All() {
		line := k.Name
		if s.Service == nil {
			line = "(" + line + ")"
		}
		for _, slice := range s.Slices {
			line += " " + slice.Name
		}
		list = append(list, line)
	}
	return list
}

func TestServicesAndSlicesAreJoined(t *testing.T) {
	a := service("a", 1, "10.0.0.1", 80)
	b := service("b", 1, "10.0.0.2", 80)
	steps := []struct {
		name        string
		write       func(tx *cluster.Tx)
		want        []string
		wantChanged []string
	}{
		{"a slice may come before its service",
			func(tx *cluster.Tx) { tx.SetSlice(slice("a-2", "a")) },
			[]string{"(a) a-2"}, []string{"a"}},
		{"the service is joined with its slices",
			func(tx *cluster.Tx) { tx.SetService(a); tx.SetService(b) },
			[]string{"a a-2", "b"}, []string{"a", "b"}},
		{"slices are in order of their names",
			func(tx *cluster.Tx) { tx.SetSlice(slice("a-3", "a")); tx.SetSlice(slice("a-1", "a")) },
			[]string{"a a-1 a-2 a-3", "b"}, []string{"a"}},
		{"an equal slice changes nothing",
			func(tx *cluster.Tx) { tx.SetSlice(slice("a-1", "a")) },
			[]string{"a a-1 a-2 a-3", "b"}, []string{}},
		{"a slice whose label changes moves to the other service",
			func(tx *cluster.Tx) { tx.SetSlice(slice("a-2", "b")) },
			[]string{"a a-1 a-3", "b a-2"}, []string{"a", "b"}},
		{"a listing removes what is not in it",
			func(tx *cluster.Tx) {
				tx.ReplaceSlices(slices.Values([]*api.EndpointSlice{slice("a-1", "a"), slice("b-1", "b")}))
			},
			[]string{"a a-1", "b b-1"}, []string{"a", "b"}},
		{"a deleted service leaves its slices without a service",
			func(tx *cluster.Tx) { tx.DeleteService(a.Key()) },
			[]string{"(a) a-1", "b b-1"}, []string{"a"}},
		{"a deleted service without slices has no state",
			func(tx *cluster.Tx) { tx.DeleteSlice(key("a-1")) },
			[]string{"b b-1"}, []string{"a"}},
		{"changes of nodes do not change services",
			func(tx *cluster.Tx) { tx.SetNode(&api.Node{Name: "n"}) },
			[]string{"b b-1"}, []string{}},
	}
	state := cluster.New(cluster.Options{Resumable: true})
	for _, step := range steps {
		before := state.Snapshot()
		state.Update(step.write)
		if diff := gocmp.Diff(step.want, joined(state)); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", step.name, diff)
		}
		if diff := gocmp.Diff(step.wantChanged, changedSince(t, state, before)); diff != "" {
			t.Fatalf("%s: changed services (-want +got):\n%s", step.name, diff)
		}
	}
}

// TestObjectsAndJoinedStatesAgree makes random changes, and compares the objects and the
// joined states with a model. One of the states gets its first call of Objects late.
func TestObjectsAndJoinedStatesAgree(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		late := random.IntN(30)
		states := [...]*cluster.State{cluster.New(cluster.Options{Resumable: true}), cluster.New(cluster.Options{})}
		services, endpoints := map[string]*api.Service{}, map[string]*api.EndpointSlice{}
		anyService := func() *api.Service {
			return service(fmt.Sprint("s", random.IntN(4)), random.IntN(2), "10.0.0.1", 80)
		}
		anySlice := func() *api.EndpointSlice {
			return slice(fmt.Sprint("e", random.IntN(6)), fmt.Sprint("s", random.IntN(4)))
		}
		for step := range 30 {
			a, b := anyService(), anySlice()
			var write func(tx *cluster.Tx)
			switch random.IntN(6) {
			case 0:
				write = func(tx *cluster.Tx) { tx.DeleteService(a.Key()) }
				delete(services, a.Name)
			case 1:
				write = func(tx *cluster.Tx) { tx.DeleteSlice(b.Key()) }
				delete(endpoints, b.Name)
			case 2: // the listing may repeat a service
				list := []*api.Service{a, anyService(), anyService()}
				write = func(tx *cluster.Tx) { tx.ReplaceServices(slices.Values(list)) }
				clear(services)
				for _, s := range list {
					services[s.Name] = s
				}
			case 3:
				list := []*api.EndpointSlice{b, anySlice(), anySlice()}
				write = func(tx *cluster.Tx) { tx.ReplaceSlices(slices.Values(list)) }
				clear(endpoints)
				for _, s := range list {
					endpoints[s.Name] = s
				}
			default:
				write = func(tx *cluster.Tx) { tx.SetService(a); tx.SetSlice(b) }
				services[a.Name], endpoints[b.Name] = a, b
			}
			var want []string
			for _, name := range []string{"s0", "s1", "s2", "s3"} {
				line := name
				if services[name] == nil {
					line = "(" + name + ")"
				}
				for _, e := range slices.Sorted(maps.Keys(endpoints)) {
					if endpoints[e].ServiceName == name {
						line += " " + e
					}
				}
				if line != "("+name+")" {
					want = append(want, line)
				}
			}
			for i, state := range states {
				state.Update(write)
				if diff := gocmp.Diff(want, joined(state), cmpopts.EquateEmpty()); diff != "" {
					t.Fatalf("seed %d, step %d (-want +got):\n%s", seed, step, diff)
				}
				if i == 1 && step < late {
					continue
				}
				objects := state.Objects()
				s, e := map[string]*api.Service{}, map[string]*api.EndpointSlice{}
				for key, service := range objects.Services.All() {
					s[key.Name] = service
				}
				for key, slice := range objects.Slices.All() {
					e[key.Name] = slice
				}
				if diff := gocmp.Diff(services, s, equateAddrs) + gocmp.Diff(endpoints, e, equateAddrs); diff != "" {
					t.Fatalf("seed %d, step %d (-want +got):\n%s", seed, step, diff)
				}
				if state.Snapshot() != objects.Snapshot {
					t.Fatalf("seed %d, step %d: Objects and Snapshot return different states", seed, step)
				}
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestReadersSeeNothingUntilSynced(t *testing.T) {
	state := cluster.New(cluster.Options{})
	changed := state.Changed(0)
	state.Update(func(tx *cluster.Tx) { tx.SetService(service("a", 1, "10.0.0.1", 80)) })
	if isClosed(changed) || isClosed(state.Changed(0)) || state.IsSynced() {
		t.Fatal("woken before all kinds have synced")
	}
	state.SetSynced()
	state.SetSynced()
	if !isClosed(changed) || !isClosed(state.Changed(0)) || !state.IsSynced() {
		t.Fatal("not woken although all kinds have synced")
	}
}

// A reader with an old state of an incomplete cluster is woken when the cluster is complete.
func TestSyncWakesAReaderWithAnOldState(t *testing.T) {
	state := cluster.New(cluster.Options{})
	update := func(name string) {
		state.Update(func(tx *cluster.Tx) { tx.SetService(service(name, 1, "10.0.0.1", 80)) })
	}
	update("a")
	changed := state.Changed(state.Snapshot().Revision)
	update("b")
	if isClosed(changed) {
		t.Error("woken before the state is synced")
	}
	state.SetSynced()
	if !isClosed(changed) {
		t.Error("not woken when the state is synced")
	}
}

func TestAReaderIsWokenByChangesOnly(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	set := func() {
		state.Update(func(tx *cluster.Tx) { tx.SetService(service("a", 1, "10.0.0.1", 80)) })
	}
	set()
	seen := state.Snapshot()
	changed := state.Changed(seen.Revision)
	set()
	if isClosed(changed) {
		t.Error("woken by a write that changed nothing")
	}
	if state.Snapshot() != seen {
		t.Error("a new snapshot without a change")
	}
	state.Update(func(tx *cluster.Tx) { tx.SetNode(&api.Node{Name: "n"}) })
	if !isClosed(changed) {
		t.Error("not woken by a change")
	}
}

// A caller may recover from the panic, as controller-runtime does for its reconcilers.
func TestChangesBeforePanicAreVisible(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	before := state.Snapshot()
	changed := state.Changed(before.Revision)
	func() {
		defer func() { recover() }()
		state.Update(func(tx *cluster.Tx) {
			tx.SetService(service("a", 1, "10.0.0.1", 80))
			panic("half way")
		})
	}()
	if !isClosed(changed) {
		t.Error("the change wakes no reader")
	}
	after := state.Objects()
	if n := after.Services.Len(); n != 1 {
		t.Errorf("the snapshot has %d services, want 1", n)
	}
	if isClosed(state.Changed(after.Revision)) {
		t.Error("the snapshot is not current, so a reader would spin")
	}
}

func TestSnapshotDoesNotWaitForUpdates(t *testing.T) {
	state := cluster.New(cluster.Options{})
	for i := range 1000 {
		read := make(chan int)
		go func() { read <- state.Snapshot().Nodes.Len() }() // before or after Update begins
		state.Update(func(tx *cluster.Tx) {
			tx.SetNode(&api.Node{Name: fmt.Sprint(i)})
			if n := <-read; n != i {
				t.Errorf("a reader sees %d nodes during Update %d, want those before it", n, i)
			}
		})
	}
}

func TestEmptyClusterWakesReaderWithoutState(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	if !isClosed(state.Changed(0)) {
		t.Error("a reader without state waits forever")
	}
	if isClosed(state.Changed(state.Snapshot().Revision)) {
		t.Error("a reader that has read the empty cluster is woken")
	}
}

func TestDeletionsAreRememberedForServersOnly(t *testing.T) {
	for _, resumable := range []bool{false, true} {
		t.Run(fmt.Sprintf("resumable=%v", resumable), func(t *testing.T) {
			state := cluster.New(cluster.Options{Resumable: resumable})
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(service("a", 1, "10.0.0.1", 80))
				tx.SetSlice(slice("a-1", "a"))
			})
			cursor := revisions(state.Snapshot().States).NewCursor()
			defer cursor.Close()
			before := state.Snapshot()
			cursor.Advance(revisions(before.States))
			state.Update(func(tx *cluster.Tx) {
				tx.DeleteService(key("a"))
				tx.DeleteSlice(key("a-1"))
			})
			if _, ok := revisions(state.Snapshot().States).Since(before.Revision); !ok {
				t.Error("deletions are no longer known before the cursor has passed")
			}
			cursor.Advance(revisions(state.Snapshot().States))
			state.Update(func(tx *cluster.Tx) { // drops tombstones, unless the state is resumable
				tx.SetService(service("b", 1, "10.0.0.1", 80))
				tx.SetSlice(slice("b-1", "b"))
			})
			after := state.Objects()
			_, services := revisions(after.Services).Since(before.Revision)
			_, slices := revisions(after.Slices).Since(before.Revision)
			_, states := revisions(after.States).Since(before.Revision)
			if services != resumable || slices != resumable || states != resumable {
				t.Errorf("remembered: services %v, slices %v, states %v; want %v", services, slices, states, resumable)
			}
		})
	}
}

func TestCommitIsAtomic(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	var wait sync.WaitGroup
	wait.Go(func() {
		for i := range 2000 {
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(service("a", i, "10.0.0.1", 80))
				tx.SetService(service("b", i, "10.0.0.2", 80))
			})
		}
	})
	for range 4 {
		wait.Go(func() {
			for range 2000 {
				snapshot := state.Objects()
				a, _ := snapshot.States.Get(key("a"))
				b, _ := snapshot.Services.Get(key("b"))
				if a == nil && b == nil {
					continue
				}
				if a == nil || b == nil || !a.Service.Created.Equal(b.Created) {
					t.Error("a snapshot shows a part of a commit")
					return
				}
			}
		})
	}
	wait.Wait()
}

func TestLastCommitsAreKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := cluster.New(cluster.Options{})
		commits := func() []revstore.Commit { return revisions(state.Snapshot().States).Revisions().Commits() }
		if got := commits(); len(got) > 0 {
			t.Errorf("a new state has the commits %v", got)
		}
		var want []revstore.Commit
		for i := range 600 {
			first := state.Snapshot().Revision + 1
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(service("a", i, "10.0.0.1", 80))
				tx.SetService(service("b", i, "10.0.0.2", 80))
			})
			want = append(want, revstore.Commit{First: first, Last: state.Snapshot().Revision, Time: time.Now()})
			state.Update(func(*cluster.Tx) {}) // no change, so no commit
			want = want[max(0, len(want)-256):]
			if diff := gocmp.Diff(want, commits()); diff != "" {
				t.Fatalf("after %d commits (-want +got):\n%s", i+1, diff)
			}
			time.Sleep(time.Second)
		}
	})
}

func BenchmarkOneSliceChanges(b *testing.B) {
	for _, n := range []int{1_000, 50_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			state := cluster.New(cluster.Options{})
			state.Update(func(tx *cluster.Tx) {
				for i := range n {
					name := fmt.Sprint("s", i)
					tx.SetService(service(name, 1, fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), 80))
					tx.SetSlice(slice(name, name))
				}
			})
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				changed := slice("s7", "s7")
				changed.Ports = []api.EndpointPort{{Port: int32(i)}}
				state.Update(func(tx *cluster.Tx) { tx.SetSlice(changed) })
				state.Snapshot()
			}
		})
	}
}

func TestAStaleStateIsAChange(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	for _, stale := range []bool{true, false} {
		before := state.Snapshot()
		changed := state.Changed(before.Revision)
		for range 2 { // the second round changes nothing
			state.Update(func(tx *cluster.Tx) { tx.SetStale(stale) })
		}
		after := state.Snapshot()
		if after.Stale != stale || before.Stale == stale || after.Revision != before.Revision+1 {
			t.Errorf("stale %t at %d, then %t at %d", before.Stale, before.Revision, after.Stale, after.Revision)
		}
		select {
		case <-changed:
		default:
			t.Error("readers are not woken")
		}
	}
}

func TestDeleteNode(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		tx.SetNode(&api.Node{Name: "n1"})
		tx.SetNode(&api.Node{Name: "n2"})
	})
	state.Update(func(tx *cluster.Tx) { tx.DeleteNode("n1") })
	nodes := state.Snapshot().Nodes
	if _, ok := nodes.Get("n2"); !ok || nodes.Len() != 1 {
		t.Errorf("the state has %d nodes, want n2 only", nodes.Len())
	}
}

// The last error of the source does not wake readers.
func TestSourceErrorIsNoChange(t *testing.T) {
	state := cluster.New(cluster.Options{})
	if err := state.SourceError(); err != nil {
		t.Errorf("a new state has the error %v", err)
	}
	before := state.Snapshot()
	for _, err := range []error{errors.New("connection refused"), errors.New("timeout"), nil} {
		state.SetSourceError(err)
		if got := state.SourceError(); got != err {
			t.Errorf("got %v, want %v", got, err)
		}
	}
	if state.Snapshot() != before {
		t.Error("the snapshot has changed")
	}
}

func TestReadersDoNotWaitForAnUpdate(t *testing.T) {
	for _, resumable := range []bool{false, true} {
		state := cluster.New(cluster.Options{Resumable: resumable})
		state.SetSynced()
		state.Update(func(tx *cluster.Tx) {
			tx.SetService(with(service("a", 1, "10.0.0.1", 80), external("10.9.9.9")))
			tx.SetService(with(service("b", 2, "10.0.0.2", 80), external("10.9.9.9")))
		})
		// No reader has requested a snapshot since the last commit, and a claim has moved.
		state.Update(func(tx *cluster.Tx) { tx.DeleteService(key("a")) })
		read := make(chan *cluster.Snapshot)
		state.Update(func(tx *cluster.Tx) {
			tx.DeleteService(key("b"))
			go func() {
				snapshot := state.Snapshot()
				state.Changed(snapshot.Revision)
				revisions(snapshot.States).Revisions().Commits()
				if resumable {
					state.Objects()
				}
				read <- snapshot
			}()
			select {
			case snapshot := <-read:
				if n := snapshot.States.Len(); n != 1 {
					t.Errorf("readers see %d services during the Update, want 1", n)
				}
				select {
				case <-state.Changed(snapshot.Revision):
					t.Error("the running Update counts as a change")
				default:
				}
			case <-time.After(time.Minute):
				t.Error("readers wait for the Update")
			}
		})
		if n := state.Snapshot().States.Len(); n != 0 {
			t.Errorf("readers see %d services after the Update, want 0", n)
		}
	}
}

// Listings modify lists of slices in place, but not those of a snapshot.
func TestSnapshotKeepsItsSlices(t *testing.T) {
	state := cluster.New(cluster.Options{})
	names := func(snapshot *cluster.Snapshot) (all []string) {
		s, _ := snapshot.States.Get(key("a"))
		for _, slice := range s.Slices {
			all = append(all, slice.Name)
		}
		return all
	}
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 1, "10.0.0.1", 80))
		for _, name := range []string{"s2", "s4", "s1", "s3"} {
			tx.SetSlice(slice(name, "a"))
		}
	})
	before := state.Snapshot()
	changed := slice("s2", "a")
	changed.Ports = []api.EndpointPort{{Port: 81}}
	state.Update(func(tx *cluster.Tx) {
		tx.DeleteSlice(key("s1"))
		tx.SetSlice(changed)
		tx.SetSlice(slice("s0", "a"))
		tx.DeleteSlice(key("s4"))
	})
	if got := names(before); !slices.Equal(got, []string{"s1", "s2", "s3", "s4"}) {
		t.Errorf("the earlier snapshot has %v", got)
	}
	if s, _ := before.States.Get(key("a")); s.Slices[1] == changed {
		t.Error("the earlier snapshot has the new version of a slice")
	}
	if got := names(state.Snapshot()); !slices.Equal(got, []string{"s0", "s2", "s3"}) {
		t.Errorf("the state has %v", got)
	}
}

// BenchmarkManySlicesOfOneService lists and deletes slices of one service.
func BenchmarkManySlicesOfOneService(b *testing.B) {
	for _, n := range []int{2500, 5000, 10_000} {
		b.Run(fmt.Sprint(n, " slices"), func(b *testing.B) {
			var list []*api.EndpointSlice
			for i := range n {
				list = append(list, slice(fmt.Sprintf("s%06d", i), "a"))
			}
			b.ReportAllocs()
			for b.Loop() {
				state := cluster.New(cluster.Options{})
				state.Update(func(tx *cluster.Tx) { tx.ReplaceSlices(slices.Values(list)) })
				state.Update(func(tx *cluster.Tx) { tx.ReplaceSlices(slices.Values(list[:0])) })
			}
		})
	}
}

// A State modifies a long list of slices in place, but not if a snapshot has it.
func TestSnapshotKeepsItsManySlices(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 1, "10.0.0.1", 80))
		for i := range 20 {
			tx.SetSlice(slice(fmt.Sprintf("s%02d", i), "a"))
		}
	})
	before, _ := state.Snapshot().States.Get(key("a"))
	want := slices.Clone(before.Slices)
	state.Update(func(tx *cluster.Tx) {
		tx.DeleteSlice(key("s03"))
		changed := slice("s10", "a")
		changed.Ports = []api.EndpointPort{{Port: 81}}
		tx.SetSlice(changed)
	})
	if !slices.Equal(before.Slices, want) {
		t.Error("an Update changed the slices of an earlier snapshot")
	}
	if after, _ := state.Snapshot().States.Get(key("a")); len(after.Slices) != 19 {
		t.Errorf("the state has %d slices, want 19", len(after.Slices))
	}
}

func TestReplaceSlicesOfOneService(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		tx.SetSlice(slice("web-1", "web"))
		tx.SetSlice(slice("web-2", "web"))
		tx.SetSlice(slice("db-1", "db"))
		tx.ReplaceSlicesOf(types.NamespacedName{Namespace: "ns", Name: "web"}, slices.Values([]*api.EndpointSlice{slice("web-2", "web"), slice("web-3", "web")}))
	})
	if diff := gocmp.Diff([]string{"(db) db-1", "(web) web-2 web-3"}, joined(state)); diff != "" {
		t.Error(diff)
	}
}
