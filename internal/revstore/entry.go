// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"sync/atomic"

	"github.com/google/btree"
)

// degree is the degree of the B-trees. A tree node then has at most 63 entries. If the
// tree shares nodes with a snapshot, a write copies at most half a kilobyte of each node.
const degree = 32

// entry is a key with its value, or the tombstone of a key.
type entry[K, V any] struct {
	// Readers read these four fields without a lock. The fields never change after the entry
	// was put into a tree.
	key      K
	value    V // the zero value for a tombstone
	revision Revision
	deleted  bool

	// The mark of an entry is the sequence number of the last Replace call that listed the
	// key. The mark of a tombstone is the time of the deletion, in seconds since the store
	// was created, rounded up. Only writers use mark, under the store's mutex. They may
	// change it in place.
	mark uint32

	// outdated is the first revision whose snapshots no longer contain the entry. It is 0 if
	// the latest state contains the entry. Readers read it without a lock.
	outdated atomic.Uint64
}

// in reports whether the snapshot at a revision contains the entry.
func (e *entry[K, V]) in(revision Revision) bool {
	outdated := e.outdated.Load()
	return outdated == 0 || revision < outdated
}

// tree is an ordered set of entries.
type tree[K, V any] = btree.BTreeG[*entry[K, V]]

func newKeyTree[K, V any](compare func(a, b K) int) *tree[K, V] {
	return btree.NewG(degree, func(a, b *entry[K, V]) bool { return compare(a.key, b.key) < 0 })
}

func newRevisionTree[K, V any]() *tree[K, V] {
	return btree.NewG(degree, func(a, b *entry[K, V]) bool { return a.revision < b.revision })
}
