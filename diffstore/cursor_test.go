// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"weak"

	clocktesting "k8s.io/utils/clock/testing"
)

func renderDelta(d Delta[string, int]) string {
	var out []string
	if d.Full() {
		out = append(out, "full:")
	}
	for c := range d.Changes() {
		out = append(out, renderChange(c))
	}
	return strings.Join(out, " ")
}

func TestCursor(t *testing.T) {
	s := newStrings()
	s.Replace(0, listing("a=1 b=1"))
	c := s.NewCursor()
	defer c.Close()

	first := c.Until(s.Snapshot())
	mustEqual(t, "a new reader starts over", renderDelta(first), "full: a=1@1 b=1@2")
	s.Set(0, "c", 1)
	mustEqual(t, "what is not acknowledged comes again", renderDelta(c.Until(s.Snapshot())), "full: a=1@1 b=1@2 c=1@3")
	c.Advance(first.New)
	mustEqual(t, "then what followed", renderDelta(c.Until(s.Snapshot())), "c=1@3")

	s.Delete(0, "a")
	s.Set(0, "c", 2)
	d := c.Until(s.Snapshot())
	mustEqual(t, "merged with later changes", renderDelta(d), "-a@4 c=2@5")
	old, _ := d.Old.Get("a")
	mustEqual(t, "the old value is at hand", old, 1)
	c.Advance(d.New)
	mustEqual(t, "nothing new", renderDelta(c.Until(s.Snapshot())), "")

	c.Advance(first.New)
	mustEqual(t, "no way back", renderDelta(c.Until(s.Snapshot())), "")
	mustEqual(t, "no delta to an older snapshot", renderDelta(c.Until(first.New)), "")
	mustEqual(t, "which leaves the reader where it is", c.Until(first.New).New.Revision(), d.New.Revision())
}

func TestCursorOfAnEmptyStore(t *testing.T) {
	s := newStrings()
	c := s.NewCursor()
	defer c.Close()
	d := c.Until(s.Snapshot())
	mustEqual(t, "first", renderDelta(d), "full:")
	c.Advance(d.New)
	s.Set(0, "a", 1)
	mustEqual(t, "then", renderDelta(c.Until(s.Snapshot())), "a=1@1")
}

func TestCursorMayBeginAtASnapshot(t *testing.T) {
	s := newStrings()
	s.Set(0, "a", 1)
	c := s.NewCursor()
	defer c.Close()
	c.Advance(s.Snapshot())
	s.Replace(0, listing("b=1"))
	mustEqual(t, "delta", renderDelta(c.Until(s.Snapshot())), "-a@2 b=1@3")
}

func TestTombstonesAreDroppedWhenEveryCursorHasPassed(t *testing.T) {
	for _, tc := range []struct {
		name      string
		resumable bool
		want      []int // tombstones: after the deletions, when one cursor has passed, when both have, when both are closed
	}{
		{"as a rule", false, []int{2, 2, 0, 0}},
		{"not in a resumable store", true, []int{2, 2, 2, 2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings(func(o *Options[string, int]) { o.Resumable = tc.resumable })
			s.Replace(0, listing("a=1 b=1"))
			fast, slow := s.NewCursor(), s.NewCursor()
			fast.Advance(s.Snapshot())
			slow.Advance(s.Snapshot())

			s.Replace(0, listing(""))
			got := []int{s.tombstones.len()}
			fast.Advance(s.Snapshot())
			got = append(got, s.tombstones.len())
			slow.Advance(s.Snapshot())
			got = append(got, s.tombstones.len())
			fast.Close()
			slow.Close()
			got = append(got, s.tombstones.len())
			mustEqual(t, "tombstones", got, tc.want)
			checkInvariants(t, s)
		})
	}
}

func TestClosedCursorHoldsNothing(t *testing.T) {
	s := newStrings()
	s.Set(0, "a", 1)
	fast, slow := s.NewCursor(), s.NewCursor()
	fast.Advance(s.Snapshot())
	slow.Advance(s.Snapshot())
	s.Delete(0, "a")
	fast.Advance(s.Snapshot())
	mustEqual(t, "tombstones while the slow cursor is open", s.tombstones.len(), 1)

	slow.Close()
	slow.Close()
	mustEqual(t, "tombstones when it is closed", s.tombstones.len(), 0)
	slow.Advance(s.Snapshot())
	mustEqual(t, "a closed cursor gives full deltas", renderDelta(slow.Until(s.Snapshot())), "full:")
	mustEqual(t, "cursors that hold something", s.cursors.byRevision.Len(), 1)
}

func TestReaderThatStartsOverIsHeldFor(t *testing.T) {
	s := newStrings()
	s.Replace(0, listing("a=1 b=1"))
	fast, slow := s.NewCursor(), s.NewCursor()
	defer fast.Close()
	defer slow.Close()
	fast.Advance(s.Snapshot())

	d := slow.Until(s.Snapshot())
	s.Delete(0, "a")
	fast.Advance(s.Snapshot())
	slow.Advance(d.New)
	mustEqual(t, "delta", renderDelta(slow.Until(s.Snapshot())), "-a@3")
}

func TestCursorThatLagsStartsOver(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	for _, tc := range []struct {
		name   string
		length int // of the store
		lag    func(*Store[string, int])
		full   bool
	}{
		{
			name: "not by as many changes as allowed",
			lag: func(s *Store[string, int]) {
				for i := range 10 {
					s.Set(0, "hot", i)
				}
			},
		},
		{
			name: "by more changes than allowed",
			lag: func(s *Store[string, int]) {
				for i := range 11 {
					s.Set(0, "hot", i)
				}
			},
			full: true,
		},
		{
			name:   "not by a quarter of a large store",
			length: 100,
			lag: func(s *Store[string, int]) {
				for i := range 25 {
					s.Set(0, "hot", i)
				}
			},
		},
		{
			name:   "by more than a quarter of a large store",
			length: 100,
			lag: func(s *Store[string, int]) {
				for i := range 26 {
					s.Set(0, "hot", i)
				}
			},
			full: true,
		},
		{
			name:   "by more deletions than are remembered",
			length: 5,
			lag: func(s *Store[string, int]) {
				s.Replace(0, listing(""))
			},
			full: true,
		},
		{
			name:   "by a deletion longer ago than remembered",
			length: 1,
			lag: func(s *Store[string, int]) {
				s.Replace(0, listing(""))
				clock.SetTime(clock.Now().Add(2 * time.Minute))
				s.Set(0, "x", 1)
			},
			full: true,
		},
		{
			name:   "not by a change longer ago than deletions are remembered",
			length: 1,
			lag: func(s *Store[string, int]) {
				s.Set(0, "x", 1)
				clock.SetTime(clock.Now().Add(2 * time.Minute))
				s.Set(0, "x", 2)
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStrings(func(o *Options[string, int]) {
				o.MaxLag = 10
				o.MaxTombstones = 4
				o.MaxTombstoneAge = time.Minute
				o.Clock = clock
			})
			for i := range tc.length {
				s.Set(0, strconv.Itoa(i), i)
			}
			c := s.NewCursor()
			defer c.Close()
			c.Advance(s.Snapshot())
			tc.lag(s)
			mustEqual(t, "start over", c.Until(s.Snapshot()).Full(), tc.full)
			checkInvariants(t, s)
		})
	}
}

func TestReaderMayCatchUpAfterItsPositionWasDropped(t *testing.T) {
	s := newStrings(func(o *Options[string, int]) { o.MaxLag = 2 })
	c := s.NewCursor()
	defer c.Close()
	c.Advance(s.Snapshot())
	s.Set(0, "a", 1)
	d := c.Until(s.Snapshot())
	s.Set(0, "b", 1)
	s.Set(0, "c", 1) // the position is dropped here, while the reader applies d
	c.Advance(d.New)
	mustEqual(t, "delta", renderDelta(c.Until(s.Snapshot())), "b=1@2 c=1@3")
}

// The reader here never comes back: what it held must be garbage nevertheless.
func TestCursorThatLagsLetsGoOfItsSnapshot(t *testing.T) {
	s := newStrings(func(o *Options[string, int]) { o.MaxLag = 1 })
	c := s.NewCursor()
	defer c.Close()
	s.Set(0, "a", 1)
	c.Advance(s.Snapshot())
	held := weak.Make(s.Snapshot())
	s.Set(0, "a", 2)
	runtime.GC()
	if held.Value() == nil {
		t.Fatal("the cursor does not hold its snapshot")
	}
	s.Set(0, "a", 3)
	runtime.GC()
	if held.Value() != nil {
		t.Error("the snapshot of a cursor that lags is still held")
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
