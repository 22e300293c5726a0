// SPDX-License-Identifier: Apache-2.0

// Package diffstore keeps ordered state and returns the changes since an earlier point,
// at a cost that depends on the number of changes, not on the size of the state. Backends
// can use it to compare the state that they want with the state that they have programmed.
//
// A [Store] maps keys to values. Setting an equal value is not a change. Readers never
// wait for each other. They take a [Snapshot] in O(1) and read it without a lock.
//
//	store := diffstore.New(strings.Compare, func(a, b int) bool { return a == b })
//	store.Replace(maps.All(listing)) // records only what differs from the last listing
//
// A reader that follows the store has a [Cursor]. The reader receives the changes between
// the snapshot that it last acknowledged and a later snapshot, each changed key once. It
// may have to start over:
//
//	cursor := store.NewCursor()
//	defer cursor.Close()
//	for range written { // the program's own signal that the store may have changed
//		snapshot := store.Snapshot()
//		changes, all := cursor.Until(snapshot)
//		if all {
//			clear(mirror)
//		}
//		for change := range changes { // in key order, each with its old and new value
//			if _, ok := snapshot.Get(change.Key); ok {
//				mirror[change.Key] = change.New
//			} else {
//				delete(mirror, change.Key)
//			}
//		}
//		cursor.Advance(snapshot) // without this call, the next call of Until repeats the changes
//	}
//
// # Memory
//
// For its cursors, a store remembers deletions: at most the newest 100,000, and each for
// at most ten minutes. So a slow reader does not make the store grow without limit. A
// cursor has to start over if it needs a forgotten deletion, or if it lags by more than
// 10,000 changes and by more than a quarter of the store's entries. Then the store also
// releases the cursor's snapshot.
//
// A store may also keep replaced and deleted values that no reader needs: at most 16, and
// one more for every 64 keys and remembered deletions.
//
// # Ownership and concurrency
//
// All types are safe for concurrent use. Keys and values that are passed to the store
// belong to the store from then on. All readers share them and must not modify them.
package diffstore

import (
	"iter"

	"github.com/kpng-project/kpng/internal/revstore"
)

// Store is an ordered map. Readers can follow its changes. See the package comment.
type Store[K, V any] revstore.Store[K, V]

// New returns an empty store. The function compare orders keys: it returns a negative
// number if a comes before b, and 0 if a and b are the same key. The function equal reports
// whether b equals a. If it does, Set with b is no change, and the store keeps a. New panics
// if a function is nil.
func New[K, V any](compare func(a, b K) int, equal func(a, b V) bool) *Store[K, V] {
	return (*Store[K, V])(revstore.New(revstore.Options[K, V]{Compare: compare, Equal: equal}))
}

func (s *Store[K, V]) inner() *revstore.Store[K, V] { return (*revstore.Store[K, V])(s) }

// Set sets the value of key. It reports whether the value changed.
func (s *Store[K, V]) Set(key K, value V) bool { return s.inner().Set(key, value) }

// Delete deletes key. It reports whether the key existed.
func (s *Store[K, V]) Delete(key K) bool { return s.inner().Delete(key) }

// Replace makes the store equal to a full listing in one commit. It sets the listed
// entries, deletes all others, and returns the number of changes. The listing may be in
// any order; the last value of a repeated key counts. The iteration runs under the
// store's lock, so the listing must not use the store.
func (s *Store[K, V]) Replace(listing iter.Seq2[K, V]) int { return s.inner().Replace(listing) }

// Snapshot returns the state after the last change, in O(1).
func (s *Store[K, V]) Snapshot() *Snapshot[K, V] { return (*Snapshot[K, V])(s.inner().Snapshot()) }

// NewCursor returns a cursor without a position. Its reader has to start over. The caller
// closes the cursor.
func (s *Store[K, V]) NewCursor() *Cursor[K, V] { return (*Cursor[K, V])(s.inner().NewCursor()) }

// Snapshot is the state of a [Store] at one moment. It is immutable and is read without a
// lock. A snapshot in use keeps replaced and deleted values in memory.
type Snapshot[K, V any] revstore.Snapshot[K, V]

func (s *Snapshot[K, V]) inner() *revstore.Snapshot[K, V] { return (*revstore.Snapshot[K, V])(s) }

// Len returns the number of entries.
func (s *Snapshot[K, V]) Len() int { return s.inner().Len() }

// Get returns the value of key.
func (s *Snapshot[K, V]) Get(key K) (value V, ok bool) { return s.inner().Get(key) }

// All returns the entries in key order.
func (s *Snapshot[K, V]) All() iter.Seq2[K, V] { return s.inner().All() }

// Cursor is the position of a reader that follows a [Store]: the snapshot that the reader
// last acknowledged. For the reader, the store remembers deletions after that snapshot,
// within limits.
//
// A Cursor is meant for one reader. It is safe for concurrent use.
type Cursor[K, V any] revstore.Cursor[K, V]

func (c *Cursor[K, V]) inner() *revstore.Cursor[K, V] { return (*revstore.Cursor[K, V])(c) }

// Until returns the changes from the reader's position to a snapshot of the store, usually
// the latest, in key order. It omits keys whose old and new values are equal. If all is
// true, the reader has to start over: it replaces its state by the changes, which contain
// all keys of the snapshot.
//
// Only [Cursor.Advance] moves the position. Before the next Advance, each call returns all
// changes since the position, including those of earlier calls. For a snapshot older than
// the position, there are no changes. Time and memory of the iteration depend on the number
// of keys written after the position.
//
// Until panics if the snapshot belongs to another store.
func (c *Cursor[K, V]) Until(to *Snapshot[K, V]) (changes iter.Seq[Change[K, V]], all bool) {
	delta := c.inner().Until(to.inner())
	return func(yield func(Change[K, V]) bool) {
		for change := range delta.Changes() {
			if !yield(Change[K, V](change)) {
				return
			}
		}
	}, delta.Full()
}

// Advance moves the position to a snapshot that the reader has read. It ignores a snapshot
// older than the position. If the snapshot is too old (see Memory in the package comment),
// the reader starts over.
//
// Advance panics if the snapshot belongs to another store.
func (c *Cursor[K, V]) Advance(to *Snapshot[K, V]) { c.inner().Advance(to.inner()) }

// Close releases the cursor's snapshot and the deletions that the store remembers for it.
// The reader of a closed cursor always has to start over.
func (c *Cursor[K, V]) Close() { c.inner().Close() }

// Change is one key with its old and new value. A missing value is the zero value.
type Change[K, V any] struct {
	Key      K
	Old, New V
}
