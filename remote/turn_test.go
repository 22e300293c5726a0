// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/semaphore"
)

// taker takes turns for the clients of one peer. The clients keep their turns.
type taker struct {
	b    *beginnings
	peer *semaphore.Weighted
	// The number of turns, and of notices.
	turns, notices atomic.Int64
}

func newTaker(b *beginnings) *taker {
	return &taker{b: b, peer: semaphore.NewWeighted(maxTurnsPerPeer)}
}

// take requests n turns in the background.
func (p *taker) take(ctx context.Context, n int) {
	for range n {
		go func() {
			if _, err := p.b.turn(ctx, p.peer, func() error { p.notices.Add(1); return nil }); err == nil {
				p.turns.Add(1)
			}
		}()
		synctest.Wait()
	}
}

// If a peer's clients do not read, the peer gets only some of the turns. Several of these
// peers together delay other peers by a limited time. Waiting clients get notices.
func TestSlowPeersLeaveTurnsToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer func() {
			cancel()
			time.Sleep(maxTurn)
		}()
		b := newBeginnings(nil)
		slow, good := newTaker(b), newTaker(b)
		slow.take(ctx, 32)
		good.take(ctx, 1)
		if slow.turns.Load() != maxTurnsPerPeer || good.turns.Load() != 1 {
			t.Errorf("the slow peer has %d turns, the other %d", slow.turns.Load(), good.turns.Load())
		}
		for range 12 {
			newTaker(b).take(ctx, 32)
		}
		late := newTaker(b)
		late.take(ctx, 1)
		if late.turns.Load() != 0 {
			t.Error("more than 32 turns")
		}
		began := time.Now()
		for late.turns.Load() == 0 {
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if took := time.Since(began); took > 5*maxTurn || late.notices.Load() < 2 {
			t.Errorf("a turn after %v and %d notices", took, late.notices.Load())
		}
	})
}

// If a client leaves while it waits, it takes no turn from other clients.
func TestTurnsOfClientsThatLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBeginnings(nil)
		var ends []func()
		for range maxTurns {
			end, err := b.turn(t.Context(), newTaker(b).peer, nil)
			if err != nil {
				t.Fatal(err)
			}
			ends = append(ends, end)
		}
		gone := errors.New("gone")
		for range 3 {
			p := newTaker(b)
			if _, err := b.turn(t.Context(), p.peer, func() error { return gone }); err != nil && err != gone {
				t.Errorf("error %v", err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := b.turn(ctx, p.peer, nil); err == nil {
				t.Error("a turn for a client that has left")
			}
		}
		for _, end := range ends {
			end()
		}
		time.Sleep(2 * maxTurn)
		if !b.turns.TryAcquire(maxTurns) {
			t.Error("turns are missing")
		}
	})
}
