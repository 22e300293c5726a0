// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"iter"
	"slices"
)

// Snapshot is the state of a [Store] at one moment. It never changes and is read without a
// lock. While it is referenced, it keeps values alive that were replaced or deleted since.
type Snapshot[K, V any] struct {
	store      *Store[K, V]
	byKey      *tree[K, V]
	byRevision *tree[K, V]
	revision   Revision
	recorded   uint64
	floor      Revision
}

// Revision returns the revision of the last change in the snapshot, 1 if there is none.
func (s *Snapshot[K, V]) Revision() Revision { return s.revision }

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

// After returns the entries whose keys come after key, in key order.
func (s *Snapshot[K, V]) After(key K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		start := &entry[K, V]{key: key}
		s.byKey.AscendGreaterOrEqual(start, func(e *entry[K, V]) bool {
			return s.store.options.Compare(e.key, key) == 0 || yield(e.key, e.value)
		})
	}
}

// Since returns the keys that were set or deleted after a revision, each once, in the order
// of their last changes. The value is the present one, zero for a deleted key. Applied to the
// state at that revision, the changes give the snapshot. A change need not be a difference:
// a key may have got a value and lost it again.
//
// False, with a nil sequence, means that deletions after that revision have been forgotten, or
// that the revision is 0: start over with [Snapshot.All].
func (s *Snapshot[K, V]) Since(revision Revision) (iter.Seq2[K, V], bool) {
	if revision < s.floor {
		return nil, false
	}
	return func(yield func(K, V) bool) {
		s.since(revision, func(e *entry[K, V]) bool { return yield(e.key, e.value) })
	}, true
}

// since calls yield with the entries and tombstones written after a revision, in that order.
func (s *Snapshot[K, V]) since(revision Revision, yield func(*entry[K, V]) bool) {
	if revision < s.revision { // so that the next revision is a number
		s.byRevision.AscendGreaterOrEqual(&entry[K, V]{revision: revision + 1}, yield)
	}
}

// Delta leads a reader from one snapshot to another, as [Cursor.Until] returns it. It stays
// valid whatever becomes of the cursor.
type Delta[K, V any] struct {
	// Old is what the reader acknowledged last. Nil means that the reader has to start over:
	// it takes on all of New and forgets everything else.
	Old *Snapshot[K, V]
	// New is what the reader has after this delta, and what it acknowledges with
	// [Cursor.Advance].
	New *Snapshot[K, V]
}

// Change is one key with its values before and after, the zero value where it has none.
type Change[K, V any] struct {
	Key      K
	Old, New V
}

// Full reports whether the reader has to start over.
func (d Delta[K, V]) Full() bool { return d.Old == nil }

// Changes returns the keys whose values differ between Old and New, in key order; of a full
// delta, all keys of New. It costs time and memory for the keys that were written after Old.
func (d Delta[K, V]) Changes() iter.Seq[Change[K, V]] {
	if d.Full() {
		return d.All()
	}
	return d.writtenAfter(d.Old.revision, d.New.store.options.Equal)
}

// All returns all keys of Old and New in key order, those with equal values included. It is
// meant for a reader to whom all values have another meaning than before.
func (d Delta[K, V]) All() iter.Seq[Change[K, V]] {
	if d.Full() {
		return func(yield func(Change[K, V]) bool) {
			d.New.byKey.Ascend(func(e *entry[K, V]) bool { return yield(Change[K, V]{Key: e.key, New: e.value}) })
		}
	}
	return d.writtenAfter(0, func(V, V) bool { return false })
}

// writtenAfter returns the keys written after a revision, except those that have equal values
// in Old and New or are in neither.
func (d Delta[K, V]) writtenAfter(revision Revision, equal func(a, b V) bool) iter.Seq[Change[K, V]] {
	return func(yield func(Change[K, V]) bool) {
		var written []*entry[K, V]
		d.New.since(revision, func(e *entry[K, V]) bool {
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
