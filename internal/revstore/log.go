// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"slices"
	"sort"
)

// changeLog has the entries and tombstones of a store, sorted by revision. Until the next
// compaction, it also has outdated entries. Snapshots share the memory of the field
// entries. While they share it, writers only append to it.
type changeLog[K, V any] struct {
	entries  []*entry[K, V]
	outdated int  // number of outdated entries
	shared   bool // true if a snapshot may refer to the field entries
}

func (l *changeLog[K, V]) add(e *entry[K, V]) { l.entries = append(l.entries, e) }

// drop marks an entry as outdated in snapshots of later revisions, beginning with the
// revision in the argument from.
func (l *changeLog[K, V]) drop(e *entry[K, V], from Revision) {
	e.outdated.Store(from)
	l.outdated++
}

// tolerated returns how many outdated entries are allowed without a compaction. The
// values of these entries use memory.
func (l *changeLog[K, V]) tolerated() int { return 16 + len(l.entries)/64 }

// compact removes the outdated entries if there are many, so that the average cost per
// change is small.
func (l *changeLog[K, V]) compact() {
	if l.outdated <= l.tolerated() {
		return
	}
	if l.shared {
		l.entries = append(make([]*entry[K, V], 0, len(l.entries)), l.entries...)
		l.shared = false
	}
	l.entries = slices.DeleteFunc(l.entries, func(e *entry[K, V]) bool { return e.outdated.Load() != 0 })
	l.outdated = 0
	if cap(l.entries) > 1024+4*len(l.entries) {
		l.entries = slices.Clone(l.entries) // release the memory of a store that was large
	}
}

// firstAfter returns the index of the first entry written after a revision.
func firstAfter[K, V any](log []*entry[K, V], revision Revision) int {
	return sort.Search(len(log), func(i int) bool { return log[i].revision > revision })
}
