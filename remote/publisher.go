// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"sync"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"k8s.io/utils/clock"
)

// publisher says which snapshot streams bring their clients to. It gathers commits
// for a while, so that a burst of them wakes the streams once, and so that all
// streams go from one snapshot to the same next one.
type publisher struct {
	state    cluster.Reader
	interval time.Duration
	clock    clock.WithTicker

	mu       sync.Mutex
	snapshot *cluster.Snapshot // nil until the state has synced
	next     chan struct{}     // closed when snapshot is replaced
}

func newPublisher(state cluster.Reader, interval time.Duration, c clock.WithTicker) *publisher {
	return &publisher{state: state, interval: interval, clock: c, next: make(chan struct{})}
}

// get returns the present snapshot, nil if there is none yet, and what is closed
// when there is another.
func (p *publisher) get() (*cluster.Snapshot, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.snapshot, p.next
}

// run publishes until ctx ends.
func (p *publisher) run(ctx context.Context) error {
	revision := diffRevision(0)
	for {
		select {
		case <-p.state.Changed(revision):
		case <-ctx.Done():
			return nil
		}
		if p.interval > 0 && revision != 0 {
			timer := p.clock.NewTimer(p.interval)
			select {
			case <-timer.C():
			case <-ctx.Done():
				timer.Stop()
				return nil
			}
		}
		snapshot := p.state.Snapshot()
		revision = snapshot.Revision
		p.mu.Lock()
		p.snapshot = snapshot
		close(p.next)
		p.next = make(chan struct{})
		p.mu.Unlock()
	}
}
