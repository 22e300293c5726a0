// SPDX-License-Identifier: Apache-2.0

package diffstore

import "github.com/google/btree"

// degree makes nodes of at most 63 entries: half a kilobyte to copy where a write meets a node
// that a snapshot shares.
const degree = 32

// entry is a key with its value, or the tombstone of a key.
type entry[K, V any] struct {
	// Readers see these without a lock: they never change once the entry is in a tree.
	key      K
	value    V // zero in a tombstone
	revision Revision
	deleted  bool

	// mark is the number of the last Replace whose listing had the key or, of a tombstone, when
	// the key was deleted, as the age of the store in nanoseconds. Only writers look at it,
	// under the store's mutex, and may change it in place.
	mark uint64
}

// tree is an ordered set of entries.
type tree[K, V any] = btree.BTreeG[*entry[K, V]]

func newKeyTree[K, V any](compare func(a, b K) int) *tree[K, V] {
	return btree.NewG(degree, func(a, b *entry[K, V]) bool { return compare(a.key, b.key) < 0 })
}

func newRevisionTree[K, V any]() *tree[K, V] {
	return btree.NewG(degree, func(a, b *entry[K, V]) bool { return a.revision < b.revision })
}
