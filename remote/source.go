// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"iter"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/updates"
	"k8s.io/apimachinery/pkg/types"
)

// source is a [sink.Source] of a client's views.
type source struct {
	client *Client
	cursor *revstore.Cursor[types.NamespacedName, *entry]
	has    *clientState // the position; nil if there is none

	// The update that Next returned last, and the state after this update.
	offered *updates.Update
	state   *clientState
}

// Changed implements [sink.Source].
func (s *source) Changed() <-chan struct{} {
	state, changed := s.client.get()
	if state.revision > 0 && state != s.has {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	return changed
}

// Next implements [sink.Source]. It never fails.
func (s *source) Next() (*updates.Update, error) {
	state, _ := s.client.get()
	if state.revision == 0 {
		return nil, nil
	}
	if s.state != state {
		s.offered, s.state = s.update(state), state
	}
	return s.offered, nil
}

// Advance implements [sink.Source].
func (s *source) Advance(u *updates.Update) {
	if u == s.offered {
		s.cursor.Advance(s.state.views)
		s.has = s.state
		s.offered, s.state = nil, nil
	}
}

// Reset implements [sink.Source].
func (s *source) Reset() {
	s.cursor.Close()
	*s = source{client: s.client, cursor: s.client.views.NewCursor()}
}

// Close implements [sink.Source].
func (s *source) Close() { s.cursor.Close() }

// all returns an update for a source without a position.
func (s *clientState) all() *updates.Update {
	return &updates.Update{
		Lost: true, Revision: s.revision, Node: s.node, NodeChanged: true,
		View: func(key types.NamespacedName) *api.View {
			e, _ := s.views.Get(key)
			return e.viewOrNil()
		},
		After: func(key types.NamespacedName) iter.Seq2[types.NamespacedName, updates.View] {
			return func(yield func(types.NamespacedName, updates.View) bool) {
				for key, e := range s.views.After(key) {
					if view := e.viewOrNil(); view != nil && !yield(key, updates.ViewOf(view)) {
						return
					}
				}
			}
		},
	}
}

// update returns the changes between the position and the given state.
func (s *source) update(state *clientState) *updates.Update {
	delta := s.cursor.Until(state.views)
	u := state.all()
	u.Lost = delta.Full()
	if u.Lost {
		return u
	}
	u.NodeChanged = !state.node.Equal(s.has.node)
	var list []updates.Change
	for change := range delta.Changes() {
		if before, after := change.Old.viewOrNil(), change.New.viewOrNil(); !before.Equal(after) {
			list = append(list, updates.Change{Key: change.Key, Old: before, New: after})
		}
	}
	u.Changes = list
	return u
}
