// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

func newStrings(change ...func(*Options[string, int])) *Store[string, int] {
	options := Options[string, int]{Compare: strings.Compare, Equal: func(a, b int) bool { return a == b }}
	for _, f := range change {
		f(&options)
	}
	return New(options)
}

// render prints a snapshot's entries as "key=value@revision".
func render(s *Snapshot[string, int]) string {
	var out []string
	for key, value := range s.All() {
		_, revision, _ := s.Lookup(key)
		out = append(out, fmt.Sprintf("%s=%d@%d", key, value, revision))
	}
	return strings.Join(out, " ")
}

// renderSince prints the changes after a revision as "key=value@revision" or "-key@revision".
func renderSince(s *Snapshot[string, int], revision Revision) string {
	changes, ok := s.Since(revision)
	if !ok {
		return "start over"
	}
	var out []string
	for c := range changes {
		out = append(out, renderChange(c))
	}
	return strings.Join(out, " ")
}

func renderChange(c Change[string, int]) string {
	if c.Deleted {
		return fmt.Sprintf("-%s@%d", c.Key, c.Revision)
	}
	return fmt.Sprintf("%s=%d@%d", c.Key, c.Value, c.Revision)
}

// listing is a full listing in the given order, such as "b=1 a=2".
func listing(text string) func(yield func(string, int) bool) {
	return func(yield func(string, int) bool) {
		for field := range strings.FieldsSeq(text) {
			var value int
			key, number, _ := strings.Cut(field, "=")
			fmt.Sscan(number, &value)
			if !yield(key, value) {
				return
			}
		}
	}
}

func mustEqual[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestWrites(t *testing.T) {
	type store = Store[string, int]
	for _, tc := range []struct {
		name    string
		write   func(*store) any
		result  any
		entries string
		since   string // since revision 0
	}{
		{
			name:    "a new key is recorded",
			write:   func(s *store) any { return s.Set(0, "a", 1) },
			result:  true,
			entries: "a=1@1",
			since:   "a=1@1",
		},
		{
			name:    "an equal value is not recorded",
			write:   func(s *store) any { s.Set(0, "a", 1); return s.Set(0, "a", 1) },
			result:  false,
			entries: "a=1@1",
			since:   "a=1@1",
		},
		{
			name:    "a key that changes twice is one change with the last revision",
			write:   func(s *store) any { s.Set(0, "a", 1); s.Set(0, "b", 1); return s.Set(0, "a", 2) },
			result:  true,
			entries: "a=2@3 b=1@2",
			since:   "b=1@2 a=2@3",
		},
		{
			name:    "a deletion leaves a tombstone",
			write:   func(s *store) any { s.Set(0, "a", 1); return s.Delete(0, "a") },
			result:  true,
			entries: "",
			since:   "-a@2",
		},
		{
			name:    "deleting an absent key is no change",
			write:   func(s *store) any { return s.Delete(0, "a") },
			result:  false,
			entries: "",
			since:   "",
		},
		{
			name:    "a key set again takes the place of its tombstone",
			write:   func(s *store) any { s.Set(0, "a", 1); s.Delete(0, "a"); return s.Set(0, "a", 1) },
			result:  true,
			entries: "a=1@3",
			since:   "a=1@3",
		},
		{
			name: "a key deleted twice leaves one tombstone",
			write: func(s *store) any {
				s.Set(0, "a", 1)
				s.Delete(0, "a")
				s.Set(0, "a", 1)
				return s.Delete(0, "a")
			},
			result:  true,
			entries: "",
			since:   "-a@4",
		},
		{
			name:    "a deletion by a scope that did not write last is ignored",
			write:   func(s *store) any { s.Set(1, "a", 1); s.Set(2, "a", 2); return s.Delete(1, "a") },
			result:  false,
			entries: "a=2@2",
			since:   "a=2@2",
		},
		{
			name:    "setting an equal value makes the scope the owner, so the old owner cannot delete",
			write:   func(s *store) any { s.Set(1, "a", 1); s.Set(0, "a", 1); return s.Delete(1, "a") },
			result:  false,
			entries: "a=1@1",
			since:   "a=1@1",
		},
		{
			name:    "setting an equal value makes the scope the owner, so it can delete",
			write:   func(s *store) any { s.Set(0, "a", 1); s.Set(1, "a", 1); return s.Delete(1, "a") },
			result:  true,
			entries: "",
			since:   "-a@2",
		},
		{
			name: "a commit sees what it wrote",
			write: func(s *store) any {
				var got []any
				s.Commit(func(tx *Tx[string, int]) {
					tx.Set(0, "a", 1)
					tx.Set(0, "b", 1)
					tx.Delete(0, "b")
					a, ok := tx.Get("a")
					_, okB := tx.Get("b")
					got = append(got, a, ok, okB, tx.Replace(0, listing("c=1")))
				})
				return got
			},
			result:  []any{1, true, false, 2},
			entries: "c=1@5",
			since:   "-b@3 -a@4 c=1@5",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings()
			mustEqual(t, "result", tc.write(s), tc.result)
			mustEqual(t, "entries", render(s.Snapshot()), tc.entries)
			mustEqual(t, "since 0", renderSince(s.Snapshot(), 0), tc.since)
			checkInvariants(t, s)
		})
	}
}

func TestReplace(t *testing.T) {
	for _, tc := range []struct {
		name     string
		before   map[Scope]string
		scope    Scope
		listing  string
		recorded int
		entries  map[string]Scope // with their owner
		changes  string           // without revisions
	}{
		{
			name:     "an unsorted listing fills an empty store",
			listing:  "c=3 a=1 b=2",
			recorded: 3,
			entries:  map[string]Scope{"a=1": 0, "b=2": 0, "c=3": 0},
			changes:  "a=1 b=2 c=3",
		},
		{
			name:    "an equal listing records nothing",
			before:  map[Scope]string{0: "a=1 b=2"},
			listing: "b=2 a=1",
			entries: map[string]Scope{"a=1": 0, "b=2": 0},
		},
		{
			name:     "only differences are recorded, deletions first",
			before:   map[Scope]string{0: "a=1 b=2 c=3"},
			listing:  "a=1 b=5 d=4",
			recorded: 3,
			entries:  map[string]Scope{"a=1": 0, "b=5": 0, "d=4": 0},
			changes:  "-c b=5 d=4",
		},
		{
			name:     "an empty listing deletes what the scope wrote, and nothing else",
			before:   map[Scope]string{0: "a=1", 1: "b=1", 2: "c=1"},
			scope:    1,
			recorded: 1,
			entries:  map[string]Scope{"a=1": 0, "c=1": 2},
			changes:  "-b",
		},
		{
			name:     "an empty listing of scope 0 leaves other scopes alone",
			before:   map[Scope]string{0: "a=1", 1: "b=1"},
			recorded: 1,
			entries:  map[string]Scope{"b=1": 1},
			changes:  "-a",
		},
		{
			name:     "of duplicates the last counts, and is recorded once",
			before:   map[Scope]string{0: "a=1"},
			listing:  "a=2 b=1 a=3 b=2",
			recorded: 2,
			entries:  map[string]Scope{"a=3": 0, "b=2": 0},
			changes:  "a=3 b=2",
		},
		{
			name:    "duplicates that end in the value of before record nothing",
			before:  map[Scope]string{0: "a=1"},
			listing: "a=2 a=1",
			entries: map[string]Scope{"a=1": 0},
		},
		{
			name:     "duplicates that begin with the value of before record the last",
			before:   map[Scope]string{0: "a=1"},
			listing:  "a=1 a=2",
			recorded: 1,
			entries:  map[string]Scope{"a=2": 0},
			changes:  "a=2",
		},
		{
			name:     "listed entries of other scopes are taken over, recorded only if they differ",
			before:   map[Scope]string{0: "a=1 b=1", 1: "c=1"},
			scope:    2,
			listing:  "a=1 b=2 c=1",
			recorded: 1,
			entries:  map[string]Scope{"a=1": 2, "b=2": 2, "c=1": 2},
			changes:  "b=2",
		},
		{
			name:    "scope 0 takes over from an indexed scope",
			before:  map[Scope]string{1: "a=1 b=1"},
			listing: "a=1",
			entries: map[string]Scope{"a=1": 0, "b=1": 1},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings()
			for _, scope := range slices.Sorted(maps.Keys(tc.before)) {
				s.Replace(scope, listing(tc.before[scope]))
			}
			before := s.Revision()

			mustEqual(t, "recorded", s.Replace(tc.scope, listing(tc.listing)), tc.recorded)

			got := map[string]Scope{}
			s.byKey.Ascend(func(e *entry[string, int]) bool {
				got[fmt.Sprintf("%s=%d", e.key, e.value)] = e.scope
				return true
			})
			mustEqual(t, "entries", got, tc.entries)
			var changes []string
			since, _ := s.Snapshot().Since(before)
			for c := range since {
				text, _, _ := strings.Cut(renderChange(c), "@")
				changes = append(changes, text)
			}
			mustEqual(t, "changes", strings.Join(changes, " "), tc.changes)
			checkInvariants(t, s)
		})
	}
}

func TestReplaceOfASmallScopeLooksAtLittle(t *testing.T) {
	compared := 0
	s := New(Options[int, int]{
		Compare: func(a, b int) int { compared++; return cmp.Compare(a, b) },
		Equal:   func(a, b int) bool { return a == b },
	})
	for i := range 100_000 {
		s.Set(0, i, 0)
	}
	s.Set(1, -1, 0)
	compared = 0
	mustEqual(t, "recorded", s.Replace(1, maps.All(map[int]int{-2: 0})), 2)
	if compared > 300 {
		t.Errorf("replacing one entry among 100,000 compared %d keys", compared)
	}
}

func TestEqualValueKeepsTheOldOne(t *testing.T) {
	type value struct{ Compared, Ignored int }
	s := New(Options[string, value]{
		Compare: strings.Compare,
		Equal:   func(a, b value) bool { return a.Compared == b.Compared },
	})
	s.Set(0, "a", value{1, 1})
	s.Set(0, "a", value{1, 2})
	got, _ := s.Get("a")
	mustEqual(t, "value", got, value{1, 1})
}

func TestStoresShareRevisions(t *testing.T) {
	revisions := new(Revisions)
	share := func(o *Options[string, int]) { o.Revisions = revisions }
	a, b := newStrings(share), newStrings(share)
	a.Set(0, "x", 1)
	b.Set(0, "x", 1)
	b.Set(0, "y", 1)
	a.Set(0, "y", 1)
	mustEqual(t, "a", render(a.Snapshot()), "x=1@1 y=1@4")
	mustEqual(t, "b", render(b.Snapshot()), "x=1@2 y=1@3")
	mustEqual(t, "revision of b", b.Revision(), 3)
	mustEqual(t, "last", revisions.Last(), 4)
	mustEqual(t, "b since a revision of a", renderSince(b.Snapshot(), 2), "y=1@3")
}

func TestCommitIsSeenAtOnce(t *testing.T) {
	s := newStrings()
	before := s.Snapshot()
	s.Commit(func(tx *Tx[string, int]) {
		tx.Set(0, "a", 1)
		if s.Snapshot() != before {
			t.Error("the snapshot taken before is gone although the commit goes on")
		}
		tx.Set(0, "b", 1)
	})
	mustEqual(t, "after", render(s.Snapshot()), "a=1@1 b=1@2")
}

func TestCommitThatPanicsKeepsWhatItWrote(t *testing.T) {
	s := newStrings()
	func() {
		defer func() { _ = recover() }()
		s.Commit(func(tx *Tx[string, int]) {
			tx.Set(0, "a", 1)
			panic("no")
		})
	}()
	s.Set(0, "b", 1)
	mustEqual(t, "after", render(s.Snapshot()), "a=1@1 b=1@2")
}

func TestListingThatPanicsRecordsNothing(t *testing.T) {
	s := newStrings()
	s.Set(0, "a", 1)
	func() {
		defer func() { _ = recover() }()
		s.Replace(0, func(yield func(string, int) bool) {
			yield("b", 1)
			panic("no")
		})
	}()
	mustEqual(t, "after", render(s.Snapshot()), "a=1@1")
}

func TestNewPanicsWithoutWhatIsRequired(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	New(Options[string, int]{Compare: strings.Compare})
}

func TestOnChangeIsToldWhatIsRecordedAndNothingElse(t *testing.T) {
	var told []string
	s := newStrings(func(o *Options[string, int]) {
		o.OnChange = func(key string, old, new int) { told = append(told, fmt.Sprintf("%s %d>%d", key, old, new)) }
	})
	s.Set(0, "a", 1)
	s.Set(0, "a", 1)
	s.Set(0, "a", 2)
	s.Delete(1, "a")
	s.Replace(0, listing("b=3 c=4 b=5"))
	s.Delete(0, "c")
	s.Set(0, "c", 6)
	want := []string{"a 0>1", "a 1>2", "a 2>0", "b 0>5", "c 0>4", "c 4>0", "c 0>6"}
	if diff := gocmp.Diff(want, told); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
