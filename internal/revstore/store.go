// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"iter"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Revision is the number of a change. Later changes have higher revisions. A store
// without changes has revision 1. A reader without a state is at revision 0.
type Revision = uint64

// Revisions issues revisions in ascending order. The zero value is ready to use. Stores
// that share one Revisions value never give two changes the same revision.
type Revisions struct {
	changes atomic.Uint64

	mu sync.Mutex
	// commits has the last commits. When it has maxCommits elements, it is a ring buffer. Then
	// the field oldest is the index of the oldest commit.
	commits []Commit
	oldest  int
}

const maxCommits = 256

// Commit is a number of changes that became visible together.
type Commit struct {
	// First and Last are the revisions of the first and the last change.
	First, Last Revision
	Time        time.Time
}

// Commit records that the changes with revisions from first to the present revision
// became visible now.
func (r *Revisions) Commit(first Revision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := Commit{first, r.Last(), time.Now()}
	if len(r.commits) < maxCommits {
		r.commits = append(r.commits, c)
		return
	}
	r.commits[r.oldest] = c
	r.oldest = (r.oldest + 1) % maxCommits
}

// Commits returns the last commits, oldest first. Their number is at most maxCommits.
func (r *Revisions) Commits() []Commit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Concat(r.commits[r.oldest:], r.commits[:r.oldest])
}

// Last returns the last issued revision, or 1 if there is none.
func (r *Revisions) Last() Revision { return firstRevision + r.changes.Load() }

func (r *Revisions) next() Revision { return firstRevision + r.changes.Add(1) }

// firstRevision is the revision of a store without changes.
const firstRevision Revision = 1

// Options configures a [Store].
type Options[K, V any] struct {
	// Compare orders keys. It returns a negative number if a comes before b, and 0 if a
	// and b are the same key. Required.
	Compare func(a, b K) int

	// Equal reports whether b equals a. Setting an equal value is not a change, and the
	// store keeps the old value. Required.
	Equal func(a, b V) bool

	// Revisions is the counter that gives each change its revision. Default: a counter of this store.
	Revisions *Revisions

	// Resumable keeps tombstones, within the store's limits, even if every cursor has passed
	// them. It enables [Snapshot.Since] for readers that have a revision instead of a
	// cursor. Default: the store keeps tombstones for cursors only.
	Resumable bool
}

// limits bounds the memory that the store uses for readers.
type limits struct {
	// tombstones and tombstoneAge limit the number and age of tombstones. Beyond a limit,
	// the store deletes even tombstones that a cursor needs. It checks the age only in calls
	// that change the store or a cursor.
	tombstones   int
	tombstoneAge time.Duration
	// A cursor may lag by this number of recorded changes, or by a quarter of the store's
	// length if that is more. If a cursor lags further, its reader has to start over.
	lag int
}

// Store is an ordered map. Readers can follow its changes. See package diffstore.
type Store[K, V any] struct {
	options Options[K, V]
	limits  limits
	created time.Time

	mu sync.Mutex

	byKey      *tree[K, V]
	log        changeLog[K, V]
	tombstones tombstones[K, V]
	cursors    cursors[K, V]

	revision Revision // revision of the last recorded change
	recorded uint64   // number of recorded changes
	floor    Revision // revision of the newest dropped tombstone; all later changes are still known
	listings uint32   // number of calls of Replace

	probe entry[K, V] // search key of the method find, reused to avoid an allocation

	cached atomic.Pointer[Snapshot[K, V]] // snapshot of the current revision, if one was taken
}

// New returns an empty store. The store does not know earlier changes of stores with the
// same Revisions. New panics if a required option is missing.
func New[K, V any](options Options[K, V]) *Store[K, V] {
	if options.Compare == nil || options.Equal == nil {
		panic("revstore: Options.Compare and Options.Equal are required")
	}
	if options.Revisions == nil {
		options.Revisions = new(Revisions)
	}
	return &Store[K, V]{
		options:    options,
		created:    time.Now(),
		limits:     limits{tombstones: 100_000, tombstoneAge: 10 * time.Minute, lag: 10_000},
		byKey:      newKeyTree[K, V](options.Compare),
		tombstones: tombstones[K, V]{newKeyTree[K, V](options.Compare), newRevisionTree[K, V]()},
		cursors:    newCursors[K, V](),
		revision:   options.Revisions.Last(),
		floor:      options.Revisions.Last(),
	}
}

// Set sets the value of key. It reports whether the value changed.
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

// Delete deletes key. It reports whether the key existed.
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

// Replace makes the store equal to a full listing in one commit. It sets the listed
// entries, deletes all others, and returns the number of changes. The listing may be in
// any order; the last value of a repeated key counts. The iteration runs under the
// store's lock, so the listing must not use the store.
func (s *Store[K, V]) Replace(listing iter.Seq2[K, V]) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revision)
	return s.replace(listing)
}

// Get returns the value of key. Writers use it because, unlike a snapshot, it does not
// make later writes copy data.
func (s *Store[K, V]) Get(key K) (value V, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.find(key); ok {
		return e.value, true
	}
	return value, false
}

// Snapshot returns the state after the last commit, in O(1).
func (s *Store[K, V]) Snapshot() *Snapshot[K, V] {
	if cached := s.cached.Load(); cached != nil {
		return cached
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if cached := s.cached.Load(); cached != nil {
		return cached
	}
	// Clone modifies s.byKey, so it needs the mutex. Readers of the clone need no lock.
	s.log.shared = true
	snapshot := &Snapshot[K, V]{
		store:    s,
		byKey:    s.byKey.Clone(),
		log:      s.log.entries,
		revision: s.revision,
		recorded: s.recorded,
		floor:    s.floor,
	}
	s.cached.Store(snapshot)
	return snapshot
}

// commit ends a write. If the revision has changed, the changes become visible.
func (s *Store[K, V]) commit(before Revision) {
	if s.revision == before {
		return
	}
	s.cached.Store(nil)
	s.trim()
}

func (s *Store[K, V]) find(key K) (*entry[K, V], bool) {
	// Listings are usually in key order. A key after the store's last key needs no search.
	if last, ok := s.byKey.Max(); !ok || s.options.Compare(last.key, key) < 0 {
		return nil, false
	}
	s.probe.key = key
	return s.byKey.Get(&s.probe)
}

// put inserts e, and removes the old entry or tombstone of the same key.
func (s *Store[K, V]) put(e *entry[K, V]) {
	old, ok := s.byKey.ReplaceOrInsert(e)
	if !ok {
		old, _ = s.tombstones.take(e)
	}
	s.record(e, old)
}

// remove replaces e by a tombstone.
func (s *Store[K, V]) remove(e *entry[K, V]) {
	s.byKey.Delete(e)
	dead := &entry[K, V]{key: e.key, deleted: true, mark: uint32(math.Ceil(time.Since(s.created).Seconds()))}
	s.record(dead, e)
	s.tombstones.add(dead)
}

// record assigns the next revision to e. If old is not nil, this entry or tombstone
// becomes outdated.
func (s *Store[K, V]) record(e, old *entry[K, V]) {
	e.revision = s.options.Revisions.next()
	s.revision = e.revision
	s.recorded++
	s.log.add(e)
	if old != nil {
		s.log.drop(old, e.revision)
	}
}
