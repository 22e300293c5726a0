// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// Revision numbers a change: later changes have higher revisions. A store without changes has
// revision 1, and 0 is the revision of a reader that has nothing yet.
type Revision uint64

// Revisions hands out revisions, each once, in ascending order. The zero value is ready for
// use. Stores that share a Revisions (see [Options]) never record two changes under one
// revision.
type Revisions struct {
	changes atomic.Uint64
}

// Last returns the revision handed out last, 1 if there was none.
func (r *Revisions) Last() Revision { return firstRevision + Revision(r.changes.Load()) }

func (r *Revisions) next() Revision { return firstRevision + Revision(r.changes.Add(1)) }

// firstRevision is that of a store without changes.
const firstRevision Revision = 1

// Options configures a [Store].
type Options[K, V any] struct {
	// Compare orders keys: negative if a comes before b, 0 if they are the same key. Required.
	Compare func(a, b K) int

	// Equal reports whether replacing a by b is no change; then a stays. Required.
	Equal func(a, b V) bool

	// Revisions numbers the changes. Default: a counter of the store's own.
	Revisions *Revisions

	// Resumable keeps tombstones within the store's limits even if every cursor has passed
	// them, so that [Snapshot.Since] serves readers that hold a revision and no cursor.
	// Default: tombstones are kept for cursors only.
	Resumable bool

	// OnChange is called with each change as it is recorded, under the store's lock, so that an
	// index can be kept in step with the store: the key's values before and after, the zero
	// value where there is none. It must not use the store. Default: none.
	OnChange func(key K, old, new V)
}

// limits bound what readers cost, so that none of them makes the store grow.
type limits struct {
	// tombstones and tombstoneAge are how many deletions are remembered at most, and for how
	// long, whatever cursors need. Age counts when something changes: a store at rest keeps
	// what it has.
	tombstones   int
	tombstoneAge time.Duration
	// lag is how many recorded changes a cursor may lag before its reader has to start over; a
	// quarter of the store's length if that is more.
	lag int
}

// Store is an ordered map whose changes can be followed. See the package comment.
type Store[K, V any] struct {
	options Options[K, V]
	limits  limits
	created time.Time

	mu sync.Mutex

	byKey      *tree[K, V]
	byRevision *tree[K, V] // the entries of byKey and the tombstones: each key once
	tombstones tombstones[K, V]
	cursors    cursors[K, V]

	revision Revision // of the last recorded change
	recorded uint64   // number of changes recorded so far
	floor    Revision // of the newest tombstone that was dropped: what changed after it is still known
	listings uint64   // number of calls of Replace so far

	probe entry[K, V] // what find looks up; kept so that looking up does not allocate

	cached atomic.Pointer[Snapshot[K, V]] // the snapshot of this revision, if one was taken
}

// New returns an empty store. It panics if a required option is missing.
func New[K, V any](options Options[K, V]) *Store[K, V] {
	if options.Compare == nil || options.Equal == nil {
		panic("diffstore: Options.Compare and Options.Equal are required")
	}
	if options.Revisions == nil {
		options.Revisions = new(Revisions)
	}
	return &Store[K, V]{
		options:    options,
		created:    time.Now(),
		limits:     limits{tombstones: 100_000, tombstoneAge: 10 * time.Minute, lag: 10_000},
		byKey:      newKeyTree[K, V](options.Compare),
		byRevision: newRevisionTree[K, V](),
		tombstones: tombstones[K, V]{newKeyTree[K, V](options.Compare), newRevisionTree[K, V]()},
		cursors:    newCursors[K, V](),
		revision:   firstRevision,
		floor:      firstRevision,
	}
}

// Set gives key a value. It reports whether that was a change; an equal value is none.
func (s *Store[K, V]) Set(key K, value V) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.find(key); ok && s.options.Equal(e.value, value) {
		return false
	}
	defer s.commit(s.revision)
	s.put(&entry[K, V]{key: key, value: value})
	return true
}

// Delete removes key. It reports whether that was a change.
func (s *Store[K, V]) Delete(key K) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.find(key)
	if !ok {
		return false
	}
	defer s.commit(s.revision)
	s.remove(e)
	return true
}

// Replace makes the store equal to a full listing in one commit and returns the number of
// changes that took: listed entries are set, all others are deleted. The listing may be in any
// order; of several values for one key the last counts. It is read while the store is locked
// and must not use the store.
func (s *Store[K, V]) Replace(listing iter.Seq2[K, V]) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revision)
	return s.replace(listing)
}

// Get returns the value of key. It is meant for writers: unlike a snapshot it makes no later
// write copy anything.
func (s *Store[K, V]) Get(key K) (value V, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.find(key); ok {
		return e.value, true
	}
	return value, false
}

// Snapshot returns the store's state as of the last commit, in O(1).
func (s *Store[K, V]) Snapshot() *Snapshot[K, V] {
	if cached := s.cached.Load(); cached != nil {
		return cached
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if cached := s.cached.Load(); cached != nil {
		return cached
	}
	// Clone writes to the tree it clones, so it needs the mutex as any write does; the clones
	// themselves are only read.
	snapshot := &Snapshot[K, V]{
		store:      s,
		byKey:      s.byKey.Clone(),
		byRevision: s.byRevision.Clone(),
		revision:   s.revision,
		recorded:   s.recorded,
		floor:      s.floor,
	}
	s.cached.Store(snapshot)
	return snapshot
}

// commit ends a commit that began at revision before: readers see what it recorded.
func (s *Store[K, V]) commit(before Revision) {
	if s.revision == before {
		return
	}
	s.cached.Store(nil)
	s.trim()
}

func (s *Store[K, V]) find(key K) (*entry[K, V], bool) {
	// Lists come in key order as a rule, and a key beyond the last needs no search.
	if last, ok := s.byKey.Max(); !ok || s.options.Compare(last.key, key) < 0 {
		return nil, false
	}
	s.probe.key = key
	return s.byKey.Get(&s.probe)
}

// put records that e takes the place of whatever its key had, be it an entry or a tombstone.
func (s *Store[K, V]) put(e *entry[K, V]) {
	var before V
	if old, ok := s.byKey.ReplaceOrInsert(e); ok {
		before = old.value
		s.byRevision.Delete(old)
	} else if old, ok := s.tombstones.take(e); ok {
		s.byRevision.Delete(old)
	}
	s.record(e, before)
}

// remove records that a tombstone takes the place of e.
func (s *Store[K, V]) remove(e *entry[K, V]) {
	s.byKey.Delete(e)
	s.byRevision.Delete(e)
	dead := &entry[K, V]{key: e.key, deleted: true, mark: uint64(time.Since(s.created))}
	s.record(dead, e.value)
	s.tombstones.add(dead)
}

// record numbers e, which takes the place of an entry that had the value before.
func (s *Store[K, V]) record(e *entry[K, V], before V) {
	e.revision = s.options.Revisions.next()
	s.byRevision.ReplaceOrInsert(e)
	s.revision = e.revision
	s.recorded++
	if s.options.OnChange != nil {
		s.options.OnChange(e.key, before, e.value)
	}
}
