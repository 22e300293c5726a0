// SPDX-License-Identifier: Apache-2.0

// Package diffstore keeps ordered state and answers "what changed since?" at a cost that depends on the changes, not on the state.
//
// A [Store] maps keys to values. Every change that really changes something gets a [Revision] of its own; setting an equal
// value is no change. Readers never wait for each other: they take a [Snapshot] in O(1), read it without a lock for as
// long as they like, and ask it for the changes after the revision they know, each key once however often it changed.
//
//	store := diffstore.New(diffstore.Options[string, int]{
//		Compare: strings.Compare,
//		Equal:   func(a, b int) bool { return a == b },
//	})
//	store.Replace(0, maps.All(listing)) // records only what differs from the last listing
//
// A reader that follows the store has a [Cursor]. It is told the [Delta] between what it acknowledged last and a snapshot,
// or that it has to start over:
//
//	cursor := store.NewCursor()
//	defer cursor.Close()
//	for {
//		delta := cursor.Until(store.Snapshot())
//		if delta.Full() {
//			clear(mirror)
//		}
//		for change := range delta.Changes() {
//			if change.Deleted {
//				delete(mirror, change.Key)
//			} else {
//				mirror[change.Key] = change.Value
//			}
//		}
//		cursor.Advance(delta.New) // left out, the same changes come again, merged with later ones
//		if err := store.Wait(ctx, delta.New.Revision()); err != nil {
//			return err
//		}
//	}
//
// # Writers
//
// Each writer has a [Scope]. An entry belongs to the scope that wrote it last; a deletion by another scope is ignored, and
// [Store.Replace] makes what one scope wrote equal to a full listing without looking at what the others wrote. That is how
// several watches fill one store although their relists overlap.
//
// # Several stores
//
// Stores that share one [Revisions] have one order of changes. Who needs a consistent view of several holds a mutex of his own
// around writes to all of them and around taking a snapshot of each; a reader then has one cursor per store, gives
// each the snapshot of its store, and starts over with all when one of them has to.
//
// # Memory
//
// A deletion leaves a tombstone, so that readers learn of it. Tombstones that every cursor has passed are dropped, and
// [Options] limits number and age of the rest: no reader, however slow, makes the store grow. A cursor that needs a
// dropped tombstone, or lags by too many changes, has to start over, and the store lets go of the snapshot it held for it.
//
// # Ownership and concurrency
//
// All types are safe for concurrent use. Keys and values belong to the store once they were handed in; they are shared by
// all readers and must not be modified.
package diffstore
