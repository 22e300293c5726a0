// SPDX-License-Identifier: Apache-2.0

package diffstore

import "iter"

// Snapshot is the state of a [Store] at one moment. It never changes, is read without a lock, and is garbage once nobody
// refers to it; while somebody does, it keeps alive what was replaced or deleted since.
type Snapshot[K, V any] struct {
	store      *Store[K, V]
	byKey      *tree[K, V]
	byRevision *tree[K, V]
	revision   Revision
	recorded   uint64
	floor      Revision
}

// Change says that a key was set or deleted.
type Change[K, V any] struct {
	Key      K
	Value    V // zero if the key was deleted
	Revision Revision
	Deleted  bool
}

// Revision returns the revision of the last change that is in the snapshot, 0 if there is none.
func (s *Snapshot[K, V]) Revision() Revision { return s.revision }

// Len returns the number of entries.
func (s *Snapshot[K, V]) Len() int { return s.byKey.Len() }

// Get returns the value of key.
func (s *Snapshot[K, V]) Get(key K) (V, bool) {
	value, _, ok := s.Lookup(key)
	return value, ok
}

// Lookup returns the value of key and the revision at which it last changed.
func (s *Snapshot[K, V]) Lookup(key K) (value V, revision Revision, ok bool) {
	e, ok := s.byKey.Get(&entry[K, V]{key: key})
	if !ok {
		return value, 0, false
	}
	return e.value, e.revision, true
}

// All returns the entries in key order.
func (s *Snapshot[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		s.byKey.Ascend(func(e *entry[K, V]) bool { return yield(e.key, e.value) })
	}
}

// From returns the entries from key on (with it, if it is there) in key order.
func (s *Snapshot[K, V]) From(key K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		s.byKey.AscendGreaterOrEqual(&entry[K, V]{key: key}, func(e *entry[K, V]) bool { return yield(e.key, e.value) })
	}
}

// Since returns what changed after a revision, in the order of revisions, each key once with its last change. Applied to the
// state at that revision it gives the snapshot. A change need not be a difference: a key may have got a value and lost it again,
// or have come and gone.
//
// False, with a nil sequence, means that deletions after that revision have been forgotten: start over with [Snapshot.All].
func (s *Snapshot[K, V]) Since(revision Revision) (iter.Seq[Change[K, V]], bool) {
	if revision < s.floor {
		return nil, false
	}
	return func(yield func(Change[K, V]) bool) {
		if revision >= s.revision {
			return
		}
		s.byRevision.AscendGreaterOrEqual(&entry[K, V]{revision: revision + 1}, func(e *entry[K, V]) bool {
			return yield(e.change())
		})
	}, true
}

func (e *entry[K, V]) change() Change[K, V] {
	return Change[K, V]{Key: e.key, Value: e.value, Revision: e.revision, Deleted: e.deleted}
}
