// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newStrings(change ...func(*Store[string, int])) *Store[string, int] {
	s := New(Options[string, int]{Compare: strings.Compare, Equal: func(a, b int) bool { return a == b }})
	for _, f := range change {
		f(s)
	}
	return s
}

func resumable(yes bool) func(*Store[string, int]) {
	return func(s *Store[string, int]) { s.options.Resumable = yes }
}

// limited returns an option that sets the nonzero limits of l.
func limited(l limits) func(*Store[string, int]) {
	return func(s *Store[string, int]) {
		s.limits = limits{
			tombstones:   cmp.Or(l.tombstones, s.limits.tombstones),
			tombstoneAge: cmp.Or(l.tombstoneAge, s.limits.tombstoneAge),
			lag:          cmp.Or(l.lag, s.limits.lag),
		}
	}
}

// render returns a snapshot's entries in the form "key=value@revision".
func render(s *Snapshot[string, int]) string {
	var out []string
	s.byKey.Ascend(func(e *entry[string, int]) bool {
		out = append(out, fmt.Sprintf("%s=%d@%d", e.key, e.value, e.revision))
		return true
	})
	return strings.Join(out, " ")
}

// renderSince returns the changes after a revision in the form "key=value" or "-key".
func renderSince(s *Snapshot[string, int], revision Revision) string {
	changes, ok := s.Since(revision)
	if !ok {
		return "start over"
	}
	var out []string
	for key, value := range changes {
		if _, ok := s.Get(key); ok {
			out = append(out, fmt.Sprintf("%s=%d", key, value))
		} else {
			out = append(out, "-"+key)
		}
	}
	return strings.Join(out, " ")
}

// listing returns the entries of a text such as "b=1 a=2", in the order of the text.
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
		since   string // the changes since the first revision
	}{
		{
			name:    "a new key is recorded",
			write:   func(s *store) any { return s.Set("a", 1) },
			result:  true,
			entries: "a=1@2",
			since:   "a=1",
		},
		{
			name:    "an equal value is not recorded",
			write:   func(s *store) any { s.Set("a", 1); return s.Set("a", 1) },
			result:  false,
			entries: "a=1@2",
			since:   "a=1",
		},
		{
			name:    "a key that changes twice is one change with the last revision",
			write:   func(s *store) any { s.Set("a", 1); s.Set("b", 1); return s.Set("a", 2) },
			result:  true,
			entries: "a=2@4 b=1@3",
			since:   "b=1 a=2",
		},
		{
			name:    "a deletion leaves a tombstone",
			write:   func(s *store) any { s.Set("a", 1); return s.Delete("a") },
			result:  true,
			entries: "",
			since:   "-a",
		},
		{
			name:    "deleting an absent key is not a change",
			write:   func(s *store) any { return s.Delete("a") },
			result:  false,
			entries: "",
			since:   "",
		},
		{
			name:    "a key set again replaces its tombstone",
			write:   func(s *store) any { s.Set("a", 1); s.Delete("a"); return s.Set("a", 1) },
			result:  true,
			entries: "a=1@4",
			since:   "a=1",
		},
		{
			name: "a key deleted twice leaves one tombstone",
			write: func(s *store) any {
				s.Set("a", 1)
				s.Delete("a")
				s.Set("a", 1)
				return s.Delete("a")
			},
			result:  true,
			entries: "",
			since:   "-a",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings(resumable(true))
			mustEqual(t, "result", tc.write(s), tc.result)
			mustEqual(t, "entries", render(s.Snapshot()), tc.entries)
			mustEqual(t, "since the first revision", renderSince(s.Snapshot(), firstRevision), tc.since)
			checkInvariants(t, s)
		})
	}
}

func TestReplace(t *testing.T) {
	for _, tc := range []struct {
		name     string
		before   string
		listing  string
		recorded int
		entries  string
		changes  string
	}{
		{
			name:     "an unsorted listing fills an empty store",
			listing:  "c=3 a=1 b=2",
			recorded: 3,
			entries:  "a=1 b=2 c=3",
			changes:  "a=1 b=2 c=3",
		},
		{
			name:    "an equal listing records nothing",
			before:  "a=1 b=2",
			listing: "b=2 a=1",
			entries: "a=1 b=2",
		},
		{
			name:     "only differences are recorded, deletions first",
			before:   "a=1 b=2 c=3",
			listing:  "a=1 b=5 d=4",
			recorded: 3,
			entries:  "a=1 b=5 d=4",
			changes:  "-c b=5 d=4",
		},
		{
			name:     "an empty listing deletes everything",
			before:   "a=1 b=1",
			recorded: 2,
			changes:  "-a -b",
		},
		{
			name:     "the last duplicate counts and is recorded once",
			before:   "a=1",
			listing:  "a=2 b=1 a=3 b=2",
			recorded: 2,
			entries:  "a=3 b=2",
			changes:  "a=3 b=2",
		},
		{
			name:    "duplicates that end with the current value record nothing",
			before:  "a=1",
			listing: "a=2 a=1",
			entries: "a=1",
		},
		{
			name:     "duplicates that begin with the current value record the last",
			before:   "a=1",
			listing:  "a=1 a=2",
			recorded: 1,
			entries:  "a=2",
			changes:  "a=2",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings(resumable(true))
			s.Replace(listing(tc.before))
			before := s.Snapshot().Revision()
			mustEqual(t, "recorded", s.Replace(listing(tc.listing)), tc.recorded)
			var entries []string
			for key, value := range s.Snapshot().All() {
				entries = append(entries, fmt.Sprintf("%s=%d", key, value))
			}
			mustEqual(t, "entries", strings.Join(entries, " "), tc.entries)
			mustEqual(t, "changes", renderSince(s.Snapshot(), before), tc.changes)
			checkInvariants(t, s)
		})
	}
}

func TestEqualValueKeepsOldValue(t *testing.T) {
	type value struct{ Compared, Ignored int }
	s := New(Options[string, value]{
		Compare: strings.Compare,
		Equal:   func(a, b value) bool { return a.Compared == b.Compared },
	})
	s.Set("a", value{1, 1})
	s.Set("a", value{1, 2})
	got, _ := s.Get("a")
	mustEqual(t, "value", got, value{1, 1})
}

func TestStoresShareRevisions(t *testing.T) {
	options := Options[string, int]{Compare: strings.Compare, Equal: func(a, b int) bool { return a == b }, Revisions: new(Revisions)}
	a, b := New(options), New(options)
	mustEqual(t, "last without changes", options.Revisions.Last(), 1)
	a.Set("x", 1)
	b.Set("x", 1)
	b.Set("y", 1)
	a.Set("y", 1)
	mustEqual(t, "a", render(a.Snapshot()), "x=1@2 y=1@5")
	mustEqual(t, "b", render(b.Snapshot()), "x=1@3 y=1@4")
	mustEqual(t, "revision of b", b.Snapshot().Revision(), 4)
	mustEqual(t, "last", options.Revisions.Last(), 5)
	mustEqual(t, "b since a revision of a", renderSince(b.Snapshot(), 3), "y=1")
}

func TestReplaceIsAtomic(t *testing.T) {
	s := newStrings()
	before := s.Snapshot()
	s.Replace(func(yield func(string, int) bool) {
		yield("a", 1)
		if s.cached.Load() != before {
			t.Error("the earlier snapshot was dropped during the commit")
		}
		yield("b", 1)
	})
	mustEqual(t, "after", render(s.Snapshot()), "a=1@2 b=1@3")
}

func TestPanickingListingRecordsNothing(t *testing.T) {
	s := newStrings()
	s.Set("a", 1)
	func() {
		defer func() { _ = recover() }()
		s.Replace(func(yield func(string, int) bool) {
			yield("b", 1)
			panic("no")
		})
	}()
	mustEqual(t, "after", render(s.Snapshot()), "a=1@2")
}

func TestNewPanicsWithoutRequiredOptions(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	New(Options[string, int]{Compare: strings.Compare})
}
