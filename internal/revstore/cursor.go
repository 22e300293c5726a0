// SPDX-License-Identifier: Apache-2.0

package revstore

import "github.com/google/btree"

// Cursor is the position of a reader that follows a [Store]: the snapshot that the reader
// last acknowledged. For the reader, the store records deletions after that snapshot,
// within limits. The reader has to call Close.
//
// A Cursor is meant for one reader. It is safe for concurrent use.
type Cursor[K, V any] struct {
	store  *Store[K, V]
	id     uint64
	closed bool

	// acknowledged is the snapshot that the reader has, or nil if it has to start over.
	acknowledged *Snapshot[K, V]
	// held is the snapshot after which the store keeps deletions for this reader. It is the
	// acknowledged snapshot or, while the reader starts over, the snapshot that the reader
	// received. It is nil if the store keeps no deletions for this reader.
	held *Snapshot[K, V]
}

// NewCursor returns a cursor without a position. Its first delta contains all entries.
func (s *Store[K, V]) NewCursor() *Cursor[K, V] {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cursors.created++
	return &Cursor[K, V]{store: s, id: s.cursors.created}
}

// Until returns the delta from the reader's position to a snapshot of the store, usually
// the latest. Only [Cursor.Advance] moves the position. Before the next Advance, each
// delta contains all changes since the position, including those of earlier deltas. For a
// snapshot older than the position, the delta has no changes.
//
// Until panics if the snapshot belongs to another store.
func (c *Cursor[K, V]) Until(to *Snapshot[K, V]) Delta[K, V] {
	c.mustOwn(to)
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	switch {
	case c.acknowledged == nil:
		// Keep the deletions after this snapshot. Without them, the reader would have to start
		// over again after Advance.
		c.hold(to)
		return Delta[K, V]{New: to}
	case to.revision <= c.acknowledged.revision:
		return Delta[K, V]{Old: c.acknowledged, New: c.acknowledged}
	default:
		return Delta[K, V]{Old: c.acknowledged, New: to}
	}
}

// Advance moves the position to a snapshot that the reader has read. The snapshot need
// not come from [Cursor.Until]. Advance ignores a snapshot older than the position. If
// the snapshot is too old (see Memory in package diffstore), the reader starts over.
//
// Advance panics if the snapshot belongs to another store.
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

// Close releases the cursor's snapshot and tombstones. A closed cursor returns full
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
		panic("revstore: cursor used with a snapshot of another store")
	}
}

// hold makes the store keep deletions after a snapshot, unless the snapshot is too old.
func (c *Cursor[K, V]) hold(to *Snapshot[K, V]) {
	if c.closed {
		return
	}
	c.store.cursors.move(c, to)
	c.store.trim()
}

// cursors contains the cursors that hold a snapshot, sorted by the snapshot's revision.
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

// drop releases the snapshot of a cursor. The cursor's reader then has to start over.
func (x *cursors[K, V]) drop(c *Cursor[K, V]) {
	if c.held != nil {
		x.byRevision.Delete(c)
	}
	c.held, c.acknowledged = nil, nil
}

// dropCursors drops the cursors that lag by too many changes or need a dropped tombstone.
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
