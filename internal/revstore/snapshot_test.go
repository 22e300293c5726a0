// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestSnapshotIsTakenOnceARevision(t *testing.T) {
	s := newStrings()
	s.Set("a", 1)
	first := s.Snapshot()
	s.Set("a", 1)
	s.Delete("b")
	s.Replace(listing("a=1"))
	if s.Snapshot() != first {
		t.Error("a new snapshot although no change was recorded")
	}
	s.Set("a", 2)
	if s.Snapshot() == first {
		t.Error("no new snapshot after a change")
	}
}

func TestSnapshotNeverChanges(t *testing.T) {
	s := newStrings(resumable(true))
	for i := range 1000 {
		s.Set(fmt.Sprintf("%04d", i), i)
	}
	s.Delete("0001")
	snapshot := s.Snapshot()
	entries, since := render(snapshot), renderSince(snapshot, 500)

	s.Replace(listing("0003=7 x=1 0001=1 0000=1"))

	mustEqual(t, "entries", render(snapshot), entries)
	mustEqual(t, "since 500", renderSince(snapshot, 500), since)
	mustEqual(t, "length", snapshot.Len(), 999)
}

func TestSnapshotReads(t *testing.T) {
	s := newStrings(resumable(true))
	s.Replace(listing("a=1 c=3 e=5"))
	s.Delete("c")
	snapshot := s.Snapshot()

	value, ok := snapshot.Get("e")
	mustEqual(t, "e", value, 5)
	mustEqual(t, "e is there", ok, true)
	_, ok = snapshot.Get("c")
	mustEqual(t, "deleted key is there", ok, false)
	mustEqual(t, "length", snapshot.Len(), 2)
	mustEqual(t, "revision", snapshot.Revision(), 5)

	for _, tc := range []struct{ name, after, want string }{
		{"after the zero key", "", "ae"},
		{"after an existing key", "a", "e"},
		{"after a key between others", "b", "e"},
		{"after a deleted key", "c", "e"},
		{"after the last", "e", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got strings.Builder
			for key := range snapshot.After(tc.after) {
				got.WriteString(key)
			}
			mustEqual(t, "keys", got.String(), tc.want)
		})
	}
	t.Run("loops can end early and run again", func(t *testing.T) {
		for range 2 {
			for key := range snapshot.All() {
				mustEqual(t, "first", key, "a")
				break
			}
			for key := range snapshot.After("a") {
				mustEqual(t, "first after a", key, "e")
				break
			}
			changes, _ := snapshot.Since(3)
			for key, value := range changes {
				mustEqual(t, "first change", fmt.Sprint(key, value), "e5")
				break
			}
		}
	})
}

func TestSince(t *testing.T) {
	s := newStrings(resumable(true))
	mustEqual(t, "nothing was written yet", renderSince(s.Snapshot(), 1), "")
	s.Replace(listing("a=1 b=1 c=1")) // revisions 2 to 4
	s.Set("b", 2)                     // revision 5
	s.Delete("a")                     // revision 6
	for revision, want := range []string{
		"start over", // a reader without a revision may have any state
		"c=1 b=2 -a",
		"c=1 b=2 -a",
		"c=1 b=2 -a",
		"b=2 -a",
		"-a",
		"",
		"", // a revision that this store has not reached
	} {
		t.Run(fmt.Sprintf("after revision %d", revision), func(t *testing.T) {
			mustEqual(t, "changes", renderSince(s.Snapshot(), Revision(revision)), want)
		})
	}
	t.Run("after the last possible revision", func(t *testing.T) {
		mustEqual(t, "changes", renderSince(s.Snapshot(), ^Revision(0)), "")
	})
}

func TestTombstoneLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStrings(resumable(true), limited(limits{tombstones: 2, tombstoneAge: time.Minute}))
		s.Replace(listing("a=1 b=1 c=1 d=1")) // revisions 2 to 5
		s.Delete("a")                         // revision 6
		time.Sleep(30 * time.Second)
		s.Delete("b") // revision 7
		mustEqual(t, "two deletions are known", renderSince(s.Snapshot(), 5), "-a -b")

		old := s.Snapshot()
		s.Delete("c") // revision 8
		mustEqual(t, "before the dropped deletion", renderSince(s.Snapshot(), 5), "start over")
		mustEqual(t, "at the dropped deletion", renderSince(s.Snapshot(), 6), "-b -c")
		mustEqual(t, "an older snapshot still knows it", renderSince(old, 5), "-a -b")

		time.Sleep(time.Minute)
		s.Set("d", 2) // revision 9
		mustEqual(t, "as old as the limit", renderSince(s.Snapshot(), 7), "-c d=2")
		time.Sleep(time.Second)
		mustEqual(t, "a store without writes keeps them", renderSince(s.Snapshot(), 7), "-c d=2")
		s.Set("d", 3) // revision 10
		mustEqual(t, "older than the limit", renderSince(s.Snapshot(), 7), "start over")
		mustEqual(t, "after the last dropped deletion", renderSince(s.Snapshot(), 8), "d=3")
		checkInvariants(t, s)
	})
}

func TestFlappingKeyCountsOnce(t *testing.T) {
	s := newStrings(resumable(true), limited(limits{tombstones: 2}))
	s.Set("a", 1)
	s.Delete("a")
	s.Set("b", 1)
	for range 10 {
		s.Delete("b")
		s.Set("b", 1)
	}
	s.Delete("b")
	mustEqual(t, "changes", renderSince(s.Snapshot(), 1), "-a -b")
}

func TestLatestChangesComeFirst(t *testing.T) {
	s := newStrings(resumable(true))
	s.Replace(listing("a=1 b=1 c=1")) // revisions 2 to 4
	s.Set("a", 2)
	old := s.Snapshot()
	s.Delete("b")
	s.Set("c", 2)
	for _, test := range []struct {
		name     string
		snapshot *Snapshot[string, int]
		want     string
	}{
		{"each key once, with deletions", s.Snapshot(), "c@7 b@6 a@5"},
		{"later changes are not in an older snapshot", old, "a@5 c@4 b@3"},
	} {
		var got []string
		for key, revision := range test.snapshot.Latest() {
			got = append(got, fmt.Sprintf("%s@%d", key, revision))
		}
		mustEqual(t, test.name, strings.Join(got, " "), test.want)
	}
	for key := range old.Latest() {
		mustEqual(t, "the iteration may end early", key, "a")
		break
	}
}
