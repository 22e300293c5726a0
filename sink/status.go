// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Status is where a driver stands.
type Status struct {
	// Name is Options.Name.
	Name string
	// Revision is the revision up to which everything is applied; a service
	// that fails holds it back. It is 0 until the first pass is complete, and again
	// during later passes.
	Revision uint64
	// Passes counts the complete passes, and Syncs the Syncs that were acknowledged.
	// Some services may have failed in them.
	Passes, Syncs uint64
	// LastPass is when the last complete pass ended, and LastSync when the last Sync
	// ended that was acknowledged. Zero if there was none.
	LastPass, LastSync time.Time
	// LastProgress is when the sink last read a service from its Changes or returned
	// from a Sync. Where the search for a service that makes Sync fail is over and Sync
	// goes on failing as a whole, its calls do not count.
	LastProgress time.Time
	// LastQueued is when the driver last noticed that changes began to wait.
	LastQueued time.Time

	// WaitingSince is since when there is something to deliver: changes, the rest of a
	// pass, or failed services that are due again; zero if there is nothing. A Sync or
	// Verify that does not return counts, and so does the backoff after a Sync that
	// failed. Options.MinInterval does not count, nor do services that wait for their
	// own retry: a service that cannot be programmed does not mean that the sink is
	// stuck. A sink is stuck if something waits and the sink makes no progress: see
	// [Status.StuckFor].
	WaitingSince time.Time
	// SyncingSince is when the Sync that runs now began, zero if none runs.
	SyncingSince time.Time

	// Err is why the last Sync failed as a whole, or why the source had no
	// update for it; nil if it did not. Failures counts these in a row, and the
	// next attempt is not made before NextAttempt.
	Err         error
	Failures    int
	NextAttempt time.Time

	// Pending is how many services are taken from the source and not acknowledged,
	// through their own or another one's fault.
	Pending int
	// Failing are those of them that failed by themselves, in order of namespace and
	// name: the sink named them in a [Failed], or a Sync of one alone failed.
	Failing []FailingService
}

// StuckFor returns how long something has waited while the sink made no progress, 0 if
// nothing waits. A health check compares it with a limit.
func (s Status) StuckFor(now time.Time) time.Duration {
	if s.WaitingSince.IsZero() {
		return 0
	}
	return max(now.Sub(later(s.WaitingSince, s.LastProgress)), 0)
}

// FailingService is a service that the sink could not program.
type FailingService struct {
	Key types.NamespacedName
	// Err is what the sink said last.
	Err error
	// Failures is how often in a row it said so.
	Failures int
	// NextRetry is when it is delivered again, if it does not change before.
	NextRetry time.Time
}

// Status returns where the driver stands. It may be called at any time, and
// costs no more than the failing services are many.
func (d *Driver) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.status
	s.Name = d.opts.Name
	if s.WaitingSince.After(time.Now()) {
		s.WaitingSince = time.Time{} // the minimum interval has not passed yet
	}
	if at := d.progress.Load(); at != 0 {
		s.LastProgress = time.Unix(0, at)
	}
	s.Pending = len(d.pending.byKey)
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

// WaitApplied returns nil when the sink has acknowledged everything up to revision, by
// the source's count: a pass first of all, and then each service that changed. A
// service that fails holds WaitApplied back until it is acknowledged. It returns an
// error if ctx ends before, or Run does. It may be called at any time, before Run too.
func (d *Driver) WaitApplied(ctx context.Context, revision uint64) error {
	err := d.waitUntil(ctx, func() bool { return d.synced && d.applied() >= revision })
	if err != nil {
		return fmt.Errorf("wait for revision %d to be applied: %w", revision, err)
	}
	return nil
}

// WaitSynced returns nil when one pass is complete: the sink has acknowledged every
// service, except those that fail. It returns an error if ctx ends before, or Run
// does. It may be called at any time, before Run too.
func (d *Driver) WaitSynced(ctx context.Context) error {
	if err := d.waitUntil(ctx, func() bool { return d.status.Passes > 0 }); err != nil {
		return fmt.Errorf("wait for the first pass: %w", err)
	}
	return nil
}

// waitUntil returns nil when reached returns true, which is called with mu held.
func (d *Driver) waitUntil(ctx context.Context, reached func() bool) error {
	for {
		d.mu.Lock()
		done, moved, end := reached(), d.moved, d.end
		d.mu.Unlock()
		switch {
		case done:
			return nil
		case end != nil:
			return end
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// errEnded is the error of WaitApplied and WaitSynced when Run has ended with nil.
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

// report reports the result of a Sync to the log and the observer.
func (d *Driver) report(ctx context.Context, result SyncResult, failed Failed) {
	log := klog.FromContext(ctx)
	switch {
	case ctx.Err() != nil:
		log.V(2).Info("Ended while syncing", "result", result.Err)
	case len(failed) > 0:
		logFailed(log, failed)
	case result.Err != nil:
		log.Error(result.Err, "Sync failed; retrying", "pass", result.InPass, "services", result.Services, "failures", d.status.Failures)
	default:
		log.V(4).Info("Synced", "pass", result.InPass, "services", result.Services, "revision", d.position, "took", result.Duration)
	}
	result.Failing = d.pending.failing
	d.opts.Observer.Synced(result)
	d.opts.Observer.Pending(len(d.pending.byKey))
}

// logFailed logs the first services that failed, and how many more did.
func logFailed(log klog.Logger, failed Failed) {
	const most = 10
	keys := slices.SortedFunc(maps.Keys(failed), api.CompareKeys)
	for i, key := range keys {
		if i == most {
			log.Info("More services failed", "services", len(keys)-most)
			return
		}
		facts := []any{"service", key}
		var panicked *panicError
		if errors.As(failed[key], &panicked) {
			facts = append(facts, "stack", string(panicked.stack))
		}
		log.Error(failed[key], "Service failed; retrying", facts...)
	}
}

// observeLatency reports the age of the acknowledged changes to the observer.
func (d *Driver) observeLatency(changes []Change, failed Failed) {
	now := time.Now()
	for _, c := range changes {
		if _, ok := failed[c.Key]; !ok && !c.TriggerTime.IsZero() {
			d.opts.Observer.Applied(max(now.Sub(c.TriggerTime), 0))
		}
	}
}
