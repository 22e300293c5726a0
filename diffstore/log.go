// SPDX-License-Identifier: Apache-2.0

package diffstore

// changeLog has the entries and tombstones of a store, sorted by revision. Until the next
// compaction, it also has outdated entries. Snapshots share the memory of the log,
// because writers only append to it.
type changeLog[K, V any] struct {
	entries  []*entry[K, V]
	outdated int // number of outdated entries
}

func (l *changeLog[K, V]) add(e *entry[K, V]) { l.entries = append(l.entries, e) }

// drop marks an entry as outdated in snapshots of the revision from or later.
func (l *changeLog[K, V]) drop(e *entry[K, V], from Revision) {
	e.outdated.Store(uint64(from))
	l.outdated++
}

// compact removes the outdated entries when there are many, so that the average cost per
// change is small. Until then, their values use memory.
func (l *changeLog[K, V]) compact() {
	tolerated := 64 + len(l.entries)/8
	if l.outdated <= tolerated {
		return
	}
	current := make([]*entry[K, V], 0, len(l.entries)-l.outdated+tolerated)
	for _, e := range l.entries {
		if e.outdated.Load() == 0 {
			current = append(current, e)
		}
	}
	l.entries, l.outdated = current, 0
}
