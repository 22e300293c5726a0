// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
)

// TestConcurrentUse runs writers, snapshot readers and cursors concurrently. With the
// race detector, the test also fails if BTreeG.Clone runs during a write or another
// Clone, or if a clone is modified.
func TestConcurrentUse(t *testing.T) {
	const writers, readers, followers, writes = 4, 4, 4, 1500
	s := New(Options[int, int]{
		Compare: cmp.Compare[int],
		Equal:   func(a, b int) bool { return a == b },
	})
	s.limits.tombstones, s.limits.lag = 50, 100
	ended := make(chan struct{})
	isEnded := func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	}

	var writing, reading sync.WaitGroup
	for writer := range writers {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(writer)))
			for i := range writes {
				key, value := random.IntN(200), random.IntN(5)
				switch random.IntN(20) {
				case 0:
					// The two negative keys always change together. Readers must never see the
					// change of only one key.
					s.Replace(maps.All(map[int]int{-1: i, -2: i, key: value, key + 1: value}))
				case 1, 2, 3, 4:
					s.Delete(key)
				default:
					s.Set(key, value)
				}
			}
		})
	}
	for range readers {
		reading.Go(func() {
			var known Revision
			for !isEnded() {
				snapshot := s.Snapshot()
				if snapshot.Revision() < known {
					t.Errorf("revision %d after %d", snapshot.Revision(), known)
				}
				known = snapshot.Revision()
				n := 0
				for range snapshot.All() {
					n++
				}
				if n != snapshot.Len() {
					t.Errorf("%d entries in a snapshot of length %d", n, snapshot.Len())
				}
				a, _ := snapshot.Get(-1)
				if b, _ := snapshot.Get(-2); a != b {
					t.Errorf("a part of a commit is visible: %d and %d", a, b)
				}
			}
		})
	}
	mirrors := make([]map[int]int, followers)
	for i := range mirrors {
		mirrors[i] = map[int]int{}
		reading.Go(func() {
			c := s.NewCursor()
			defer c.Close()
			for last := false; !last; {
				last = isEnded()
				follow(c, mirrors[i])
			}
		})
	}

	writing.Wait()
	close(ended)
	reading.Wait()
	want := maps.Collect(s.Snapshot().All())
	for i, mirror := range mirrors {
		if !maps.Equal(mirror, want) {
			t.Errorf("follower %d has %v, the store %v", i, mirror, want)
		}
	}
	checkInvariants(t, s)
	mustEqual(t, "open cursors remain", s.cursors.positions.Len(), 0)
}

// follow applies the next delta of c to mirror.
func follow(c *Cursor[int, int], mirror map[int]int) {
	delta := c.Until(c.store.Snapshot())
	if delta.Full() {
		clear(mirror)
	}
	for change := range delta.Changes() {
		if _, ok := delta.New.Get(change.Key); ok {
			mirror[change.Key] = change.New
		} else {
			delete(mirror, change.Key)
		}
	}
	c.Advance(delta.New)
}
