// SPDX-License-Identifier: Apache-2.0

// Package diffstore keeps ordered state and returns the changes since an earlier point,
// at a cost that depends on the number of changes, not on the size of the state.
//
// A [Store] maps keys to values. Every change has a [Revision] of its own; setting an
// equal value is not a change. Readers never wait for each other. They take a [Snapshot]
// in O(1) and read it without a lock. From a snapshot, a reader also gets the changes
// after a known revision, each changed key once.
//
//	store := diffstore.New(diffstore.Options[string, int]{
//		Compare: strings.Compare,
//		Equal:   func(a, b int) bool { return a == b },
//	})
//	store.Replace(maps.All(listing)) // records only what differs from the last listing
//
// A reader that follows the store has a [Cursor]. The reader receives the [Delta] between
// the snapshot that it last acknowledged and a later snapshot. It may have to start over:
//
//	cursor := store.NewCursor()
//	defer cursor.Close()
//	for range written { // the program's own signal that the store may have changed
//		delta := cursor.Until(store.Snapshot())
//		if delta.Full() {
//			clear(mirror)
//		}
//		for change := range delta.Changes() { // in key order, each with its old and new value
//			if _, ok := delta.New.Get(change.Key); ok {
//				mirror[change.Key] = change.New
//			} else {
//				delete(mirror, change.Key)
//			}
//		}
//		cursor.Advance(delta.New) // without this call, the next delta repeats the changes
//	}
//
// # Several stores
//
// Stores that share one [Revisions] counter have one order of changes. For a consistent
// view of several stores, a program needs its own mutex. The program holds the mutex
// while it writes to the stores, and while it takes a snapshot of each store. A reader
// has one cursor per store, and starts over with all cursors or with none.
//
// # Memory
//
// A deletion leaves a tombstone for readers. The store drops tombstones that every cursor
// has passed. It also drops tombstones that are older than ten minutes, and keeps at most
// the newest 100,000 tombstones. So a slow reader does not make the store grow without
// limit. A cursor has to start over if it needs a dropped tombstone, or if it lags by
// more than 10,000 changes and by more than a quarter of the store's entries. Then the
// store releases the cursor's snapshot. With [Options.Resumable], the store also keeps
// tombstones that cursors have passed, within the same limits.
//
// A store may also keep replaced and deleted values that no reader needs: at most 16, and
// one more for every 64 keys and tombstones.
//
// # Ownership and concurrency
//
// All types are safe for concurrent use. Keys and values that are passed to the store
// belong to the store from then on. All readers share them and must not modify them.
package diffstore
