// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"
	"weak"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

var equateAddrs = cmpopts.EquateComparable(netip.Addr{})

// service returns a service in the namespace ns. All services have the same address and
// the same age, so their names decide conflicts over the address.
func service(name string) *api.Service {
	return sinktest.Service("ns/"+name, "10.0.0.1 80>8080")
}

// slice returns an EndpointSlice with one ready endpoint in each given zone. Each
// endpoint has a hint for its own zone.
func slice(name, service string, zones ...string) *api.EndpointSlice {
	s := &api.EndpointSlice{
		Namespace: "ns", Name: name, ServiceName: service, Family: api.IPv4,
		Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 8080}},
	}
	addr := netip.MustParseAddr("172.16.0.0")
	for _, zone := range zones {
		addr = addr.Next()
		s.Endpoints = append(s.Endpoints, api.SliceEndpoint{
			Addr:       addr,
			Details:    &api.EndpointDetails{NodeName: "node-" + zone, Zone: zone, Hints: &api.Hints{ForZones: []string{zone}}},
			Conditions: api.Conditions{Ready: true, Serving: true},
		})
	}
	return s
}

func node(name, zone string) *api.Node {
	return &api.Node{Name: name, Labels: map[string]string{"topology.kubernetes.io/zone": zone}}
}

func key(name string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: name} }

// nextLines returns the feed's next update as lines and acknowledges the update.
func nextLines(t *testing.T, f sink.Source) []string {
	t.Helper()
	u, err := f.Next()
	if err != nil {
		t.Fatal(err)
	}
	if u == nil {
		return nil
	}
	f.Advance(u)
	return describe(u)
}

// allChanges returns the changes in u. It returns each service of a full update as new.
func allChanges(u *updates.Update) []sink.Change {
	var changes []sink.Change
	for _, c := range u.Changes {
		changes = append(changes, sink.Change{Key: c.Key, Old: c.Old, New: c.New, TriggerTime: c.TriggerTime})
	}
	if u.Lost {
		for key, v := range u.After(types.NamespacedName{}) {
			changes = append(changes, sink.Change{Key: key, New: v.Get()})
		}
	}
	return changes
}

func describe(u *updates.Update) []string {
	lines := []string{}
	if u.Lost {
		lines = append(lines, "lost")
	}
	if u.NodeChanged {
		lines = append(lines, fmt.Sprintf("node in zone %q", u.Node.Zone()))
	}
	for _, c := range allChanges(u) {
		line := c.Key.Name + ":"
		for old, new := range c.Endpoints() {
			switch {
			case old == nil:
				line += " +" + new.Key()
			case new == nil:
				line += " -" + old.Key()
			default:
				line += " ~" + new.Key()
			}
		}
		if c.New == nil {
			line += " gone"
		}
		if c.Old == nil {
			line += " new"
		}
		lines = append(lines, line)
	}
	return lines
}

func TestUpdates(t *testing.T) {
	state := cluster.New(cluster.Options{})
	f := feed.New(state, "n")
	defer f.Close()

	steps := []struct {
		name string
		do   func(tx *cluster.Tx)
		want []string
	}{
		{"the first update is full, in order of names", func(tx *cluster.Tx) {
			tx.SetService(service("b"))
			tx.SetService(service("a"))
			tx.SetSlice(slice("b-1", "b", "x", "y"))
		}, []string{"lost", `node in zone ""`, "a: new", "b: +172.16.0.1 +172.16.0.2 new"}},
		{"nothing changed", func(tx *cluster.Tx) {
			tx.SetService(service("a"))
		}, []string{}},
		{"a slice without a service is no change", func(tx *cluster.Tx) {
			tx.SetSlice(slice("c-1", "c", "x"))
		}, []string{}},
		{"a new service has the slices that arrived before it", func(tx *cluster.Tx) {
			tx.SetService(service("c"))
		}, []string{"c: +172.16.0.1 new"}},
		{"changes on another node are not delivered", func(tx *cluster.Tx) {
			tx.SetNode(node("other", "y"))
		}, []string{}},
		{"this node becomes known, and its zone selects endpoints", func(tx *cluster.Tx) {
			tx.SetNode(node("n", "y"))
		}, []string{`node in zone "y"`, "b: -172.16.0.1"}},
		{"a change of an endpoint on no list is delivered only as draining", func(tx *cluster.Tx) {
			s := slice("b-1", "b", "x", "y")
			s.Endpoints[0].Conditions = api.Conditions{}
			tx.SetSlice(s)
		}, []string{"b:"}},
		{"a deleted service", func(tx *cluster.Tx) {
			tx.DeleteService(key("b"))
		}, []string{"b: -172.16.0.2 gone"}},
		{"several commits are one update, without objects that were added and deleted", func(tx *cluster.Tx) {
			tx.SetService(service("b"))
			tx.DeleteService(key("b"))
		}, []string{}},
		{"a deleted winner passes its frontend to the next service", func(tx *cluster.Tx) {
			tx.DeleteService(key("a"))
		}, []string{"a: gone", "c:"}},
	}
	for i, step := range steps {
		state.Update(step.do)
		if i == 0 {
			if got := nextLines(t, f); got != nil {
				t.Fatalf("an update before all kinds have synced: %q", got)
			}
			state.SetSynced()
		}
		if diff := cmp.Diff(step.want, nextLines(t, f)); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", step.name, diff)
		}
		if isClosed(f.Changed()) {
			t.Fatalf("%s: changed although everything was acknowledged", step.name)
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

func TestUnacknowledgedChangesAreRepeated(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	f := feed.New(state, "n")
	defer f.Close()
	nextLines(t, f)

	state.Update(func(tx *cluster.Tx) { tx.SetService(service("a")) })
	first, _ := f.Next()
	if again, _ := f.Next(); again != first {
		t.Error("the same update is computed twice")
	}
	state.Update(func(tx *cluster.Tx) { tx.SetService(service("b")) })
	second, _ := f.Next()
	if diff := cmp.Diff([]string{"a: new", "b: new"}, describe(second)); diff != "" {
		t.Errorf("second update (-want +got):\n%s", diff)
	}
	f.Advance(first) // the first update is outdated, so this call must not acknowledge the second update
	if third, _ := f.Next(); third != second {
		t.Error("an outdated update was accepted as acknowledgement")
	}
}

func TestFeedStartsOver(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(*cluster.State, sink.Source)
	}{
		{"after a reset", func(_ *cluster.State, f sink.Source) { f.Reset() }},
		{"when its reader lags too far behind", func(state *cluster.State, f sink.Source) {
			for i := range 10_100 {
				s := service("a")
				s.HealthCheckNodePort = int32(i + 1)
				state.Update(func(tx *cluster.Tx) { tx.SetService(s) })
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			state := cluster.New(cluster.Options{})
			state.SetSynced()
			state.Update(func(tx *cluster.Tx) { tx.SetService(service("a")) })
			f := feed.New(state, "n")
			defer f.Close()
			nextLines(t, f)
			test.do(state, f)
			if !isClosed(f.Changed()) {
				t.Fatal("not changed")
			}
			if diff := cmp.Diff([]string{"lost", `node in zone ""`, "a: new"}, nextLines(t, f)); diff != "" {
				t.Errorf("updates (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTriggerTimeComesFromChangedSlices(t *testing.T) {
	early, late := time.Unix(1000, 0), time.Unix(2000, 0)
	at := func(s *api.EndpointSlice, t time.Time) *api.EndpointSlice {
		s.TriggerTime = t
		return s
	}
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	f := feed.New(state, "n")
	defer f.Close()
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a"))
		tx.SetSlice(at(slice("a-1", "a", "x"), early))
		tx.SetSlice(at(slice("a-2", "a", "x"), early))
	})
	u, _ := f.Next()
	f.Advance(u)

	state.Update(func(tx *cluster.Tx) { tx.SetSlice(at(slice("a-2", "a", "x", "y"), late)) })
	u, _ = f.Next()
	for _, c := range u.Changes {
		if !c.TriggerTime.Equal(late) {
			t.Errorf("trigger time %v, want %v", c.TriggerTime, late)
		}
	}
	f.Advance(u)

	state.Update(func(tx *cluster.Tx) { tx.SetSlice(at(slice("a-3", "a", "y", "y", "z"), early)) })
	u, _ = f.Next()
	for _, c := range u.Changes {
		if !c.TriggerTime.IsZero() {
			t.Errorf("a slice that is new to the reader has trigger time %v", c.TriggerTime)
		}
	}
	f.Advance(u)

	state.Update(func(tx *cluster.Tx) { tx.SetSlice(at(slice("a-2", "a", "x", "y"), late.Add(time.Hour))) })
	if u, _ := f.Next(); len(describe(u)) != 0 {
		t.Errorf("a new trigger time alone is an update: %q", describe(u))
	}
}

func TestOneOfAThousandEndpointsFlips(t *testing.T) {
	zones := make([]string, 1000)
	before, after := slice("a-1", "a", zones...), slice("a-1", "a", zones...)
	for _, s := range []*api.EndpointSlice{before, after} {
		for i := range s.Endpoints {
			s.Endpoints[i].Details.Hints = nil
		}
	}
	after.Endpoints[500].Conditions = api.Conditions{}

	state := cluster.New(cluster.Options{})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) { tx.SetService(service("a")); tx.SetSlice(before) })
	f := feed.New(state, "n")
	defer f.Close()
	nextLines(t, f)
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(after) })
	want := []string{"a: -" + after.Endpoints[500].Addr.String()}
	if diff := cmp.Diff(want, nextLines(t, f)); diff != "" {
		t.Errorf("updates (-want +got):\n%s", diff)
	}
}

// TestUpdatesLeadToCurrentView makes random commits and acknowledges only some updates.
// It compares the reader's state with newly computed views.
func TestUpdatesLeadToCurrentView(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 1))
		zone := func() string { return string(rune('x' + random.IntN(3))) }
		state := cluster.New(cluster.Options{})
		state.SetSynced()
		f := feed.New(state, "node-x")
		received := map[types.NamespacedName]*api.View{}
		for range 60 {
			state.Update(func(tx *cluster.Tx) {
				for range random.IntN(4) {
					name := string(rune('a' + random.IntN(4)))
					switch random.IntN(6) {
					case 0:
						tx.DeleteService(key(name))
					case 1:
						tx.SetService(service(name))
					case 2, 3:
						tx.SetSlice(slice(fmt.Sprint("s", random.IntN(5)), name, zone(), zone()))
					case 4:
						tx.DeleteSlice(key(fmt.Sprint("s", random.IntN(5))))
					case 5:
						tx.SetNode(node("node-x", zone()))
					}
				}
			})
			if random.IntN(20) == 0 {
				f.Reset()
			}
			u, _ := f.Next()
			if random.IntN(3) == 0 {
				continue
			}
			if u.Lost {
				clear(received)
			}
			last := types.NamespacedName{}
			for _, c := range allChanges(u) {
				if ordering.Keys(last, c.Key) >= 0 {
					t.Fatalf("seed %d: %v after %v", seed, c.Key, last)
				}
				last = c.Key
				if !u.Lost && !c.Old.Equal(received[c.Key]) {
					t.Fatalf("seed %d: old view of %v differs from the acknowledged one", seed, c.Key)
				}
				received[c.Key] = c.New
				if c.New == nil {
					delete(received, c.Key)
				}
				if view := u.View(c.Key); !view.Equal(c.New) {
					t.Fatalf("seed %d: the view in the change of %v differs from View", seed, c.Key)
				}
			}
			f.Advance(u)

			want := map[types.NamespacedName]*api.View{}
			snapshot := state.Snapshot()
			self, _ := snapshot.Nodes.Get("node-x")
			if self == nil {
				self = &api.Node{Name: "node-x"}
			}
			for k, s := range snapshot.States.All() {
				if view := nodeview.View(s, self); view != nil {
					want[k] = view
				}
			}
			if diff := cmp.Diff(want, received, equateAddrs); diff != "" {
				t.Fatalf("seed %d (-want +got):\n%s", seed, diff)
			}
		}
		f.Close()
	}
}

// filledState returns a synced state of n services with the given slices.
func filledState(n int, sliceOf func(name string) *api.EndpointSlice) *cluster.State {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) {
		for i := range n {
			s := service(fmt.Sprint("s", i))
			s.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
			tx.SetService(s)
			tx.SetSlice(sliceOf(s.Name))
		}
	})
	return state
}

func BenchmarkOneEndpointChanges(b *testing.B) {
	for _, n := range []int{1_000, 50_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			zones := make([]string, 10)
			state := filledState(n, func(name string) *api.EndpointSlice { return slice(name, name, zones...) })
			f := feed.New(state, "n")
			defer f.Close()
			u, _ := f.Next()
			f.Advance(u)
			versions := [2]*api.EndpointSlice{slice("s7", "s7", zones...), slice("s7", "s7", zones...)}
			versions[1].Endpoints[3].Conditions = api.Conditions{}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				state.Update(func(tx *cluster.Tx) { tx.SetSlice(versions[i%2]) })
				u, _ := f.Next()
				if len(u.Changes) != 1 {
					b.Fatal("the update does not have exactly one change")
				}
				f.Advance(u)
			}
		})
	}
}

// Feeds of one node share the views of changes, and each delivers every change once.
func TestFeedsShareViews(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	feeds := feed.NewAll(state, "n", 2)
	fast, slow := feeds[0], feeds[1]
	defer fast.Close()
	defer slow.Close()
	nextLines(t, fast)
	nextLines(t, slow)
	change := func(f sink.Source) updates.Change {
		t.Helper()
		u, _ := f.Next()
		f.Advance(u)
		if len(u.Changes) != 1 {
			t.Fatalf("%d changes, want 1", len(u.Changes))
		}
		return u.Changes[0]
	}

	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a"))
		tx.SetSlice(slice("a-1", "a", "x"))
	})
	first := change(fast)
	if again := change(slow); again.New != first.New {
		t.Error("the feeds have different views of a new service")
	}
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(slice("a-1", "a", "x", "y")) })
	second := change(fast)
	if second.Old != first.New {
		t.Error("the new view of a change is not the old view of the next change")
	}
	state.Update(func(tx *cluster.Tx) { tx.SetNode(node("n", "y")) })
	third := change(fast)
	if addr := third.New.Endpoints[0].Addr.String(); len(third.New.Endpoints) != 1 || addr != "172.16.0.2" {
		t.Errorf("after a change of the zone, the view has %d endpoints and begins with %s", len(third.New.Endpoints), addr)
	}
	if merged := change(slow); merged.Old != first.New && !merged.Old.Equal(first.New) || !merged.New.Equal(third.New) {
		t.Error("the slow feed has different views")
	}
}

// A new view names the present owner of a lost claim. A change of the owner alone changes no
// view.
func TestViewsNameTheOwnersOfLostClaims(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) {
		for _, name := range []string{"a", "b", "c"} {
			tx.SetService(service(name))
		}
	})
	feeds := feed.NewAll(state, "n", 2)
	for _, f := range feeds {
		defer f.Close()
		nextLines(t, f)
	}
	owner := func(view *api.View) string { return view.Lost[0].Winner.Name }
	for _, f := range feeds {
		u, _ := f.Next()
		if got := owner(u.View(key("c"))); got != "a" {
			t.Errorf("c has lost its claim to %q, want a", got)
		}
	}
	state.Update(func(tx *cluster.Tx) { tx.DeleteService(key("a")) })
	for _, f := range feeds {
		u, _ := f.Next()
		for _, c := range u.Changes {
			if c.Key == key("c") {
				t.Error("a change of the owner changes the view of c")
			}
		}
		for k, view := range u.After(key("b")) {
			if got := owner(view.Get()); got != "b" {
				t.Errorf("%s has lost its claim to %q, want b", k, got)
			}
		}
		f.Advance(u)
	}
	state.Update(func(tx *cluster.Tx) {
		renamed := service("c")
		renamed.Labels = map[string]string{"app": "c"}
		tx.SetService(renamed)
	})
	for _, f := range feeds {
		u, _ := f.Next()
		if got := owner(u.Changes[0].New); got != "b" {
			t.Errorf("the new view of c names the owner %q, want b", got)
		}
	}
}

// Feeds keep only a limited number of the views that they share.
func TestSharedViewsAreDropped(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	feeds := feed.NewAll(state, "n", 2)
	f := feeds[0]
	defer f.Close()
	defer feeds[1].Close()
	nextLines(t, f)
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a"))
		tx.SetSlice(slice("a-1", "a", "x"))
	})
	u, _ := f.Next()
	f.Advance(u)
	view := weak.Make(u.Changes[0].New)
	u = nil
	for i := range 10_000 {
		s := slice("a-1", "a", "x")
		s.Endpoints[0].Addr = netip.AddrFrom4([4]byte{172, 17, byte(i >> 8), byte(i)})
		state.Update(func(tx *cluster.Tx) { tx.SetSlice(s) })
		nextLines(t, f)
	}
	runtime.GC()
	if view.Value() != nil {
		t.Error("an outdated view was kept")
	}
}

// BenchmarkReaders measures the CPU time of a change for the readers of one node, as in a
// proxy with a backend, health checks and connection tracking. Each reader computes the
// frontends of the views. It compares one feed, three separate feeds, and three feeds
// that share views.
func BenchmarkReaders(b *testing.B) {
	for _, endpoints := range []int{10, 100} {
		for _, test := range []struct {
			name  string
			feeds func(*cluster.State) []sink.Source
		}{
			{"one", func(s *cluster.State) []sink.Source { return feed.NewAll(s, "n", 1) }},
			{"three", func(s *cluster.State) []sink.Source {
				return slices.Concat(feed.NewAll(s, "n", 1), feed.NewAll(s, "n", 1), feed.NewAll(s, "n", 1))
			}},
			{"three-sharing", func(s *cluster.State) []sink.Source { return feed.NewAll(s, "n", 3) }},
		} {
			b.Run(fmt.Sprintf("endpoints=%d/readers=%s", endpoints, test.name), func(b *testing.B) {
				const services = 10_000
				changed := func(name string, ready bool) *api.EndpointSlice {
					s := slice(name, name, make([]string, endpoints)...)
					s.Endpoints[3].Ready = ready
					return s
				}
				state := filledState(services, func(name string) *api.EndpointSlice { return changed(name, true) })
				feeds := test.feeds(state)
				for _, f := range feeds {
					defer f.Close()
					u, _ := f.Next()
					f.Advance(u)
				}
				b.ReportAllocs()
				for n := 0; b.Loop(); n++ {
					b.StopTimer()
					s := changed(fmt.Sprint("s", n*7919%services), n/services%2 == 1)
					b.StartTimer()
					state.Update(func(tx *cluster.Tx) { tx.SetSlice(s) })
					for _, f := range feeds {
						u, _ := f.Next()
						for _, c := range u.Changes {
							for range nodeview.Frontends(c.Old) {
							}
							for range nodeview.Frontends(c.New) {
							}
						}
						f.Advance(u)
					}
				}
			})
		}
	}
}
