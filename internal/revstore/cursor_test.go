// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"
)

func renderDelta(d Delta[string, int]) string {
	var out []string
	if d.Full() {
		out = append(out, "full:")
	}
	for c := range d.Changes() {
		out = append(out, renderChange(d, c))
	}
	return strings.Join(out, " ")
}

// renderChange returns a change in the form "key=old>new"; "" stands for no value.
func renderChange(d Delta[string, int], c Change[string, int]) string {
	value := func(s *Snapshot[string, int]) string {
		if s == nil {
			return ""
		}
		v, ok := s.Get(c.Key)
		if !ok {
			return ""
		}
		return strconv.Itoa(v)
	}
	return c.Key + "=" + value(d.Old) + ">" + value(d.New)
}

func TestCursor(t *testing.T) {
	s := newStrings()
	s.Replace(listing("a=1 b=1"))
	c := s.NewCursor()
	defer c.Close()

	first := c.Until(s.Snapshot())
	mustEqual(t, "a new reader starts over", renderDelta(first), "full: a=>1 b=>1")
	s.Set("c", 1)
	mustEqual(t, "unacknowledged changes are repeated", renderDelta(c.Until(s.Snapshot())), "full: a=>1 b=>1 c=>1")
	c.Advance(first.New)
	mustEqual(t, "then the later changes", renderDelta(c.Until(s.Snapshot())), "c=>1")

	s.Set("c", 2)
	s.Delete("a")
	d := c.Until(s.Snapshot())
	mustEqual(t, "merged with later changes, in key order", renderDelta(d), "a=1> c=>2")
	c.Advance(d.New)
	mustEqual(t, "no further changes", renderDelta(c.Until(s.Snapshot())), "")

	c.Advance(first.New)
	mustEqual(t, "no way back", renderDelta(c.Until(s.Snapshot())), "")
	mustEqual(t, "no delta to an older snapshot", renderDelta(c.Until(first.New)), "")
	mustEqual(t, "the position does not move", c.Until(first.New).New.Revision(), d.New.Revision())
}

func TestCursorOfAnEmptyStore(t *testing.T) {
	s := newStrings()
	c := s.NewCursor()
	defer c.Close()
	d := c.Until(s.Snapshot())
	mustEqual(t, "first", renderDelta(d), "full:")
	c.Advance(d.New)
	s.Set("a", 1)
	mustEqual(t, "then", renderDelta(c.Until(s.Snapshot())), "a=>1")
}

func TestCursorMayBeginAtASnapshot(t *testing.T) {
	s := newStrings()
	s.Set("a", 1)
	c := s.NewCursor()
	defer c.Close()
	c.Advance(s.Snapshot())
	s.Replace(listing("b=1"))
	mustEqual(t, "delta", renderDelta(c.Until(s.Snapshot())), "a=1> b=>1")
}

func TestChangesAreDifferencesInKeyOrder(t *testing.T) {
	s := newStrings()
	s.Replace(listing("a=1 b=2 c=3 d=4 e=5"))
	c := s.NewCursor()
	defer c.Close()
	c.Advance(s.Snapshot())

	s.Set("e", 0) // a zero value is not a missing value
	s.Set("d", 6)
	s.Set("d", 4) // the key d had this value in the old snapshot, too
	s.Set("bb", 7)
	s.Delete("bb") // the old snapshot does not have the key bb, either
	s.Delete("b")
	s.Set("b", 8)
	s.Delete("a")
	s.Set("aa", 0)
	d := c.Until(s.Snapshot())
	var all, changes []Change[string, int]
	for c := range d.Changes() {
		changes = append(changes, c)
	}
	for c := range d.All() {
		all = append(all, c)
	}
	mustEqual(t, "changes", changes, []Change[string, int]{{"a", 1, 0}, {"aa", 0, 0}, {"b", 2, 8}, {"e", 5, 0}})
	mustEqual(t, "all", all, []Change[string, int]{{"a", 1, 0}, {"aa", 0, 0}, {"b", 2, 8}, {"c", 3, 3}, {"d", 4, 4}, {"e", 5, 0}})
	for range d.Changes() {
		break // a caller may end the iteration early
	}
}

func TestTombstonesAreDroppedWhenEveryCursorHasPassed(t *testing.T) {
	for _, tc := range []struct {
		name      string
		resumable bool
		// The numbers of tombstones at five times: before the cursors exist, after deletions,
		// after the first cursor has passed the deletions, after both cursors have passed the
		// deletions, and after another deletion when no cursors exist.
		want []int
	}{
		{"in a store that is not resumable", false, []int{0, 2, 2, 0, 0}},
		{"never in a resumable store", true, []int{1, 3, 3, 3, 4}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings(resumable(tc.resumable))
			s.Replace(listing("a=1 b=1 c=1"))
			s.Delete("c")
			got := []int{s.tombstones.byKey.Len()}
			fast, slow := s.NewCursor(), s.NewCursor()
			fast.Advance(s.Snapshot())
			slow.Advance(s.Snapshot())

			s.Replace(listing(""))
			got = append(got, s.tombstones.byKey.Len())
			fast.Advance(s.Snapshot())
			got = append(got, s.tombstones.byKey.Len())
			slow.Advance(s.Snapshot())
			got = append(got, s.tombstones.byKey.Len())
			fast.Close()
			slow.Close()
			s.Set("d", 1)
			s.Delete("d")
			got = append(got, s.tombstones.byKey.Len())
			mustEqual(t, "tombstones", got, tc.want)
			checkInvariants(t, s)
		})
	}
}

func TestClosedCursorRetainsNothing(t *testing.T) {
	s := newStrings()
	s.Set("a", 1)
	fast, slow := s.NewCursor(), s.NewCursor()
	fast.Advance(s.Snapshot())
	slow.Advance(s.Snapshot())
	s.Delete("a")
	fast.Advance(s.Snapshot())
	mustEqual(t, "tombstones while the slow cursor is open", s.tombstones.byKey.Len(), 1)

	slow.Close()
	slow.Close()
	mustEqual(t, "tombstones when it is closed", s.tombstones.byKey.Len(), 0)
	slow.Advance(s.Snapshot())
	mustEqual(t, "a closed cursor gives full deltas", renderDelta(slow.Until(s.Snapshot())), "full:")
	mustEqual(t, "cursors that retain something", s.cursors.positions.Len(), 1)
}

func TestDeletionsAreKeptForReaderThatStartsOver(t *testing.T) {
	s := newStrings()
	s.Replace(listing("a=1 b=1"))
	fast, slow := s.NewCursor(), s.NewCursor()
	defer fast.Close()
	defer slow.Close()
	fast.Advance(s.Snapshot())

	d := slow.Until(s.Snapshot())
	s.Delete("a")
	fast.Advance(s.Snapshot())
	slow.Advance(d.New)
	mustEqual(t, "delta", renderDelta(slow.Until(s.Snapshot())), "a=1>")
}

func TestCursorThatLagsStartsOver(t *testing.T) {
	for _, tc := range []struct {
		name   string
		length int // length of the store
		lag    func(*Store[string, int])
		full   bool
	}{
		{
			name: "as many changes as allowed",
			lag: func(s *Store[string, int]) {
				for i := range 10 {
					s.Set("hot", i)
				}
			},
		},
		{
			name: "more changes than allowed",
			lag: func(s *Store[string, int]) {
				for i := range 11 {
					s.Set("hot", i)
				}
			},
			full: true,
		},
		{
			name:   "a quarter of a large store",
			length: 100,
			lag: func(s *Store[string, int]) {
				for i := range 25 {
					s.Set("hot", i)
				}
			},
		},
		{
			name:   "more than a quarter of a large store",
			length: 100,
			lag: func(s *Store[string, int]) {
				for i := range 26 {
					s.Set("hot", i)
				}
			},
			full: true,
		},
		{
			name:   "more deletions than the store keeps",
			length: 5,
			lag: func(s *Store[string, int]) {
				s.Replace(listing(""))
			},
			full: true,
		},
		{
			name:   "a deletion older than the store keeps",
			length: 1,
			lag: func(s *Store[string, int]) {
				s.Replace(listing(""))
				time.Sleep(2 * time.Minute)
				s.Set("x", 1)
			},
			full: true,
		},
		{
			name:   "a change older than the store keeps deletions",
			length: 1,
			lag: func(s *Store[string, int]) {
				s.Set("x", 1)
				time.Sleep(2 * time.Minute)
				s.Set("x", 2)
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStrings(limited(limits{lag: 10, tombstones: 4, tombstoneAge: time.Minute}))
				for i := range tc.length {
					s.Set(strconv.Itoa(i), i)
				}
				c := s.NewCursor()
				defer c.Close()
				c.Advance(s.Snapshot())
				tc.lag(s)
				mustEqual(t, "start over", c.Until(s.Snapshot()).Full(), tc.full)
				checkInvariants(t, s)
			})
		})
	}
}

func TestReaderMayCatchUpAfterItsPositionWasDropped(t *testing.T) {
	s := newStrings(limited(limits{lag: 2}))
	c := s.NewCursor()
	defer c.Close()
	c.Advance(s.Snapshot())
	s.Set("a", 1)
	d := c.Until(s.Snapshot())
	s.Set("b", 1)
	s.Set("c", 1) // the store drops the reader's position before the reader acknowledges the delta d
	c.Advance(d.New)
	mustEqual(t, "delta", renderDelta(c.Until(s.Snapshot())), "b=>1 c=>1")
}

// The reader never reads again. Its snapshot must become garbage.
func TestLaggingCursorReleasesItsSnapshot(t *testing.T) {
	s := newStrings(limited(limits{lag: 1}))
	c := s.NewCursor()
	defer c.Close()
	s.Set("a", 1)
	c.Advance(s.Snapshot())
	held := weak.Make(s.Snapshot())
	s.Set("a", 2)
	runtime.GC()
	if held.Value() == nil {
		t.Fatal("the cursor does not retain its snapshot")
	}
	s.Set("a", 3)
	runtime.GC()
	if held.Value() != nil {
		t.Error("the snapshot of a lagging cursor is still retained")
	}
	runtime.KeepAlive(c)
}

func TestCursorRefusesSnapshotsOfAnotherStore(t *testing.T) {
	c, other := newStrings().NewCursor(), newStrings().Snapshot()
	for name, call := range map[string]func(){
		"until":   func() { c.Until(other) },
		"advance": func() { c.Advance(other) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			call()
		})
	}
}
