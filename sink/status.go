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

// Status is the state of a driver.
type Status struct {
	// Name is Options.Name.
	Name string
	// Revision is the revision up to which everything is applied. A failing service holds it
	// back. It is 0 during every pass, including the first.
	Revision uint64
	// Passes counts complete passes, and Syncs counts acknowledged Syncs. Some services may
	// have failed in them.
	Passes, Syncs uint64
	// LastPass is when the last complete pass ended. LastSync is when the last acknowledged
	// Sync ended. They are zero before the first.
	LastPass, LastSync time.Time
	// LastProgress is when the sink last read a service from its Changes or returned from a
	// Sync. Calls do not count if Sync fails as a whole again and again.
	LastProgress time.Time
	// LastQueued is when the driver last noticed new changes.
	LastQueued time.Time

	// WaitingSince is the time since which work has been waiting: changes, the rest of a
	// pass, or failed services that are due again. It is zero if no work waits. A Sync or
	// Verify that does not return counts as work, and so does the backoff after a failed
	// Sync. Options.MinInterval does not count. Services that wait for their own retry do
	// not count either: a service that cannot be programmed does not mean that the sink
	// is stuck. A sink is stuck if work waits and the sink makes no progress: see
	// [Status.StuckFor].
	WaitingSince time.Time
	// SyncingSince is when the current Sync began, or zero if none runs.
	SyncingSince time.Time

	// Err is the error of the last Sync if it failed as a whole, or of the source if it had
	// no update; else nil. Failures counts such failures in a row. NextAttempt is the
	// earliest time of the next attempt.
	Err         error
	Failures    int
	NextAttempt time.Time

	// Pending is the number of services that are taken from the source and not acknowledged,
	// including services held back by the failure of another.
	Pending int
	// Failing are the pending services that failed themselves, in order of namespace and
	// name. Either a [Failed] named the service, or a Sync of this service only failed.
	Failing []FailingService
}

// StuckFor returns how long work has waited without progress of the sink, or 0 if no work
// waits. A health check compares it with a limit.
func (s Status) StuckFor(now time.Time) time.Duration {
	if s.WaitingSince.IsZero() {
		return 0
	}
	return max(now.Sub(later(s.WaitingSince, s.LastProgress)), 0)
}

// FailingService is a service that the sink could not program.
type FailingService struct {
	Key types.NamespacedName
	// Err is the last error.
	Err error
	// Failures counts failures in a row.
	Failures int
	// NextRetry is when the service is delivered again if it does not change before.
	NextRetry time.Time
}

// Status returns the state of the driver. It is safe for concurrent use. Its cost grows
// with the number of failing services only.
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

// WaitApplied returns nil when a pass is complete and the sink has acknowledged every
// change up to revision, which is a revision of the source. A failing service delays
// WaitApplied until it is acknowledged. WaitApplied returns an error if ctx or Run ends
// before that. It may be called at any time, even before Run.
func (d *Driver) WaitApplied(ctx context.Context, revision uint64) error {
	err := d.waitUntil(ctx, func() bool { return d.synced && d.applied() >= revision })
	if err != nil {
		return fmt.Errorf("wait for revision %d to be applied: %w", revision, err)
	}
	return nil
}

// WaitSynced returns nil when one pass is complete: the sink has acknowledged every
// service, except failing ones. It returns an error if ctx or Run ends before that. It
// may be called at any time, even before Run.
func (d *Driver) WaitSynced(ctx context.Context) error {
	if err := d.waitUntil(ctx, func() bool { return d.status.Passes > 0 }); err != nil {
		return fmt.Errorf("wait for the first pass: %w", err)
	}
	return nil
}

// waitUntil returns nil when reached returns true. It calls reached with mu held.
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

// errEnded is the error of WaitApplied and WaitSynced after Run has returned nil.
var errEnded = errors.New("driver has ended")

// applied returns the last revision up to which everything is applied. The driver must be
// synced.
func (d *Driver) applied() uint64 {
	revision := d.pending.applied(d.position)
	if d.nodePending {
		revision = min(revision, d.nodeSince)
	}
	return revision
}

// report logs the result of a Sync and passes it to the observer.
func (d *Driver) report(ctx context.Context, result SyncResult, failed Failed) {
	log := klog.FromContext(ctx)
	switch {
	case ctx.Err() != nil:
		log.V(2).Info("Context ended during Sync", "result", result.Err)
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
	if result.Passed {
		log.Info("Delivered all services", "failing", result.Failing, "duration", result.PassDuration)
	}
}

// logFailed logs the first failed services and the number of the others.
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
