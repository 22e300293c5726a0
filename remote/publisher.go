// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"k8s.io/apimachinery/pkg/types"
)

type (
	states       = diffstore.Snapshot[types.NamespacedName, *api.ServiceState]
	statesDelta  = diffstore.Delta[types.NamespacedName, *api.ServiceState]
	statesCursor = diffstore.Cursor[types.NamespacedName, *api.ServiceState]
	stateChange  = diffstore.Change[types.NamespacedName, *api.ServiceState]
)

// publisher decides which snapshots the streams send. After a commit, it waits a short
// time for further commits. So a burst of commits wakes the streams only once, and all
// streams send the same snapshots.
type publisher struct {
	state    cluster.Reader
	interval time.Duration

	mu       sync.Mutex
	snapshot *cluster.Objects // nil until the state is synced
	next     chan struct{}    // closed when snapshot is replaced

	// cacheMu guards the last result of stateChanges, which many streams need.
	cacheMu  sync.Mutex
	from, to diffstore.Revision
	changed  []stateChange
}

// get returns the present snapshot, or nil if there is none yet. The channel closes when
// the next snapshot replaces this one.
func (p *publisher) get() (*cluster.Objects, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.snapshot, p.next
}

// lags reports whether a snapshot is so old that its memory should be freed. The limit is
// twice the limit for cursors in package diffstore, because most changes count twice: in
// the store of the changed object, and in the store of the joined states.
func (p *publisher) lags(snapshot *cluster.Objects) bool {
	present, _ := p.get()
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

// run publishes snapshots until ctx ends.
func (p *publisher) run(ctx context.Context) error {
	for revision := diffstore.Revision(0); ; {
		select {
		case <-p.state.Changed(revision):
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
		p.mu.Lock()
		p.snapshot = snapshot
		close(p.next)
		p.next = make(chan struct{})
		p.mu.Unlock()
	}
}
