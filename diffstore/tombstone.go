// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"time"

	"github.com/google/btree"
)

// tombstone is a deletion that readers may have to learn of.
type tombstone[K, V any] struct {
	*entry[K, V]
	at time.Time
}

// tombstones finds tombstones by key, for when the key is set again, and by age. Readers do
// not see it: they find tombstones among all changes by revision.
type tombstones[K, V any] struct {
	byKey *tree[K, V]
	byAge *btree.BTreeG[tombstone[K, V]]
}

func newTombstones[K, V any](compare func(a, b K) int) tombstones[K, V] {
	return tombstones[K, V]{
		byKey: newKeyTree[K, V](compare),
		byAge: btree.NewG(degree, func(a, b tombstone[K, V]) bool { return a.revision < b.revision }),
	}
}

func (x *tombstones[K, V]) len() int { return x.byKey.Len() }

func (x *tombstones[K, V]) oldest() (tombstone[K, V], bool) { return x.byAge.Min() }

func (x *tombstones[K, V]) add(dead *entry[K, V], at time.Time) {
	x.byKey.ReplaceOrInsert(dead)
	x.byAge.ReplaceOrInsert(tombstone[K, V]{entry: dead, at: at})
}

// take removes and returns the tombstone that has the key of e.
func (x *tombstones[K, V]) take(e *entry[K, V]) (*entry[K, V], bool) {
	dead, ok := x.byKey.Delete(e)
	if ok {
		x.byAge.Delete(tombstone[K, V]{entry: dead})
	}
	return dead, ok
}

// trim drops the tombstones that no reader needs or that exceed the limits, and lets go of the
// cursors that lag too far.
func (s *Store[K, V]) trim() {
	s.dropTombstones(func(t tombstone[K, V]) bool {
		return s.tombstones.len() > s.limits.tombstones || time.Since(t.at) > s.limits.tombstoneAge
	})
	s.dropCursors()
	if s.options.Resumable {
		return
	}
	slowest, ok := s.cursors.slowest()
	s.dropTombstones(func(t tombstone[K, V]) bool { return !ok || t.revision <= slowest.held.revision })
}

// dropTombstones drops the oldest tombstones for as long as drop says so.
func (s *Store[K, V]) dropTombstones(drop func(tombstone[K, V]) bool) {
	for {
		oldest, ok := s.tombstones.oldest()
		if !ok || !drop(oldest) {
			return
		}
		s.tombstones.take(oldest.entry)
		s.byRevision.Delete(oldest.entry)
		s.floor = oldest.revision
	}
}
