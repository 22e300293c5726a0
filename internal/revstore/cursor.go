// SPDX-License-Identifier: Apache-2.0

package revstore

import "github.com/google/btree"

// Cursor is the position of a reader that follows a [Store]. The position is the snapshot
// that the reader last acknowledged. Within limits, the store keeps the deletions after
// that snapshot for the reader. The reader has to call Close.
//
// A Cursor is meant for one reader. It is safe for concurrent use.
type Cursor[K, V any] struct {
	store  *Store[K, V]
	closed bool

	// The store keeps deletions after this position for the reader. Nil means no
	// position.
	at *position[K, V]
	// True if the reader has acknowledged the position. Otherwise the reader starts over,
	// and has only received the position's snapshot.
	acknowledged bool
}

// NewCursor returns a cursor without a position. Its first delta contains all entries.
func (s *Store[K, V]) NewCursor() *Cursor[K, V] { return &Cursor[K, V]{store: s} }

// Until returns the delta from the reader's position to a snapshot of the store, usually
// the latest. Only [Cursor.Advance] moves the position. Before the next Advance, each
// delta contains all changes since the position, even if an earlier delta has contained
// them. If the snapshot is older than the position, the delta has no changes.
//
// Until panics if the snapshot belongs to another store.
func (c *Cursor[K, V]) Until(to *Snapshot[K, V]) Delta[K, V] {
	c.mustOwn(to)
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	old := c.position()
	switch {
	case old == nil:
		// Keep the deletions after this snapshot. Without them, the reader would have to start
		// over again after Advance.
		c.hold(to)
		return Delta[K, V]{New: to}
	case to.revision <= old.revision:
		return Delta[K, V]{Old: old, New: old}
	default:
		return Delta[K, V]{Old: old, New: to}
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
	if old := c.position(); c.closed || old != nil && to.revision <= old.revision {
		return
	}
	c.acknowledged = true
	c.hold(to)
}

// Close releases the cursor's snapshot and tombstones. The deltas of a closed cursor are
// full.
func (c *Cursor[K, V]) Close() {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	c.closed = true
	c.store.cursors.leave(c)
	c.store.trim()
}

func (c *Cursor[K, V]) mustOwn(snapshot *Snapshot[K, V]) {
	if snapshot.store != c.store {
		panic("revstore: cursor used with a snapshot of another store")
	}
}

// position returns the snapshot that the reader last acknowledged. If the reader has to
// start over, it returns nil.
func (c *Cursor[K, V]) position() *Snapshot[K, V] {
	if c.at == nil || c.at.snapshot == nil {
		c.acknowledged = false
	}
	if !c.acknowledged {
		return nil
	}
	return c.at.snapshot
}

// hold makes the store keep deletions after a snapshot, unless the snapshot is too old.
func (c *Cursor[K, V]) hold(to *Snapshot[K, V]) {
	if c.closed {
		return
	}
	c.store.cursors.move(c, to)
	c.store.trim()
}

// position is a snapshot that the cursors of some readers hold. Many readers share one
// position, so that moving them is cheap.
type position[K, V any] struct {
	revision Revision
	snapshot *Snapshot[K, V] // nil after a drop; then the readers have to start over
	readers  int
}

// cursors contains the positions of all cursors, sorted by revision.
type cursors[K, V any] struct {
	positions *btree.BTreeG[*position[K, V]]
	probe     position[K, V] // search key of the method move, reused to avoid an allocation
}

func newCursors[K, V any]() cursors[K, V] {
	return cursors[K, V]{positions: btree.NewG(degree, func(a, b *position[K, V]) bool { return a.revision < b.revision })}
}

func (x *cursors[K, V]) slowest() (*position[K, V], bool) { return x.positions.Min() }

func (x *cursors[K, V]) move(c *Cursor[K, V], to *Snapshot[K, V]) {
	x.leave(c)
	x.probe.revision = to.revision
	at, ok := x.positions.Get(&x.probe)
	if !ok {
		at = &position[K, V]{revision: to.revision, snapshot: to}
		x.positions.ReplaceOrInsert(at)
	}
	at.readers++
	c.at = at
}

// leave releases the position of a cursor.
func (x *cursors[K, V]) leave(c *Cursor[K, V]) {
	if c.at == nil {
		return
	}
	if c.at.readers--; c.at.readers == 0 {
		x.drop(c.at)
	}
	c.at = nil
}

// drop releases the snapshot of a position.
func (x *cursors[K, V]) drop(at *position[K, V]) {
	if at.snapshot != nil {
		x.positions.Delete(at)
		at.snapshot = nil
	}
}

// dropCursors drops the positions that lag by too many changes or need a dropped tombstone.
func (s *Store[K, V]) dropCursors() {
	allowed := uint64(max(s.limits.lag, s.byKey.Len()/4))
	for {
		slowest, ok := s.cursors.slowest()
		if !ok || slowest.revision >= s.floor && s.recorded-slowest.snapshot.recorded <= allowed {
			return
		}
		s.cursors.drop(slowest)
	}
}
