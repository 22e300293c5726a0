// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
)

// TestConcurrentUse runs writers, snapshot readers and cursors at once. Under the race detector it also pins how Clone is used:
// a BTreeG must not be cloned while it is written to or cloned, and a clone that is never written to may be read by all.
func TestConcurrentUse(t *testing.T) {
	const writers, readers, followers, writes = 4, 4, 4, 1500
	s := New(Options[int, int]{
		Compare:       cmp.Compare[int],
		Equal:         func(a, b int) bool { return a == b },
		MaxTombstones: 50,
		MaxLag:        100,
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	var writing, reading sync.WaitGroup
	for scope := range Scope(writers) {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(scope)))
			for i := range writes {
				key, value := random.IntN(200), random.IntN(5)
				switch random.IntN(10) {
				case 0:
					s.Replace(scope, maps.All(map[int]int{key: value, key + 1: value}))
				case 1:
					// Both keys always change together: readers must never see one without the other.
					s.Commit(func(tx *Tx[int, int]) {
						tx.Set(scope, -1, i)
						tx.Set(scope, -2, i)
					})
				case 2, 3:
					s.Delete(scope, key)
				default:
					s.Set(scope, key, value)
				}
			}
		})
	}
	for range readers {
		reading.Go(func() {
			var known Revision
			for s.Wait(ctx, known) == nil {
				snapshot := s.Snapshot()
				if snapshot.Revision() <= known {
					t.Errorf("woken for revision %d after %d", snapshot.Revision(), known)
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
					t.Errorf("half a commit is seen: %d and %d", a, b)
				}
			}
		})
	}
	mirrors := make([]map[int]int, followers)
	for i := range mirrors {
		mirrors[i] = map[int]int{}
		reading.Go(func() { follow(ctx, t, s, mirrors[i]) })
	}

	writing.Wait()
	cancel()
	reading.Wait()
	want := maps.Collect(s.Snapshot().All())
	for i, mirror := range mirrors {
		if !maps.Equal(mirror, want) {
			t.Errorf("follower %d has %v, the store %v", i, mirror, want)
		}
	}
	checkInvariants(t, s)
	mustEqual(t, "cursors left", s.cursors.byRevision.Len(), 0)
}

// follow keeps a mirror until ctx ends, then reads what is left.
func follow(ctx context.Context, t *testing.T, s *Store[int, int], mirror map[int]int) {
	c := s.NewCursor()
	defer c.Close()
	for ended := false; ; {
		delta := c.Until(s.Snapshot())
		if delta.Full() {
			clear(mirror)
		}
		for change := range delta.Changes() {
			if change.Deleted {
				delete(mirror, change.Key)
			} else {
				mirror[change.Key] = change.Value
			}
		}
		c.Advance(delta.New)
		if ended {
			return
		}
		if err := s.Wait(ctx, delta.New.Revision()); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			ended = true
		}
	}
}
