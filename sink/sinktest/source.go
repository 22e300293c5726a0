// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/updates"
	"k8s.io/apimachinery/pkg/types"
)

// Source is a [sink.Source] whose views a test sets. Each change has a revision. Changes
// that the driver has not fetched yet are merged. With Reset, a test simulates that the
// driver's position is too old. The time to compute an update depends only on its size.
type Source struct {
	mu        sync.Mutex
	revisions *revstore.Revisions
	views     *views
	nodes     *revstore.Store[string, *api.Node] // empty if the node is not known
	synced    bool
	changed   chan struct{} // closed and replaced by each change

	cursor  *revstore.Cursor[types.NamespacedName, triggered]
	acked   position
	offered position
	update  *updates.Update // last result of Next; nil if out of date
}

type views = revstore.Store[types.NamespacedName, triggered]

// triggered holds a view and its trigger time. The time is zero if none was set.
type triggered struct {
	view *api.View
	at   time.Time
}

// position is the state at one revision. The zero value means no position.
type position struct {
	revision revstore.Revision
	views    *revstore.Snapshot[types.NamespacedName, triggered]
	node     *api.Node
}

// NewSource returns a source that has no services and no node, and is not synced.
func NewSource() *Source {
	s := &Source{revisions: new(revstore.Revisions), changed: make(chan struct{})}
	s.views = revstore.New(revstore.Options[types.NamespacedName, triggered]{
		Compare: ordering.Keys, Revisions: s.revisions,
		Equal: func(a, b triggered) bool { return a.view.Equal(b.view) },
	})
	s.nodes = revstore.New(revstore.Options[string, *api.Node]{
		Compare: strings.Compare, Revisions: s.revisions, Equal: (*api.Node).Equal,
	})
	s.cursor = s.views.NewCursor()
	return s
}

// MarkSynced makes the present and all later state visible to the driver. Before the
// first MarkSynced, Next returns nil.
func (s *Source) MarkSynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
	s.wake()
}

// Set sets the views of one or more services. A view that is equal to the present one has
// no effect.
func (s *Source) Set(views ...*api.View) { s.SetTriggered(time.Time{}, views...) }

// SetTriggered is like Set, but also sets the trigger time of the views.
func (s *Source) SetTriggered(at time.Time, views ...*api.View) {
	s.write(func() {
		for _, v := range views {
			first := at
			if old, ok := s.views.Get(v.Key()); ok && !old.at.IsZero() && !s.hasAcked(old) && (at.IsZero() || old.at.Before(at)) {
				first = old.at
			}
			s.views.Set(v.Key(), triggered{v, first})
		}
	})
}

// hasAcked reports whether the driver has received the view of t and called Advance.
func (s *Source) hasAcked(t triggered) bool {
	if s.acked.views == nil {
		return false
	}
	acked, _ := s.acked.views.Get(t.view.Key())
	return acked.view == t.view
}

// Delete deletes services. It ignores missing services.
func (s *Source) Delete(keys ...types.NamespacedName) {
	s.write(func() {
		for _, key := range keys {
			s.views.Delete(key)
		}
	})
}

// SetNode sets the node. It has no effect if the present node is equal.
func (s *Source) SetNode(node *api.Node) {
	s.write(func() {
		if node == nil {
			s.nodes.Delete("")
		} else {
			s.nodes.Set("", node)
		}
	})
}

func (s *Source) write(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.revisions.Last()
	if change(); s.revisions.Last() != before {
		s.wake()
	}
}

func (s *Source) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Revision returns the revision of the last change, or 0 if nothing has changed.
func (s *Source) Revision() uint64 { return number(s.revisions.Last()) }

// number returns the number of changes up to the revision r. Before the first change, the
// revision of the stores is 1.
func number(r revstore.Revision) uint64 { return r - 1 }

// Views returns all views in order of their keys.
func (s *Source) Views() []*api.View {
	all := []*api.View{}
	for _, t := range s.views.Snapshot().All() {
		all = append(all, t.view)
	}
	return all
}

// Changed implements [sink.Source].
func (s *Source) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced && s.revisions.Last() != s.acked.revision {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	return s.changed
}

// Next implements [sink.Source].
func (s *Source) Next() (*updates.Update, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		return nil, nil
	}
	if now := s.revisions.Last(); s.update == nil || now != s.offered.revision {
		node, _ := s.nodes.Get("")
		s.offered = position{now, s.views.Snapshot(), node}
		s.update = s.difference(s.offered)
	}
	return s.update, nil
}

// difference returns the changes between the driver's position and the present position.
func (s *Source) difference(now position) *updates.Update {
	u := &updates.Update{
		Revision: number(now.revision), Node: now.node,
		View: func(key types.NamespacedName) *api.View {
			t, _ := now.views.Get(key)
			return t.view
		},
		After: func(key types.NamespacedName) iter.Seq2[types.NamespacedName, updates.View] {
			return func(yield func(types.NamespacedName, updates.View) bool) {
				for key, t := range now.views.After(key) {
					if !yield(key, updates.ViewOf(t.view)) {
						return
					}
				}
			}
		},
	}
	delta := s.cursor.Until(now.views)
	if u.Lost = delta.Full(); u.Lost {
		u.NodeChanged = true
		return u
	}
	u.NodeChanged = !now.node.Equal(s.acked.node)
	for c := range delta.Changes() {
		old, new := updates.ViewOf(c.Old.view), updates.ViewOf(c.New.view)
		if max(old.Size, new.Size) >= updates.LargeSize {
			u.Large = append(u.Large, updates.LargeChange{Key: c.Key, Old: old, TriggerTime: c.New.at})
			continue
		}
		u.Changes = append(u.Changes, updates.Change{Key: c.Key, Old: c.Old.view, New: c.New.view, TriggerTime: c.New.at})
	}
	return u
}

// Advance implements [sink.Source].
func (s *Source) Advance(u *updates.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u == s.update {
		s.cursor.Advance(s.offered.views)
		s.acked, s.update = s.offered, nil
	}
}

// Reset implements [sink.Source].
func (s *Source) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cursor.Close()
	s.cursor, s.acked, s.update = s.views.NewCursor(), position{}, nil
	s.wake()
}

// Close implements [sink.Source].
func (s *Source) Close() { s.cursor.Close() }
