// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

// checkInvariants compares the store's trees with each other.
func checkInvariants[K, V any](t *testing.T, s *Store[K, V]) {
	t.Helper()
	if got, want := s.byRevision.Len(), s.byKey.Len()+s.tombstones.len(); got != want {
		t.Errorf("%d changes by revision for %d entries and tombstones", got, want)
	}
	if got, want := s.tombstones.byAge.Len(), s.tombstones.byKey.Len(); got != want {
		t.Errorf("%d tombstones by age, %d by key", got, want)
	}
	if got := s.tombstones.len(); got > s.options.MaxTombstones {
		t.Errorf("%d tombstones, allowed are %d", got, s.options.MaxTombstones)
	}
	if oldest, ok := s.tombstones.oldest(); ok {
		if oldest.revision <= s.floor {
			t.Errorf("a tombstone of revision %d is below the floor %d", oldest.revision, s.floor)
		}
		if slowest, ok := s.cursors.slowest(); ok && !s.options.Resumable && oldest.revision <= slowest.held.revision {
			t.Errorf("a tombstone of revision %d is left although every cursor is at %d", oldest.revision, slowest.held.revision)
		}
	}
	if slowest, ok := s.cursors.slowest(); ok && slowest.held.revision < s.floor {
		t.Errorf("a cursor is at %d, below the floor %d", slowest.held.revision, s.floor)
	}
	live, indexed := 0, 0
	s.byRevision.Ascend(func(e *entry[K, V]) bool {
		var ok bool
		var same *entry[K, V]
		if e.deleted {
			same, ok = s.tombstones.byKey.Get(e)
		} else {
			same, ok = s.byKey.Get(e)
			live++
			if e.scope != 0 {
				indexed++
				if owned, ok := s.scopes.entries[e.scope].Get(e); !ok || owned != e {
					t.Errorf("%v is not indexed for scope %d", e.key, e.scope)
				}
			}
		}
		if !ok || same != e {
			t.Errorf("the change of %v at %d is not the one by key", e.key, e.revision)
		}
		return true
	})
	if live != s.byKey.Len() {
		t.Errorf("%d entries by revision, %d by key", live, s.byKey.Len())
	}
	for scope, owned := range s.scopes.entries {
		indexed -= owned.Len()
		if owned.Len() == 0 {
			t.Errorf("scope %d owns nothing but is indexed", scope)
		}
	}
	if indexed != 0 {
		t.Errorf("the scopes' entries are %d off", indexed)
	}
}

// fuzzState runs a store and, beside it, a model of plain maps.
type fuzzState struct {
	t       *testing.T
	input   []byte
	clock   *clocktesting.FakePassiveClock
	store   *Store[byte, byte]
	values  map[byte]byte
	owners  map[byte]Scope
	history map[Revision]map[byte]byte // the values after each commit
	readers [3]fuzzReader
}

// fuzzReader has what its cursor told it.
type fuzzReader struct {
	cursor *Cursor[byte, byte]
	mirror map[byte]byte
}

func (f *fuzzState) next(n byte) byte {
	if len(f.input) == 0 {
		return 0
	}
	b := f.input[0]
	f.input = f.input[1:]
	return b % n
}

func (f *fuzzState) key() byte    { return f.next(12) }
func (f *fuzzState) value() byte  { return f.next(3) }
func (f *fuzzState) scope() Scope { return Scope(f.next(3)) }

// writer is what Store and Tx have in common.
type writer interface {
	Set(Scope, byte, byte) bool
	Delete(Scope, byte) bool
	Replace(Scope, iter.Seq2[byte, byte]) int
}

func (f *fuzzState) write(w writer) {
	switch f.next(4) {
	case 0, 1:
		scope, key, value := f.scope(), f.key(), f.value()
		old, ok := f.values[key]
		want := !ok || old != value
		f.values[key], f.owners[key] = value, scope
		if got := w.Set(scope, key, value); got != want {
			f.t.Fatalf("Set(%d, %d, %d) = %v, want %v", scope, key, value, got, want)
		}
	case 2:
		scope, key := f.scope(), f.key()
		owner, ok := f.owners[key]
		want := ok && owner == scope
		if want {
			delete(f.values, key)
			delete(f.owners, key)
		}
		if got := w.Delete(scope, key); got != want {
			f.t.Fatalf("Delete(%d, %d) = %v, want %v", scope, key, got, want)
		}
	case 3:
		scope, listed := f.scope(), make([][2]byte, f.next(16))
		for i := range listed {
			listed[i] = [2]byte{f.key(), f.value()}
		}
		before := maps.Clone(f.values)
		for key, owner := range f.owners {
			if owner == scope {
				delete(f.values, key)
				delete(f.owners, key)
			}
		}
		for _, kv := range listed {
			f.values[kv[0]], f.owners[kv[0]] = kv[1], scope
		}
		want := len(difference(before, f.values))
		got := w.Replace(scope, func(yield func(byte, byte) bool) {
			for _, kv := range listed {
				if !yield(kv[0], kv[1]) {
					return
				}
			}
		})
		if got != want {
			f.t.Fatalf("Replace(%d, %v) = %d, want %d", scope, listed, got, want)
		}
	}
}

// difference returns the keys whose values differ.
func difference(a, b map[byte]byte) map[byte]bool {
	out := map[byte]bool{}
	for _, pair := range [][2]map[byte]byte{{a, b}, {b, a}} {
		for key, value := range pair[0] {
			if other, ok := pair[1][key]; !ok || other != value {
				out[key] = true
			}
		}
	}
	return out
}

func apply(mirror map[byte]byte, changes iter.Seq[Change[byte, byte]]) {
	for c := range changes {
		if c.Deleted {
			delete(mirror, c.Key)
		} else {
			mirror[c.Key] = c.Value
		}
	}
}

func (f *fuzzState) step() {
	switch f.next(8) {
	case 0, 1, 2:
		f.write(f.store)
	case 3:
		f.store.Commit(func(tx *Tx[byte, byte]) {
			for range f.next(6) {
				f.write(tx)
			}
		})
	case 4, 5:
		f.read(&f.readers[f.next(byte(len(f.readers)))])
	case 6:
		r := &f.readers[f.next(byte(len(f.readers)))]
		r.cursor.Close()
		*r = fuzzReader{cursor: f.store.NewCursor(), mirror: map[byte]byte{}}
	case 7:
		f.clock.SetTime(f.clock.Now().Add(time.Duration(f.next(20)) * time.Second))
	}
}

// read lets a reader apply its delta, after or without further writes, and acknowledge it or not.
func (f *fuzzState) read(r *fuzzReader) {
	delta := r.cursor.Until(f.store.Snapshot())
	for range f.next(4) {
		f.write(f.store)
	}
	if f.next(4) == 0 {
		return // as a sink that failed: nothing is acknowledged
	}
	if delta.Full() {
		clear(r.mirror)
	} else if got := maps.Collect(delta.Old.All()); !maps.Equal(got, r.mirror) {
		f.t.Fatalf("the old snapshot has %v, the reader acknowledged %v", got, r.mirror)
	}
	apply(r.mirror, delta.Changes())
	if got := maps.Collect(delta.New.All()); !maps.Equal(r.mirror, got) {
		f.t.Fatalf("the reader has %v, the snapshot %v", r.mirror, got)
	}
	r.cursor.Advance(delta.New)
}

func (f *fuzzState) check() {
	snapshot := f.store.Snapshot()
	if got := maps.Collect(snapshot.All()); !maps.Equal(got, f.values) || snapshot.Len() != len(f.values) {
		f.t.Fatalf("the snapshot has %v, the model %v", got, f.values)
	}
	f.history[snapshot.Revision()] = maps.Clone(f.values)
	for revision, then := range f.history {
		changes, ok := snapshot.Since(revision)
		if !ok {
			if revision >= f.store.floor {
				f.t.Fatalf("revision %d is too old although only deletions up to %d are forgotten", revision, f.store.floor)
			}
			continue
		}
		list := slices.Collect(changes)
		keys := map[byte]bool{}
		for i, c := range list {
			if keys[c.Key] {
				f.t.Fatalf("key %d comes twice since %d", c.Key, revision)
			}
			keys[c.Key] = true
			if c.Revision <= revision || i > 0 && c.Revision <= list[i-1].Revision {
				f.t.Fatalf("revision %d is out of order since %d", c.Revision, revision)
			}
		}
		now := maps.Clone(then)
		apply(now, slices.Values(list))
		if !maps.Equal(now, f.values) {
			f.t.Fatalf("changes since %d lead to %v, want %v", revision, now, f.values)
		}
	}
	checkInvariants(f.t, f.store)
}

func FuzzStore(f *testing.F) {
	f.Add(false, []byte("a store that follows what it is told"))
	f.Add(true, []byte{3, 5, 3, 0, 9, 1, 1, 2, 2, 3, 0, 4, 1, 3, 0, 2, 4, 0, 2, 2, 0, 1, 1, 3, 1, 0, 7, 19, 5, 1, 1, 2, 0, 3})
	f.Add(false, slices.Repeat([]byte{0, 0, 1, 7, 1, 4, 0, 0, 1, 0, 2, 1, 7, 4, 1, 0, 1}, 8))
	f.Fuzz(func(t *testing.T, resumable bool, input []byte) {
		clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
		state := fuzzState{
			t:     t,
			input: input[:min(len(input), 400)],
			clock: clock,
			store: New(Options[byte, byte]{
				Compare:         cmp.Compare[byte],
				Equal:           func(a, b byte) bool { return a == b },
				MaxTombstones:   4,
				MaxTombstoneAge: 30 * time.Second,
				MaxLag:          8,
				Resumable:       resumable,
				Clock:           clock,
			}),
			values:  map[byte]byte{},
			owners:  map[byte]Scope{},
			history: map[Revision]map[byte]byte{},
		}
		for i := range state.readers {
			state.readers[i] = fuzzReader{cursor: state.store.NewCursor(), mirror: map[byte]byte{}}
		}
		state.check()
		for len(state.input) > 0 {
			state.step()
			state.check()
		}
	})
}
