// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"slices"
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

// publisher decides which snapshots the streams send. After a commit, it waits a short
// time for further commits. So a burst of commits wakes the streams only once, and all
// streams send the same snapshots.
type publisher struct {
	state    *cluster.State
	interval time.Duration

	snapshot atomic.Pointer[cluster.Objects] // nil until the state is synced
	stopped  atomic.Bool

	mu      sync.Mutex
	waiting map[waker]struct{} // the streams that wait for the next snapshot

	// cacheMu guards the last result of stateChanges, which many streams need.
	cacheMu  sync.Mutex
	from, to uint64
	changed  []stateChange
}

// waker wakes one stream. Each stream waits for its own channel only, because waiting for
// several channels that all streams share costs much more.
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

// wait waits until a snapshot has replaced the given one, until the publisher wakes all
// streams for another reason, or until another goroutine calls w.wake.
func (p *publisher) wait(seen *cluster.Objects, w waker) {
	p.mu.Lock()
	if p.stopped.Load() || p.snapshot.Load() != seen {
		p.mu.Unlock()
		return
	}
	p.waiting[w] = struct{}{}
	p.mu.Unlock()
	<-w // take no lock after this, because all streams wake at the same time
}

// forget releases a waker. It is called when its stream ends.
func (p *publisher) forget(w waker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.waiting, w)
}

// wakeAll calls change and wakes all streams that wait.
func (p *publisher) wakeAll(change func()) {
	p.mu.Lock()
	change()
	waiting := p.waiting
	p.waiting = make(map[waker]struct{}, len(waiting))
	p.mu.Unlock()
	for w := range waiting {
		w.wake()
	}
}

// lags reports whether a snapshot is so old that its memory should be freed. The limit is
// twice the limit for cursors in package revstore, because most changes count twice: in
// the store of the changed object, and in the store of the joined states.
func (p *publisher) lags(snapshot *cluster.Objects) bool {
	present := p.get()
	return int(present.Revision-snapshot.Revision) > 2*max(10_000, present.States.Len()/4)
}

// stateChanges returns the changes of d, sorted by key.
func (p *publisher) stateChanges(d statesDelta) []stateChange {
	from, to := d.Old.Revision(), d.New.Revision()
	if from == to {
		return nil
	}
	p.cacheMu.Lock()
	defer p.cacheMu.Unlock()
	if p.from != from || p.to != to {
		p.from, p.to, p.changed = from, to, slices.Collect(d.Changes())
	}
	return p.changed
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
			p.wakeAll(func() {})
			continue
		case <-ctx.Done():
			return nil
		}
		if p.interval > 0 && revision != 0 {
			select {
			case <-time.After(p.interval):
			case <-ctx.Done():
				return nil
			}
		}
		snapshot := p.state.Objects()
		revision = snapshot.Revision
		p.wakeAll(func() { p.snapshot.Store(snapshot) })
	}
}
