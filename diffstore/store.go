// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"
)

// Options configures a [Store].
type Options[K, V any] struct {
	// Compare orders keys: negative if a comes before b, 0 if they are the same key. Required.
	Compare func(a, b K) int

	// Equal tells whether replacing a by b is no change; then a stays. Required.
	Equal func(a, b V) bool

	// Revisions numbers the changes. Default: a counter of the store's own.
	Revisions *Revisions

	// MaxTombstones is how many deletions are remembered at most, whatever cursors need. Default: 100,000.
	MaxTombstones int

	// MaxTombstoneAge is how long deletions are remembered at most, whatever cursors need. Age is looked at when something
	// changes: a store at rest keeps what it has. Default: 10 minutes.
	MaxTombstoneAge time.Duration

	// Resumable keeps tombstones up to these limits even if every cursor has passed them, so that [Snapshot.Since] can serve
	// readers that come back with a revision and have no cursor meanwhile. Default: false; without any cursor
	// tombstones are kept up to the limits all the same.
	Resumable bool

	// MaxLag is how many recorded changes a cursor may lag before it has to start over; a quarter of the store's length
	// if that is more. Default: 10,000.
	MaxLag int

	// OnChange is told each change as it is recorded, under the store's lock, so that an index can be kept in step with
	// the store: the key's values before and after, the zero value where there is none. It must not use the store. Default: none.
	OnChange func(key K, old, new V)

	// Clock tells the age of tombstones. Default: the real time.
	Clock clock.PassiveClock
}

// Store is an ordered map whose changes can be followed. See the package comment.
type Store[K, V any] struct {
	options Options[K, V]

	mu sync.Mutex

	byKey      *tree[K, V]
	byRevision *tree[K, V] // the entries of byKey and the tombstones: each key once
	scopes     scopes[K, V]
	tombstones tombstones[K, V]
	cursors    cursors[K, V]

	revision Revision // of the last recorded change
	recorded uint64   // number of changes recorded so far
	floor    Revision // of the newest tombstone that was dropped: what changed after it is still known
	listings uint64   // number of calls of Replace so far

	probe   entry[K, V]   // what find looks up; kept so that looking up does not allocate
	changed chan struct{} // closed and cleared by the next commit; nil while nobody waits

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
	if options.MaxTombstones <= 0 {
		options.MaxTombstones = 100_000
	}
	if options.MaxTombstoneAge <= 0 {
		options.MaxTombstoneAge = 10 * time.Minute
	}
	if options.MaxLag <= 0 {
		options.MaxLag = 10_000
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	return &Store[K, V]{
		options:    options,
		byKey:      newKeyTree[K, V](options.Compare),
		byRevision: newRevisionTree[K, V](),
		scopes:     newScopes[K, V](options.Compare),
		tombstones: newTombstones[K, V](options.Compare),
		cursors:    newCursors[K, V](),
	}
}

// Set gives key a value on behalf of scope, which owns the entry from now on. It reports whether that was a change; an equal
// value is none.
func (s *Store[K, V]) Set(scope Scope, key K, value V) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revision)
	return s.set(scope, key, value)
}

// Delete removes key on behalf of scope. It reports whether that was a change: an entry that another scope wrote last
// stays.
func (s *Store[K, V]) Delete(scope Scope, key K) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revision)
	return s.delete(scope, key)
}

// Replace makes what scope wrote equal to a full listing and returns the number of changes that took: listed entries
// are set (and taken over from other scopes), entries of this scope that are not listed are deleted, in one commit.
// The listing may be in any order; of several values for one key the last counts. It is read while the store is locked and
// must not use the store.
//
// The cost depends on the listing and on what the scope wrote; only scope 0 looks at the whole store.
func (s *Store[K, V]) Replace(scope Scope, listing iter.Seq2[K, V]) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revision)
	return s.replace(scope, listing)
}

// Tx writes to the store within a [Store.Commit].
type Tx[K, V any] struct {
	store *Store[K, V]
}

// Commit calls write and shows readers everything it wrote at once. If write panics, what it has written so far is kept. The
// store is locked meanwhile: write must use the Tx alone, and not after it returned.
func (s *Store[K, V]) Commit(write func(*Tx[K, V])) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revision)
	tx := Tx[K, V]{store: s}
	defer func() { tx.store = nil }()
	write(&tx)
}

// Get returns the value of key, as written so far.
func (tx *Tx[K, V]) Get(key K) (V, bool) { return tx.store.get(key) }

// Set is [Store.Set] as a part of the commit.
func (tx *Tx[K, V]) Set(scope Scope, key K, value V) bool { return tx.store.set(scope, key, value) }

// Delete is [Store.Delete] as a part of the commit.
func (tx *Tx[K, V]) Delete(scope Scope, key K) bool { return tx.store.delete(scope, key) }

// Replace is [Store.Replace] as a part of the commit.
func (tx *Tx[K, V]) Replace(scope Scope, listing iter.Seq2[K, V]) int {
	return tx.store.replace(scope, listing)
}

// Get returns the value of key. It is meant for writers: unlike a snapshot it makes no later write copy anything.
func (s *Store[K, V]) Get(key K) (V, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.get(key)
}

// Revision returns the revision of the last change recorded in this store, 0 if there was none.
func (s *Store[K, V]) Revision() Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// Len returns the number of entries.
func (s *Store[K, V]) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byKey.Len()
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
	// Clone writes to the tree it clones, so it needs the mutex as any write does; the clones themselves are only read.
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

// commit ends a commit that began at revision before: readers see what it recorded, waiters wake.
func (s *Store[K, V]) commit(before Revision) {
	if s.revision == before {
		return
	}
	s.cached.Store(nil)
	s.trim()
	s.wake()
}

func (s *Store[K, V]) find(key K) (*entry[K, V], bool) {
	// Lists come in key order as a rule, and a key beyond the last needs no search.
	if last, ok := s.byKey.Max(); !ok || s.options.Compare(last.key, key) < 0 {
		return nil, false
	}
	s.probe.key = key
	return s.byKey.Get(&s.probe)
}

func (s *Store[K, V]) get(key K) (value V, ok bool) {
	if e, ok := s.find(key); ok {
		return e.value, true
	}
	return value, false
}

func (s *Store[K, V]) set(scope Scope, key K, value V) bool {
	if e, ok := s.find(key); ok && s.options.Equal(e.value, value) {
		s.scopes.move(e, scope)
		return false
	}
	s.put(&entry[K, V]{key: key, value: value, scope: scope})
	return true
}

func (s *Store[K, V]) delete(scope Scope, key K) bool {
	e, ok := s.find(key)
	if !ok || e.scope != scope {
		return false
	}
	s.remove(e)
	return true
}

// put records that e takes the place of whatever its key had, be it an entry or a tombstone.
func (s *Store[K, V]) put(e *entry[K, V]) {
	var before V
	if old, ok := s.byKey.ReplaceOrInsert(e); ok {
		before = old.value
		s.scopes.remove(old)
		s.byRevision.Delete(old)
	} else if old, ok := s.tombstones.take(e); ok {
		s.byRevision.Delete(old)
	}
	s.scopes.add(e)
	s.record(e, before)
}

// remove records that a tombstone takes the place of e.
func (s *Store[K, V]) remove(e *entry[K, V]) {
	s.byKey.Delete(e)
	s.byRevision.Delete(e)
	s.scopes.remove(e)
	dead := &entry[K, V]{key: e.key, deleted: true}
	s.record(dead, e.value)
	s.tombstones.add(dead, s.options.Clock.Now())
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
