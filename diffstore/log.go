// SPDX-License-Identifier: Apache-2.0

package diffstore

import "sort"

// changeLog has the entries and tombstones of a store, sorted by revision. Until the next
// compaction, it also has outdated entries. Snapshots share the memory of the field
// entries, because writers only append to it.
type changeLog[K, V any] struct {
	entries []*entry[K, V]
	// The element i of isOutdated says whether entries[i] is outdated. Only writers use it.
	// So compact needs not read the entries, which are anywhere in memory.
	isOutdated []bool
	outdated   int // number of outdated entries
}

func (l *changeLog[K, V]) add(e *entry[K, V]) {
	l.entries = append(l.entries, e)
	l.isOutdated = append(l.isOutdated, false)
}

// drop marks an entry as outdated in snapshots of the revision from or later.
func (l *changeLog[K, V]) drop(e *entry[K, V], from Revision) {
	e.outdated.Store(uint64(from))
	l.isOutdated[firstAfter(l.entries, e.revision)-1] = true
	l.outdated++
}

// tolerated returns how many entries may be outdated without a compaction. Their values
// use memory.
func (l *changeLog[K, V]) tolerated() int { return 16 + len(l.entries)/64 }

// compact removes the outdated entries if there are many, so that the average cost per
// change is small.
func (l *changeLog[K, V]) compact() {
	if l.outdated <= l.tolerated() {
		return
	}
	size := len(l.entries) - l.outdated + l.tolerated()
	current := changeLog[K, V]{entries: make([]*entry[K, V], 0, size), isOutdated: make([]bool, 0, size)}
	for i, e := range l.entries {
		if !l.isOutdated[i] {
			current.add(e)
		}
	}
	*l = current
}

// firstAfter returns the index of the first entry written after a revision.
func firstAfter[K, V any](log []*entry[K, V], revision Revision) int {
	return sort.Search(len(log), func(i int) bool { return log[i].revision > revision })
}
