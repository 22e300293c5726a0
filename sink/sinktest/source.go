// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Source is a [sink.Source] whose views are set by hand. Each call that changes
// something is one revision, and what a reader has not fetched yet is coalesced.
// Its cost does not grow with the number of services that do not change.
type Source struct {
	mu       sync.Mutex
	views    *btree.BTreeG[*api.ServiceEndpoints]
	node     *api.Node
	revision uint64
	synced   bool
	lagged   bool
	err      error

	changed chan struct{}
	// positioned is whether there is a position; since is what changed after
	// it, and next what changed after the last update that Next returned.
	positioned  bool
	since, next diff
}

// diff is what changed since some revision: what it was then.
type diff struct {
	views map[types.NamespacedName]before
	node  *api.Node // meaningful if nodeChanged
	// nodeChanged is whether the node was set, and any whether anything was.
	nodeChanged, any bool
}

type before struct {
	view    *api.ServiceEndpoints
	trigger time.Time
}

// NewSource returns a source that has no services, no node and has not synced.
func NewSource() *Source {
	return &Source{
		views: btree.NewG(16, func(a, b *api.ServiceEndpoints) bool {
			return api.CompareKeys(a.Key(), b.Key()) < 0
		}),
		changed: make(chan struct{}),
	}
}

// MarkSynced lets the reader see what is and will be set. Until then it sees
// nothing.
func (s *Source) MarkSynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
	s.signal()
}

// Set puts views in place of what their services had. One that is equal to what
// is there changes nothing.
func (s *Source) Set(views ...*api.ServiceEndpoints) { s.SetTriggered(time.Time{}, views...) }

// SetTriggered is Set for views whose endpoint change happened at the time at.
func (s *Source) SetTriggered(at time.Time, views ...*api.ServiceEndpoints) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range views {
		old, _ := s.views.Get(v)
		if !v.Equal(old) {
			s.views.ReplaceOrInsert(v)
			s.note(v.Key(), old, at)
		}
	}
	s.signal()
}

// Delete takes services away. One that is not there changes nothing.
func (s *Source) Delete(keys ...types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		if old, ok := s.views.Delete(probe(key)); ok {
			s.note(key, old, time.Time{})
		}
	}
	s.signal()
}

// SetNode sets the node. One that is equal to what is there changes nothing.
func (s *Source) SetNode(node *api.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if node.Equal(s.node) {
		return
	}
	s.revision++
	for _, d := range []*diff{&s.since, &s.next} {
		if !d.nodeChanged {
			d.node = s.node
		}
		d.nodeChanged, d.any = true, true
	}
	s.node = node
	s.signal()
}

// Fail makes Next return err, until it is called with nil.
func (s *Source) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// Lag makes the next update [sink.Update.Lost], as for a reader that is too far behind.
func (s *Source) Lag() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lagged = true
	s.signal()
}

// Revision returns the revision of the last change; 0 if there was none.
func (s *Source) Revision() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// Node returns the node.
func (s *Source) Node() *api.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node
}

// Views returns all views in order of their keys.
func (s *Source) Views() []*api.ServiceEndpoints {
	s.mu.Lock()
	views := s.views.Clone()
	s.mu.Unlock()
	all := make([]*api.ServiceEndpoints, 0, views.Len())
	views.Ascend(func(v *api.ServiceEndpoints) bool {
		all = append(all, v)
		return true
	})
	return all
}

// Changed implements [sink.Source].
func (s *Source) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Next implements [sink.Source].
func (s *Source) Next() (*sink.Update, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced || s.err != nil {
		return nil, s.err
	}
	s.positioned = s.positioned && !s.lagged
	s.lagged = false
	views := s.views.Clone()
	view := func(key types.NamespacedName) *api.ServiceEndpoints {
		v, _ := views.Get(probe(key))
		return v
	}
	u := &sink.Update{
		Lost: !s.positioned, Revision: s.revision, Node: s.node, NodeChanged: true, View: view,
		After: func(key types.NamespacedName) iter.Seq[*api.ServiceEndpoints] {
			return func(yield func(*api.ServiceEndpoints) bool) {
				views.AscendGreaterOrEqual(probe(key), func(v *api.ServiceEndpoints) bool {
					return v.Key() == key || yield(v)
				})
			}
		},
	}
	if s.positioned {
		u.NodeChanged = s.since.nodeChanged && !s.since.node.Equal(s.node)
		u.Changes = s.since.changes(view)
	}
	s.next = diff{}
	return u, nil
}

// Advance implements [sink.Source].
func (s *Source) Advance(*sink.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.positioned = true
	s.since, s.next = s.next, diff{}
	s.signal()
}

// Reset implements [sink.Source].
func (s *Source) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.positioned = false
	s.signal()
}

// Close implements [sink.Source].
func (s *Source) Close() {}

// note notes a change of the service key, which was old before.
func (s *Source) note(key types.NamespacedName, old *api.ServiceEndpoints, trigger time.Time) {
	s.revision++
	for _, d := range []*diff{&s.since, &s.next} {
		b, ok := d.views[key]
		if !ok {
			b.view = old
		}
		if b.trigger.IsZero() || !trigger.IsZero() && trigger.Before(b.trigger) {
			b.trigger = trigger
		}
		if d.views == nil {
			d.views = map[types.NamespacedName]before{}
		}
		d.views[key] = b
		d.any = true
	}
}

// changes returns what differs between d and what view returns.
func (d *diff) changes(view func(types.NamespacedName) *api.ServiceEndpoints) []sink.Change {
	var changes []sink.Change
	for _, key := range slices.SortedFunc(maps.Keys(d.views), api.CompareKeys) {
		b, now := d.views[key], view(key)
		if !b.view.Equal(now) {
			changes = append(changes, sink.Change{Key: key, Old: b.view, New: now, TriggerTime: b.trigger})
		}
	}
	return changes
}

// signal makes the channel of Changed agree with the state.
func (s *Source) signal() {
	closed := false
	select {
	case <-s.changed:
		closed = true
	default:
	}
	switch waiting := s.synced && (!s.positioned || s.lagged || s.since.any); {
	case waiting && !closed:
		close(s.changed)
	case !waiting && closed:
		s.changed = make(chan struct{})
	}
}

// probe returns a view by which the service key is found.
func probe(key types.NamespacedName) *api.ServiceEndpoints {
	return &api.ServiceEndpoints{Service: &api.Service{Namespace: key.Namespace, Name: key.Name}}
}
