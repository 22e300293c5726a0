// SPDX-License-Identifier: Apache-2.0

package diffstore

import "github.com/google/btree"

// Cursor is the position of a reader that follows a [Store]: the snapshot it acknowledged
// last. The store remembers later deletions for it, within limits. Close it.
//
// It is meant for one reader at a time; calls from several goroutines are safe.
type Cursor[K, V any] struct {
	store  *Store[K, V]
	id     uint64
	closed bool

	// acknowledged is what the reader has; nil means that it has to start over.
	acknowledged *Snapshot[K, V]
	// held is the snapshot after which the store remembers deletions for this reader: the
	// acknowledged one or, while the reader starts over, the one it was given to start with.
	// Nil if there is none.
	held *Snapshot[K, V]
}

// NewCursor returns the cursor of a reader that has nothing yet: its first delta is a full one.
func (s *Store[K, V]) NewCursor() *Cursor[K, V] {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cursors.created++
	return &Cursor[K, V]{store: s, id: s.cursors.created}
}

// Until returns the delta from the reader's position to a snapshot of the store, usually the
// present one. The position stays: until the reader acknowledges with [Cursor.Advance], the
// same changes come again, merged with later ones. A snapshot that is older than the position
// gives a delta without changes.
//
// It panics if the snapshot is one of another store.
func (c *Cursor[K, V]) Until(to *Snapshot[K, V]) Delta[K, V] {
	c.mustOwn(to)
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	switch {
	case c.acknowledged == nil:
		// Remember deletions from here on: otherwise a reader that takes long to start over would
		// never end doing so.
		c.hold(to)
		return Delta[K, V]{New: to}
	case to.revision <= c.acknowledged.revision:
		return Delta[K, V]{Old: c.acknowledged, New: c.acknowledged}
	default:
		return Delta[K, V]{Old: c.acknowledged, New: to}
	}
}

// Advance acknowledges that the reader has all of a snapshot, which need not come from
// [Cursor.Until]. A snapshot older than the position is ignored; from one that lags too far
// the reader starts over.
//
// It panics if the snapshot is one of another store.
func (c *Cursor[K, V]) Advance(to *Snapshot[K, V]) {
	c.mustOwn(to)
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if c.closed || c.acknowledged != nil && to.revision <= c.acknowledged.revision {
		return
	}
	c.acknowledged = to
	c.hold(to)
}

// Close ends the cursor: the store keeps nothing more for it. A closed cursor gives full
// deltas.
func (c *Cursor[K, V]) Close() {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	c.closed = true
	c.store.cursors.drop(c)
	c.store.trim()
}

func (c *Cursor[K, V]) mustOwn(snapshot *Snapshot[K, V]) {
	if snapshot.store != c.store {
		panic("diffstore: cursor used with a snapshot of another store")
	}
}

// hold makes the store remember deletions after to for this cursor, unless to lags too far already.
func (c *Cursor[K, V]) hold(to *Snapshot[K, V]) {
	if c.closed {
		return
	}
	c.store.cursors.move(c, to)
	c.store.trim()
}

// cursors knows the cursors that hold a snapshot by the revision of that snapshot.
type cursors[K, V any] struct {
	created    uint64
	byRevision *btree.BTreeG[*Cursor[K, V]]
}

func newCursors[K, V any]() cursors[K, V] {
	return cursors[K, V]{byRevision: btree.NewG(degree, func(a, b *Cursor[K, V]) bool {
		if a.held.revision != b.held.revision {
			return a.held.revision < b.held.revision
		}
		return a.id < b.id
	})}
}

func (x *cursors[K, V]) slowest() (*Cursor[K, V], bool) { return x.byRevision.Min() }

func (x *cursors[K, V]) move(c *Cursor[K, V], to *Snapshot[K, V]) {
	if c.held != nil {
		x.byRevision.Delete(c)
	}
	c.held = to
	x.byRevision.ReplaceOrInsert(c)
}

// drop lets go of what a cursor holds: its reader has to start over.
func (x *cursors[K, V]) drop(c *Cursor[K, V]) {
	if c.held != nil {
		x.byRevision.Delete(c)
	}
	c.held, c.acknowledged = nil, nil
}

// dropCursors lets go of the cursors that lag by too many changes, or by a deletion that is forgotten.
func (s *Store[K, V]) dropCursors() {
	allowed := uint64(max(s.limits.lag, s.byKey.Len()/4))
	for {
		slowest, ok := s.cursors.slowest()
		if !ok || slowest.held.revision >= s.floor && s.recorded-slowest.held.recorded <= allowed {
			return
		}
		s.cursors.drop(slowest)
	}
}
