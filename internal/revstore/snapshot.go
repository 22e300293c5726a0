// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"iter"
	"slices"
)

// Snapshot is the state of a [Store] at one moment. It is immutable and is read without a
// lock. A snapshot in use keeps replaced and deleted values in memory.
type Snapshot[K, V any] struct {
	store    *Store[K, V]
	byKey    *tree[K, V]
	log      []*entry[K, V] // see changeLog
	revision Revision
	recorded uint64
	floor    Revision
}

// Revision returns the revision of the last change in the snapshot. If there is no
// change, it returns 1.
func (s *Snapshot[K, V]) Revision() Revision { return s.revision }

// Revisions returns the counter of the store.
func (s *Snapshot[K, V]) Revisions() *Revisions { return s.store.options.Revisions }

// NewCursor returns a cursor of the snapshot's store, without a position.
func (s *Snapshot[K, V]) NewCursor() *Cursor[K, V] { return s.store.NewCursor() }

// Len returns the number of entries.
func (s *Snapshot[K, V]) Len() int { return s.byKey.Len() }

// Get returns the value of key.
func (s *Snapshot[K, V]) Get(key K) (value V, ok bool) {
	if e, ok := s.byKey.Get(&entry[K, V]{key: key}); ok {
		return e.value, true
	}
	return value, false
}

// All returns the entries in key order.
func (s *Snapshot[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		s.byKey.Ascend(func(e *entry[K, V]) bool { return yield(e.key, e.value) })
	}
}

// After returns the entries whose keys come after the given key, in key order.
func (s *Snapshot[K, V]) After(key K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		start := &entry[K, V]{key: key}
		s.byKey.AscendGreaterOrEqual(start, func(e *entry[K, V]) bool {
			return s.store.options.Compare(e.key, key) == 0 || yield(e.key, e.value)
		})
	}
}

// Since returns the keys that were set or deleted after a revision, in the order of their
// last changes. With each key, it returns the value in this snapshot. A deleted key has
// the zero value. If a reader applies the changes to the state at that revision, the
// result is the state of the snapshot. A change may have no net effect, because a key may
// have been set and deleted again.
//
// Since returns nil and false if the store no longer has all deletions after that
// revision, or if the revision is 0. Then the reader starts over with [Snapshot.All].
func (s *Snapshot[K, V]) Since(revision Revision) (iter.Seq2[K, V], bool) {
	if revision < s.floor {
		return nil, false
	}
	return func(yield func(K, V) bool) {
		s.yieldSince(revision, func(e *entry[K, V]) bool { return yield(e.key, e.value) })
	}, true
}

// yieldSince calls yield with the entries and tombstones written after a revision, in
// order of their revisions.
func (s *Snapshot[K, V]) yieldSince(revision Revision, yield func(*entry[K, V]) bool) {
	for _, e := range s.log[firstAfter(s.log, revision):] {
		if e.in(s.revision) && !yield(e) {
			return
		}
	}
}

// Latest returns the keys that changed last and the revisions of these changes, latest
// first. If a key is not in the snapshot, its last change was a deletion. Deletions that
// no reader needs any more are missing.
func (s *Snapshot[K, V]) Latest() iter.Seq2[K, Revision] {
	return func(yield func(K, Revision) bool) {
		last := firstAfter(s.log, s.revision)
		for _, e := range slices.Backward(s.log[:last]) {
			if e.in(s.revision) && !yield(e.key, e.revision) {
				return
			}
		}
	}
}

// Delta is the difference between two snapshots, as [Cursor.Until] returns it. It remains
// valid when the cursor moves or closes.
type Delta[K, V any] struct {
	// Old is the snapshot that the reader last acknowledged. If Old is nil, the reader has
	// to start over, and replaces its state by all of New.
	Old *Snapshot[K, V]
	// New is the reader's state after this delta. The reader acknowledges it with
	// [Cursor.Advance].
	New *Snapshot[K, V]
}

// Change is one key with its old and new value. A missing value is the zero value.
type Change[K, V any] struct {
	Key      K
	Old, New V
}

// Full reports whether the reader has to start over.
func (d Delta[K, V]) Full() bool { return d.Old == nil }

// Changes returns the keys whose values differ between Old and New, in key order. For a
// full delta it returns all keys of New. Time and memory depend on the number of keys
// written after Old.
func (d Delta[K, V]) Changes() iter.Seq[Change[K, V]] {
	if d.Full() {
		return d.All()
	}
	return d.writtenAfter(d.Old.revision, d.New.store.options.Equal)
}

// All returns all keys of Old and New in key order, including keys with equal values. A
// reader needs All if the meaning of the values has changed, because it then has to
// process even equal values again.
func (d Delta[K, V]) All() iter.Seq[Change[K, V]] {
	if d.Full() {
		return func(yield func(Change[K, V]) bool) {
			d.New.byKey.Ascend(func(e *entry[K, V]) bool { return yield(Change[K, V]{Key: e.key, New: e.value}) })
		}
	}
	return d.writtenAfter(0, func(V, V) bool { return false })
}

// writtenAfter returns the keys written after a revision. It omits each key that has
// equal values in Old and New, or is in neither snapshot.
func (d Delta[K, V]) writtenAfter(revision Revision, equal func(a, b V) bool) iter.Seq[Change[K, V]] {
	return func(yield func(Change[K, V]) bool) {
		var written []*entry[K, V]
		d.New.yieldSince(revision, func(e *entry[K, V]) bool {
			written = append(written, e)
			return true
		})
		slices.SortFunc(written, func(a, b *entry[K, V]) int { return d.New.store.options.Compare(a.key, b.key) })
		for _, e := range written {
			c := Change[K, V]{Key: e.key, New: e.value}
			old, had := d.Old.byKey.Get(e)
			if had {
				c.Old = old.value
			}
			if !had && e.deleted || had && !e.deleted && equal(c.Old, c.New) {
				continue
			}
			if !yield(c) {
				return
			}
		}
	}
}
