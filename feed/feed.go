// SPDX-License-Identifier: Apache-2.0

// Package feed computes one node's view from the cluster's state. A feed is the
// [sink.Source] of a proxy that reads the Kubernetes API itself.
//
//	state := cluster.New(cluster.Options{})
//	go kube.Watch(ctx, state, kube.Options{NodeName: node})
//	f := feed.New(state, node)
//	defer f.Close()
//	err := sink.Run(ctx, f, mySink, sink.Options{})
//
// A feed keeps only the snapshot that its reader last acknowledged. It computes views
// only on request. For a change, it computes the old and the new view from two snapshots.
// So thousands of feeds that read the same state cost little more than a single feed.
// Until a feed is closed, the state remembers deletions since the feed's snapshot.
package feed

import (
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// feed is a [sink.Source] for one node and one reader.
type feed struct {
	state *cluster.State
	// stub is a Node that has only a name. While the Node object is not known, the feed uses
	// stub, so only the name decides which endpoints are local.
	stub   *api.Node
	views  *views
	cursor *revstore.Cursor[types.NamespacedName, *api.ServiceState]

	// The fields acked, node and cursor describe the state that the reader last acknowledged.
	// At first and after Reset, acked is empty and node is nil.
	acked *cluster.Snapshot
	node  *api.Node

	offered offer
}

// offer is the last result of Next, until Advance acknowledges it.
type offer struct {
	update   *updates.Update
	snapshot *cluster.Snapshot
}

// New returns a feed that computes the views of the named node from state. If the name is
// empty, no endpoint is local, and the feed has no Node object.
func New(state *cluster.State, nodeName string) sink.Source { return newFeed(state, nodeName, nil) }

func newFeed(state *cluster.State, nodeName string, shared *views) *feed {
	return &feed{state: state, stub: &api.Node{Name: nodeName}, views: shared, cursor: newCursor(state), acked: new(cluster.Snapshot)}
}

// NewAll returns n feeds like [New], for n readers. The feeds share the views that they
// compute for changes, and keep recent views. Each feed has its own position, so no reader
// delays another.
func NewAll(state *cluster.State, nodeName string, n int) []sink.Source {
	var shared *views
	if n > 1 {
		shared = &views{}
	}
	feeds := make([]sink.Source, n)
	for i := range feeds {
		feeds[i] = newFeed(state, nodeName, shared)
	}
	return feeds
}

// states are the joined states of all services in a snapshot.
type states = revstore.Snapshot[types.NamespacedName, *api.ServiceState]

func statesOf(s *cluster.Snapshot) *states { return (*states)(s.States) }

func newCursor(state *cluster.State) *revstore.Cursor[types.NamespacedName, *api.ServiceState] {
	return statesOf(state.Snapshot()).NewCursor()
}

// Changed implements [sink.Source].
func (f *feed) Changed() <-chan struct{} { return f.state.Changed(f.acked.Revision) }

// Next implements [sink.Source]. It never fails.
func (f *feed) Next() (*updates.Update, error) {
	if !f.state.IsSynced() {
		return nil, nil
	}
	snapshot := f.state.Snapshot()
	if f.offered.snapshot != snapshot {
		f.offered = offer{f.update(snapshot), snapshot}
	}
	return f.offered.update, nil
}

// Advance implements [sink.Source].
func (f *feed) Advance(u *updates.Update) {
	if u != f.offered.update {
		return
	}
	f.cursor.Advance(statesOf(f.offered.snapshot))
	f.acked = f.offered.snapshot
	f.node = u.Node
	f.offered = offer{}
}

// Reset implements [sink.Source].
func (f *feed) Reset() {
	f.cursor.Close()
	f.cursor = newCursor(f.state)
	f.acked, f.node, f.offered = new(cluster.Snapshot), nil, offer{}
}

// Close implements [sink.Source].
func (f *feed) Close() { f.cursor.Close() }

// update returns the difference between the acknowledged state and snapshot.
func (f *feed) update(snapshot *cluster.Snapshot) *updates.Update {
	delta := f.cursor.Until(statesOf(snapshot))
	node, _ := snapshot.Nodes.Get(f.stub.Name)
	after := view{snapshot, f.self(node)}

	u := &updates.Update{
		Lost: delta.Full(), Revision: snapshot.Revision, Node: node, NodeChanged: true,
		View: func(key types.NamespacedName) *api.View {
			state, _ := snapshot.States.Get(key)
			return f.views.of(state, after)
		},
		After: after.viewsAfter,
	}
	if u.Lost {
		return u
	}
	u.NodeChanged = !node.Equal(f.node)
	before := view{f.acked, f.self(f.node)}
	f.addChanges(u, before, after, delta)
	return u
}

// self returns the node whose views the feed computes.
func (f *feed) self(node *api.Node) *api.Node {
	if node == nil {
		return f.stub
	}
	return node
}

// view computes a node's view of each service in a snapshot.
type view struct {
	snapshot *cluster.Snapshot
	node     *api.Node
}

func (v view) of(state *api.ServiceState) *api.View {
	if state == nil {
		return nil
	}
	return nodeview.View(v.snapshot.WithWinners(state), v.node)
}

// viewsAfter yields all services whose key is greater than key, in order.
func (v view) viewsAfter(key types.NamespacedName) iter.Seq2[types.NamespacedName, updates.View] {
	return func(yield func(types.NamespacedName, updates.View) bool) {
		for key, state := range statesOf(v.snapshot).After(key) {
			if !hasView(state) {
				continue
			}
			if !yield(key, updates.View{Size: size(state), Compute: func() *api.View { return v.of(state) }}) {
				return
			}
		}
	}
}

// hasView reports whether [nodeview.View] returns a view of the service.
func hasView(state *api.ServiceState) bool {
	return state != nil && state.Service != nil && state.Service.Type != api.ExternalName
}

// size returns the size of a view of the service, without computing the view.
func size(state *api.ServiceState) int {
	if !hasView(state) {
		return 1
	}
	return 1 + int(elements.OfState(state).Total())
}

// addChanges adds to u the services whose views differ, in key order. If the zone of the
// node changed, it compares all services. Otherwise it compares the changed services in
// delta. It does not compare large services.
func (f *feed) addChanges(u *updates.Update, before, after view, delta revstore.Delta[types.NamespacedName, *api.ServiceState]) {
	candidates, shared := delta.Changes(), f.views
	if before.node.Zone() != after.node.Zone() {
		candidates, shared = delta.All(), nil // shared views are for one zone at a time
	}
	for c := range candidates {
		if was := size(c.Old); max(was, size(c.New)) >= updates.LargeSize {
			old := updates.View{Size: was}
			if hasView(c.Old) {
				old.Compute = func() *api.View { return shared.of(c.Old, before) }
			}
			u.Large = append(u.Large, updates.LargeChange{Key: c.Key, Old: old, TriggerTime: triggerTime(c.Old, c.New)})
			continue
		}
		old, new := shared.of(c.Old, before), shared.of(c.New, after)
		if !old.Equal(new) {
			u.Changes = append(u.Changes, updates.Change{Key: c.Key, Old: old, New: new, TriggerTime: triggerTime(c.Old, c.New)})
		}
	}
}

// triggerTime returns the oldest trigger time of the changed EndpointSlices. It ignores
// new EndpointSlices. Their trigger times may be very old, for example after a label
// change that made kpng serve the service.
func triggerTime(was, is *api.ServiceState) time.Time {
	var oldest time.Time
	if was == nil || is == nil {
		return oldest
	}
	for _, slice := range is.Slices {
		i, found := slices.BinarySearchFunc(was.Slices, slice.Name, func(s *api.EndpointSlice, name string) int { return strings.Compare(s.Name, name) })
		if t := slice.TriggerTime; found && was.Slices[i] != slice && !t.IsZero() && (oldest.IsZero() || t.Before(oldest)) {
			oldest = t
		}
	}
	return oldest
}
