// SPDX-License-Identifier: Apache-2.0

package revstore

import "time"

// tombstones are the deletions that readers may need. When a key is set again, the tree
// byKey finds its tombstone. The tree byRevision finds the oldest tombstone. Readers find
// deletions in Store.log instead.
type tombstones[K, V any] struct {
	byKey, byRevision *tree[K, V]
}

func (x *tombstones[K, V]) add(dead *entry[K, V]) {
	x.byKey.ReplaceOrInsert(dead)
	x.byRevision.ReplaceOrInsert(dead)
}

// take removes and returns the tombstone of e's key.
func (x *tombstones[K, V]) take(e *entry[K, V]) (*entry[K, V], bool) {
	dead, ok := x.byKey.Delete(e)
	if ok {
		x.byRevision.Delete(dead)
	}
	return dead, ok
}

// trim drops cursors that lag too far. It also drops tombstones that no reader needs, and
// tombstones beyond the limits.
func (s *Store[K, V]) trim() {
	now := time.Since(s.created)
	s.dropTombstones(func(dead *entry[K, V]) bool {
		return s.tombstones.byKey.Len() > s.limits.tombstones || now-time.Duration(dead.mark)*time.Second > s.limits.tombstoneAge
	})
	s.dropCursors()
	if !s.options.Resumable {
		slowest, ok := s.cursors.slowest()
		s.dropTombstones(func(dead *entry[K, V]) bool { return !ok || dead.revision <= slowest.revision })
	}
	s.log.compact()
}

// dropTombstones drops tombstones, oldest first, until shouldDrop returns false.
func (s *Store[K, V]) dropTombstones(shouldDrop func(*entry[K, V]) bool) {
	for {
		oldest, ok := s.tombstones.byRevision.Min()
		if !ok || !shouldDrop(oldest) {
			return
		}
		s.tombstones.take(oldest)
		s.log.drop(oldest, s.revision+1)
		s.floor = oldest.revision
	}
}
