// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Status is where a driver stands.
type Status struct {
	// Name is Options.Name.
	Name string
	// Revision is the revision up to which everything is applied; a service
	// that fails holds it back. It is 0 until the first full Changes has been
	// acknowledged, and again while the sink starts over.
	Revision uint64
	// FullSyncs and PartialSyncs count the Syncs that were acknowledged, some
	// services aside.
	FullSyncs, PartialSyncs uint64
	// LastFullSync and LastSync are when the last full and the last Sync of any
	// kind that was acknowledged, some services aside, ended; zero if there was
	// none.
	LastFullSync, LastSync time.Time
	// LastQueued is when the driver last noticed that changes began to wait.
	LastQueued time.Time

	// WaitingSince is since when the sink could be told something that it has not
	// acknowledged: changes, or failed services that are due again; zero if there
	// is nothing. A Sync or Verify that does not return counts, and so does the
	// backoff after a Sync that failed. Options.MinInterval does not count, nor
	// do services that wait for their own retry: one that cannot be programmed
	// does not make a sink that is stuck. A health check compares it with the
	// clock.
	WaitingSince time.Time
	// SyncingSince is when the Sync that runs now began, zero if none runs.
	SyncingSince time.Time

	// Err is why the last Sync failed as a whole, or why the source had no
	// update for it; nil if it did not. Failures counts these in a row, and the
	// next attempt is not made before NextAttempt.
	Err         error
	Failures    int
	NextAttempt time.Time

	// Pending is how many services were told and not acknowledged, for their
	// own or another's fault.
	Pending int
	// Failing are those of them that the sink named in a [Failed], in order.
	Failing []FailingService
}

// FailingService is a service that the sink could not program.
type FailingService struct {
	Key types.NamespacedName
	// Err is what the sink said last.
	Err error
	// Failures is how often in a row it said so.
	Failures int
	// NextRetry is when it will be told again, if it does not change before.
	NextRetry time.Time
}

// Status returns where the driver stands. It may be called at any time, and
// costs no more than the failing services are many.
func (d *Driver) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.status
	s.Name = d.opts.Name
	if s.WaitingSince.After(d.opts.Clock.Now()) {
		s.WaitingSince = time.Time{} // the minimum interval has not passed yet
	}
	s.Pending = d.pending.len()
	if d.synced {
		s.Revision = d.applied()
	}
	for _, p := range d.pending.byKey {
		if p.failures > 0 {
			s.Failing = append(s.Failing, FailingService{p.key, p.err, p.failures, p.retryAt})
		}
	}
	slices.SortFunc(s.Failing, func(a, b FailingService) int { return api.CompareKeys(a.Key, b.Key) })
	return s
}

// WaitApplied returns nil when the sink has acknowledged everything up to
// revision, by the source's count: a full Changes first of all, and then each
// service that changed. A service that fails holds WaitApplied back until it is
// acknowledged. It returns an error if ctx ends before, or Run does. It may be
// called at any time, before Run too.
func (d *Driver) WaitApplied(ctx context.Context, revision uint64) error {
	for {
		d.mu.Lock()
		applied := d.synced && d.applied() >= revision
		moved, end := d.moved, d.end
		d.mu.Unlock()
		switch {
		case applied:
			return nil
		case end != nil:
			return fmt.Errorf("wait for revision %d to be applied: %w", revision, end)
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("wait for revision %d to be applied: %w", revision, context.Cause(ctx))
		}
	}
}

// errEnded is what callers of WaitApplied get once Run has ended with nil.
var errEnded = errors.New("driver has ended")

// applied returns the last revision up to which everything is applied, for a
// driver that is synced.
func (d *Driver) applied() uint64 {
	revision := d.pending.applied(d.position)
	if d.nodePending {
		revision = min(revision, d.nodeSince)
	}
	return revision
}
