// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"fmt"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

func TestSnapshotIsTakenOnceARevision(t *testing.T) {
	s := newStrings()
	s.Set(0, "a", 1)
	first := s.Snapshot()
	s.Set(0, "a", 1)
	s.Delete(0, "b")
	s.Replace(0, listing("a=1"))
	if s.Snapshot() != first {
		t.Error("writes that record nothing made a new snapshot")
	}
	s.Set(0, "a", 2)
	if s.Snapshot() == first {
		t.Error("a change made no new snapshot")
	}
}

func TestSnapshotNeverChanges(t *testing.T) {
	s := newStrings()
	for i := range 1000 {
		s.Set(Scope(i%3), fmt.Sprintf("%04d", i), i)
	}
	s.Delete(1, "0001")
	snapshot := s.Snapshot()
	entries, since := render(snapshot), renderSince(snapshot, 500)

	s.Replace(0, listing("0003=7 x=1"))
	s.Replace(1, listing("0001=1 0000=1"))
	s.Replace(2, listing(""))

	mustEqual(t, "entries", render(snapshot), entries)
	mustEqual(t, "since 500", renderSince(snapshot, 500), since)
	mustEqual(t, "length", snapshot.Len(), 999)
}

func TestSnapshotReads(t *testing.T) {
	s := newStrings()
	s.Replace(0, listing("a=1 c=3 e=5"))
	s.Delete(0, "c")
	snapshot := s.Snapshot()

	value, ok := snapshot.Get("e")
	mustEqual(t, "e", value, 5)
	mustEqual(t, "e is there", ok, true)
	_, revision, ok := snapshot.Lookup("c")
	mustEqual(t, "revision of a deleted key", revision, 0)
	mustEqual(t, "deleted key is there", ok, false)
	mustEqual(t, "length", snapshot.Len(), 2)
	mustEqual(t, "revision", snapshot.Revision(), 4)

	for _, tc := range []struct{ name, from, want string }{
		{"from before the first", "", "ae"},
		{"from a key that is there", "a", "ae"},
		{"from between keys", "b", "e"},
		{"from a deleted key", "c", "e"},
		{"from after the last", "f", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got strings.Builder
			for key := range snapshot.From(tc.from) {
				got.WriteString(key)
			}
			mustEqual(t, "keys", got.String(), tc.want)
		})
	}
	t.Run("loops can be left early and run again", func(t *testing.T) {
		for range 2 {
			for key := range snapshot.All() {
				mustEqual(t, "first", key, "a")
				break
			}
			changes, _ := snapshot.Since(2)
			for c := range changes {
				mustEqual(t, "first change", renderChange(c), "e=5@3")
				break
			}
		}
	})
}

func TestSince(t *testing.T) {
	s := newStrings()
	s.Replace(0, listing("a=1 b=1 c=1")) // 1 2 3
	s.Set(0, "b", 2)                     // 4
	s.Delete(0, "a")                     // 5
	for revision, want := range []string{
		"c=1@3 b=2@4 -a@5",
		"c=1@3 b=2@4 -a@5",
		"c=1@3 b=2@4 -a@5",
		"b=2@4 -a@5",
		"-a@5",
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
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	pass := func(d time.Duration) { clock.SetTime(clock.Now().Add(d)) }
	s := newStrings(func(o *Options[string, int]) {
		o.MaxTombstones = 2
		o.MaxTombstoneAge = time.Minute
		o.Clock = clock
	})
	s.Replace(0, listing("a=1 b=1 c=1 d=1")) // 1 to 4
	s.Delete(0, "a")                         // 5
	pass(30 * time.Second)
	s.Delete(0, "b") // 6
	mustEqual(t, "two are remembered", renderSince(s.Snapshot(), 4), "-a@5 -b@6")

	old := s.Snapshot()
	s.Delete(0, "c") // 7
	mustEqual(t, "before the one forgotten", renderSince(s.Snapshot(), 4), "start over")
	mustEqual(t, "at the one forgotten", renderSince(s.Snapshot(), 5), "-b@6 -c@7")
	mustEqual(t, "the older snapshot still knows", renderSince(old, 4), "-a@5 -b@6")

	pass(time.Minute)
	s.Set(0, "d", 2) // 8
	mustEqual(t, "as old as the limit", renderSince(s.Snapshot(), 6), "-c@7 d=2@8")
	pass(time.Second)
	mustEqual(t, "a store at rest keeps them", renderSince(s.Snapshot(), 6), "-c@7 d=2@8")
	s.Set(0, "d", 3) // 9
	mustEqual(t, "older than the limit", renderSince(s.Snapshot(), 6), "start over")
	mustEqual(t, "after the last forgotten", renderSince(s.Snapshot(), 7), "d=3@9")
	checkInvariants(t, s)
}

func TestKeyThatFlapsCountsOnce(t *testing.T) {
	s := newStrings(func(o *Options[string, int]) { o.MaxTombstones = 2 })
	s.Set(0, "a", 1)
	s.Delete(0, "a")
	s.Set(0, "b", 1)
	for range 10 {
		s.Delete(0, "b")
		s.Set(0, "b", 1)
	}
	s.Delete(0, "b")
	mustEqual(t, "changes", renderSince(s.Snapshot(), 0), "-a@2 -b@24")
}
