// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"iter"
	"slices"
)

// replace compares the whole listing with the store before it writes. For each key, it
// uses only the last value in the listing. It writes this value only if the store has a
// different value.
func (s *Store[K, V]) replace(listing iter.Seq2[K, V]) int {
	before := s.recorded
	s.listings++

	var different []*entry[K, V]
	ascending := true // true if the listing is sorted and has no duplicates
	for key, value := range listing {
		e, ok := s.find(key)
		again := ok && e.mark == s.listings
		if ok {
			e.mark = s.listings
		}
		if ok && !again && s.options.Equal(e.value, value) {
			continue
		}
		if last := len(different) - 1; again || last >= 0 && s.options.Compare(different[last].key, key) >= 0 {
			ascending = false
		}
		different = append(different, &entry[K, V]{key: key, value: value})
	}
	if !ascending {
		different = s.lastOfEach(different)
	}

	var gone []*entry[K, V]
	s.byKey.Ascend(func(e *entry[K, V]) bool {
		if e.mark != s.listings {
			gone = append(gone, e)
		}
		return true
	})
	for _, e := range gone {
		s.remove(e)
	}
	for _, e := range different {
		s.put(e)
	}
	return int(s.recorded - before)
}

// lastOfEach sorts entries by key. It keeps only the last entry of each key, and drops
// this entry too if the store has an equal value.
func (s *Store[K, V]) lastOfEach(entries []*entry[K, V]) []*entry[K, V] {
	slices.SortStableFunc(entries, func(a, b *entry[K, V]) int { return s.options.Compare(a.key, b.key) })
	last := entries[:0]
	for i, e := range entries {
		if i+1 < len(entries) && s.options.Compare(e.key, entries[i+1].key) == 0 {
			continue
		}
		if old, ok := s.find(e.key); !ok || !s.options.Equal(old.value, e.value) {
			last = append(last, e)
		}
	}
	return last
}
