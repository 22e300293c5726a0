// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"context"
	"fmt"
)

// Wait returns nil once the store has a change after a revision: at once if it has. It returns an error that wraps ctx.Err() if
// ctx ends first.
func (s *Store[K, V]) Wait(ctx context.Context, after Revision) error {
	for {
		changed := s.changedAfter(after)
		if changed == nil {
			return nil
		}
		select {
		case <-changed:
			// Stores that share revisions may be asked for one that only another store has reached: look again.
		case <-ctx.Done():
			return fmt.Errorf("waiting for a change after revision %d: %w", after, ctx.Err())
		}
	}
}

// changedAfter returns nil if there is a change after a revision, else a channel that the next commit closes.
func (s *Store[K, V]) changedAfter(after Revision) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.revision > after {
		return nil
	}
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

func (s *Store[K, V]) wake() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}
