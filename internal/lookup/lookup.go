// SPDX-License-Identifier: Apache-2.0

// Package lookup searches lists that are usually short. A list of at most 32 elements may
// have any order. A longer list is sorted, because many linear searches in it would take
// too long.
package lookup

import "slices"

const maxUnsorted = 32

// Sort sorts list for Find. It does not change the order of equal elements, nor the order
// of short lists.
func Sort[E any](list []E, compare func(a, b E) int) {
	if len(list) > maxUnsorted {
		slices.SortStableFunc(list, compare)
	}
}

// Find returns the first element for which the function compare returns 0. If there is no
// such element, it returns nil. If list is long, compare must have the order of Sort.
func Find[E, K any](list []E, key K, compare func(E, K) int) *E {
	if len(list) > maxUnsorted {
		if i, found := slices.BinarySearchFunc(list, key, compare); found {
			return &list[i]
		}
		return nil
	}
	for i := range list {
		if compare(list[i], key) == 0 {
			return &list[i]
		}
	}
	return nil
}
