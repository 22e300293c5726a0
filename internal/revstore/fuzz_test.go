// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// checkInvariants compares the parts of the store with each other.
func checkInvariants[K, V any](t *testing.T, s *Store[K, V]) {
	t.Helper()
	if got, want := len(s.log.entries)-s.log.outdated, s.byKey.Len()+s.tombstones.byKey.Len(); got != want {
		t.Errorf("%d changes in the log for %d entries and tombstones", got, want)
	}
	if s.log.outdated > s.log.tolerated() {
		t.Errorf("%d of %d changes in the log are outdated", s.log.outdated, len(s.log.entries))
	}
	if got, want := s.tombstones.byRevision.Len(), s.tombstones.byKey.Len(); got != want {
		t.Errorf("%d tombstones by age, %d by key", got, want)
	}
	if got := s.tombstones.byKey.Len(); got > s.limits.tombstones {
		t.Errorf("%d tombstones, want at most %d", got, s.limits.tombstones)
	}
	if oldest, ok := s.tombstones.byRevision.Min(); ok {
		if oldest.revision <= s.floor {
			t.Errorf("a tombstone of revision %d is below the floor %d", oldest.revision, s.floor)
		}
		if slowest, ok := s.cursors.slowest(); !s.options.Resumable && (!ok || oldest.revision <= slowest.revision) {
			t.Errorf("a tombstone of revision %d remains although every cursor has passed it", oldest.revision)
		}
	}
	if slowest, ok := s.cursors.slowest(); ok && slowest.revision < s.floor {
		t.Errorf("a cursor is at %d, below the floor %d", slowest.revision, s.floor)
	}
	live, outdated := 0, 0
	var last Revision
	for _, e := range s.log.entries {
		if e.revision <= last {
			t.Errorf("revision %d is after %d in the log", e.revision, last)
		}
		last = e.revision
		if e.outdated.Load() != 0 {
			outdated++
			continue
		}
		var ok bool
		var same *entry[K, V]
		if e.deleted {
			same, ok = s.tombstones.byKey.Get(e)
		} else {
			same, ok = s.byKey.Get(e)
			live++
		}
		if !ok || same != e {
			t.Errorf("the change of %v at %d differs from the one by key", e.key, e.revision)
		}
	}
	if live != s.byKey.Len() || outdated != s.log.outdated {
		t.Errorf("the log has %d entries and %d outdated ones, want %d and %d", live, outdated, s.byKey.Len(), s.log.outdated)
	}
}

// fuzzState is a store together with its model, which consists of plain maps.
type fuzzState struct {
	t       *testing.T
	input   []byte
	store   *Store[byte, byte]
	values  map[byte]byte
	history map[Revision]map[byte]byte // values after each commit
	readers [3]fuzzReader
}

// fuzzReader is a reader with a cursor and the state that it has read.
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

func (f *fuzzState) key() byte   { return f.next(12) }
func (f *fuzzState) value() byte { return f.next(3) }

func (f *fuzzState) write() {
	switch f.next(4) {
	case 0, 1:
		key, value := f.key(), f.value()
		old, ok := f.values[key]
		want := !ok || old != value
		f.values[key] = value
		if got := f.store.Set(key, value); got != want {
			f.t.Fatalf("Set(%d, %d) = %v, want %v", key, value, got, want)
		}
	case 2:
		key := f.key()
		_, want := f.values[key]
		delete(f.values, key)
		if got := f.store.Delete(key); got != want {
			f.t.Fatalf("Delete(%d) = %v, want %v", key, got, want)
		}
	case 3:
		listed := make([][2]byte, f.next(16))
		for i := range listed {
			listed[i] = [2]byte{f.key(), f.value()}
		}
		before := f.values
		f.values = map[byte]byte{}
		for _, kv := range listed {
			f.values[kv[0]] = kv[1]
		}
		want := len(difference(before, f.values))
		got := f.store.Replace(func(yield func(byte, byte) bool) {
			for _, kv := range listed {
				if !yield(kv[0], kv[1]) {
					return
				}
			}
		})
		if got != want {
			f.t.Fatalf("Replace(%v) = %d, want %d", listed, got, want)
		}
	}
}

// difference returns the sorted keys whose values differ.
func difference(a, b map[byte]byte) []byte {
	out := map[byte]bool{}
	for _, pair := range [][2]map[byte]byte{{a, b}, {b, a}} {
		for key, value := range pair[0] {
			if other, ok := pair[1][key]; !ok || other != value {
				out[key] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(out))
}

func (f *fuzzState) step() {
	switch f.next(8) {
	case 0, 1, 2, 3:
		f.write()
	case 4, 5:
		f.read(&f.readers[f.next(byte(len(f.readers)))])
	case 6:
		r := &f.readers[f.next(byte(len(f.readers)))]
		r.cursor.Close()
		*r = fuzzReader{cursor: f.store.NewCursor(), mirror: map[byte]byte{}}
	case 7:
		time.Sleep(time.Duration(f.next(20)) * time.Second)
	}
}

// read makes a reader take a delta. Before the reader applies and acknowledges
// the delta, up to three further writes follow.
func (f *fuzzState) read(r *fuzzReader) {
	delta := r.cursor.Until(f.store.Snapshot())
	for range f.next(4) {
		f.write()
	}
	if f.next(4) == 0 {
		return // the reader fails and does not acknowledge the delta
	}
	old, new := map[byte]byte{}, maps.Collect(delta.New.All())
	if !delta.Full() {
		old = maps.Collect(delta.Old.All())
		if !maps.Equal(old, r.mirror) {
			f.t.Fatalf("the old snapshot has %v, the reader acknowledged %v", old, r.mirror)
		}
	}
	f.compare("Changes", delta.Changes(), difference(old, new), old, new)
	both := maps.Clone(old)
	maps.Copy(both, new)
	f.compare("All", delta.All(), slices.Sorted(maps.Keys(both)), old, new)
	r.mirror = new
	r.cursor.Advance(delta.New)
}

// compare checks that there is exactly one change for each key, in order, with the right
// old and new value.
func (f *fuzzState) compare(what string, changes iter.Seq[Change[byte, byte]], keys []byte, old, new map[byte]byte) {
	var want []Change[byte, byte]
	for _, key := range keys {
		want = append(want, Change[byte, byte]{key, old[key], new[key]})
	}
	if got := slices.Collect(changes); !slices.Equal(got, want) {
		f.t.Fatalf("%s are %v, want %v", what, got, want)
	}
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
				f.t.Fatalf("revision %d is too old although only deletions up to %d were dropped", revision, f.store.floor)
			}
			continue
		}
		now, keys := maps.Clone(then), map[byte]bool{}
		for key, value := range changes {
			if keys[key] {
				f.t.Fatalf("key %d occurs twice since %d", key, revision)
			}
			keys[key] = true
			if _, ok := snapshot.Get(key); ok {
				now[key] = value
			} else {
				delete(now, key)
			}
		}
		if !maps.Equal(now, f.values) {
			f.t.Fatalf("changes since %d lead to %v, want %v", revision, now, f.values)
		}
	}
	checkInvariants(f.t, f.store)
}

func FuzzStore(f *testing.F) {
	f.Add(false, []byte("a store that follows its input"))
	f.Add(true, []byte{3, 5, 3, 0, 9, 1, 1, 2, 2, 3, 0, 4, 1, 3, 0, 2, 4, 0, 2, 2, 0, 1, 1, 3, 1, 0, 7, 19, 5, 1, 1, 2, 0, 3})
	f.Add(false, slices.Repeat([]byte{0, 0, 1, 7, 1, 4, 0, 0, 1, 0, 2, 1, 7, 4, 1, 0, 1}, 8))
	f.Fuzz(func(t *testing.T, resumable bool, input []byte) {
		synctest.Test(t, func(t *testing.T) {
			state := fuzzState{
				t:     t,
				input: input[:min(len(input), 400)],
				store: New(Options[byte, byte]{
					Compare:   cmp.Compare[byte],
					Equal:     func(a, b byte) bool { return a == b },
					Resumable: resumable,
				}),
				values:  map[byte]byte{},
				history: map[Revision]map[byte]byte{},
			}
			state.store.limits = limits{tombstones: 4, tombstoneAge: 30 * time.Second, lag: 8}
			for i := range state.readers {
				state.readers[i] = fuzzReader{cursor: state.store.NewCursor(), mirror: map[byte]byte{}}
			}
			state.check()
			for len(state.input) > 0 {
				state.step()
				state.check()
			}
		})
	})
}
