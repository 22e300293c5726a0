// SPDX-License-Identifier: Apache-2.0

// Package diffstore keeps ordered state and answers "what changed since?" at a cost that
// depends on the changes, not on the state.
//
// A [Store] maps keys to values. Every change that really changes something gets a [Revision]
// of its own; setting an equal value is no change. Readers never wait for each other: they take
// a [Snapshot] in O(1), read it without a lock for as long as they like, and ask it for the
// changes after the revision they know, each key once however often it changed.
//
//	store := diffstore.New(diffstore.Options[string, int]{
//		Compare: strings.Compare,
//		Equal:   func(a, b int) bool { return a == b },
//	})
//	store.Replace(maps.All(listing)) // records only what differs from the last listing
//
// A reader that follows the store has a [Cursor]. It gets the [Delta] between the snapshot it
// acknowledged last and a later one, or it has to start over:
//
//	cursor := store.NewCursor()
//	defer cursor.Close()
//	for range written { // the program's own signal that there may be something new
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
//		cursor.Advance(delta.New) // left out, the same changes come again, merged with later ones
//	}
//
// # Several stores
//
// Stores that share one [Revisions] have one order of changes. A program that needs a
// consistent view of several stores holds a mutex of its own around writes to all of them and
// around taking a snapshot of each. A reader then has one cursor per store, gives each the
// snapshot of its store, and starts over with all when one of them has to.
//
// # Memory
//
// A deletion leaves a tombstone for readers. Tombstones that every cursor has passed are
// dropped, and so are those that are older than ten minutes or more than 100,000: no reader,
// however slow, makes the store grow. A cursor that needs a dropped tombstone, or lags by more
// than 10,000 changes and a quarter of the store, has to start over, and the store lets go of
// the snapshot it held for it. With [Options.Resumable] the store keeps the tombstones that
// cursors have passed, within the same limits.
//
// # Ownership and concurrency
//
// All types are safe for concurrent use. Keys and values belong to the store once they were
// handed in; they are shared by all readers and must not be modified.
package diffstore
