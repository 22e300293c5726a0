// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/revstore"
	"k8s.io/apimachinery/pkg/types"
)

type (
	states       = revstore.Snapshot[types.NamespacedName, *api.ServiceState]
	statesDelta  = revstore.Delta[types.NamespacedName, *api.ServiceState]
	statesCursor = revstore.Cursor[types.NamespacedName, *api.ServiceState]
	stateChange  = revstore.Change[types.NamespacedName, *api.ServiceState]
)

func statesOf(s *cluster.Snapshot) *states { return (*states)(s.States) }

func nodesOf(s *cluster.Objects) *revstore.Snapshot[string, *api.Node] {
	return (*revstore.Snapshot[string, *api.Node])(s.Nodes)
}

// publisher decides which snapshots the streams send. It publishes a commit immediately.
// Then it gathers further commits for a short time. So a burst of commits wakes the streams
// only a few times, and all streams send the same snapshots.
type publisher struct {
	state    *cluster.State
	interval time.Duration

	snapshot atomic.Pointer[cluster.Objects] // nil until the state is synced
	stopped  atomic.Bool

	mu sync.Mutex
	// The streams that wait for the next snapshot, and some streams that have ended since the
	// last snapshot.
	waiting []waker

	stepsMu sync.Mutex
	steps   []*step // at most maxSteps, oldest first
}

// waker wakes one stream. Each stream waits only for its own channel. Waiting for
// channels that all streams share would cost much more.
type waker chan struct{} // has room for one element

func newWaker() waker { return make(waker, 1) }

func (w waker) wake() {
	select {
	case w <- struct{}{}:
	default: // already awake
	}
}

// get returns the present snapshot, or nil if there is none yet.
func (p *publisher) get() *cluster.Objects { return p.snapshot.Load() }

// wait waits until one of three events: a snapshot replaces the given one, the publisher
// wakes all streams for another reason, or another goroutine calls w.wake.
func (p *publisher) wait(seen *cluster.Objects, w waker) {
	p.mu.Lock()
	if p.stopped.Load() || p.snapshot.Load() != seen {
		p.mu.Unlock()
		return
	}
	p.waiting = append(p.waiting, w)
	p.mu.Unlock()
	<-w // take no lock after this, because all streams wake at the same time
}

// wakeAll calls change and wakes all streams that wait.
func (p *publisher) wakeAll(change func()) {
	p.mu.Lock()
	change()
	waiting := p.waiting
	p.waiting = make([]waker, 0, len(waiting))
	p.mu.Unlock()
	for _, w := range waiting {
		w.wake()
	}
}

// lags reports whether a snapshot is so old that its memory should be freed. This limit
// is twice the limit for cursors in package revstore, because most changes count twice:
// in the store of the changed object, and in the store of the joined states.
func (p *publisher) lags(snapshot *cluster.Objects) bool {
	present := p.get()
	return int(present.Revision-snapshot.Revision) > 2*max(10_000, present.States.Len()/4)
}

// run publishes snapshots until ctx ends. Each minute, it calls tidy, and wakes all streams
// so that they can renew tokens.
func (p *publisher) run(ctx context.Context, tidy func()) error {
	minute := time.NewTicker(time.Minute)
	defer minute.Stop()
	for revision := uint64(0); ; {
		select {
		case <-p.state.Changed(revision):
		case <-minute.C:
			tidy()
			p.forgetSteps()
			p.wakeAll(func() {})
			continue
		case <-ctx.Done():
			return nil
		}
		snapshot := p.state.Objects()
		revision = snapshot.Revision
		p.wakeAll(func() { p.snapshot.Store(snapshot) })
		if p.interval > 0 {
			select {
			case <-time.After(p.interval):
			case <-ctx.Done():
				return nil
			}
		}
	}
}
