// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/kpng-project/kpng/internal/ordering"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Status is the state of a driver.
type Status struct {
	// Name is Options.Name.
	Name string
	// Revision is the last revision up to which the sink has acknowledged everything. A
	// failing service keeps Revision from increasing. During a pass, Revision is 0.
	Revision uint64
	// Passes counts complete passes, and Syncs counts acknowledged Syncs. Both include
	// passes and Syncs in which some of the services failed.
	Passes, Syncs uint64
	// LastPass is the end of the last complete pass, and LastSync the end of the last
	// acknowledged Sync. Each of these times is zero if there was none.
	LastPass, LastSync time.Time
	// LastProgress is the last time at which the sink read a service from its Changes or
	// returned from Sync. While Sync keeps failing as a whole, neither event counts.
	LastProgress time.Time

	// WaitingSince is the time since which work has been waiting: changes, the rest of a
	// pass, or failed services that are due again. It is zero if no work waits. Work also
	// waits during a Sync, during a cancelled Verify that has not returned, and during the
	// backoff after a failed Sync. During Options.MinInterval, no work counts as waiting. A
	// failed service that waits for its own retry is not waiting work either, because the
	// sink is not stuck. See also [Status.StuckFor].
	WaitingSince time.Time
	// SyncingSince is the start of the running Sync, or zero if none runs.
	SyncingSince time.Time

	// If the last Sync failed as a whole, or the source failed to return an update, Err is
	// the error. Otherwise Err is nil. Failures counts such failures in a row. NextAttempt
	// is the earliest time of the next attempt.
	Err         error
	Failures    int
	NextAttempt time.Time

	// NodeErr is the last error of a Sync that delivered only the present Node. It is nil
	// if no such Sync has failed.
	NodeErr error
	// Pending is the number of services that were received from the source and not
	// acknowledged. Some of them may wait only because another service fails.
	Pending int
	// PendingServices are the pending services that the driver delivers next, at most
	// 100.
	PendingServices []types.NamespacedName
	// Failing contains the pending services that failed themselves, in order of namespace
	// and name. Either a [Failed] named the service, or a Sync of this service alone failed.
	Failing []FailingService
}

// StuckFor returns the time for which work has waited without progress of the sink, or 0
// if no work waits. A health check compares this time with a limit.
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
	// NextRetry is the time at which the service is delivered again, unless it changes
	// earlier.
	NextRetry time.Time
}

// Status returns the state of the driver. It is safe for concurrent use. Its running time
// depends only on the number of pending services.
func (d *Driver) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.status
	s.Name = d.opts.Name
	if s.WaitingSince.After(time.Now()) {
		s.WaitingSince = time.Time{} // in the minimum interval, no work counts as waiting
	}
	s.LastProgress = d.lastProgress()
	s.NodeErr = d.node.err
	s.Pending = len(d.pending.byKey)
	if d.isSynced() {
		s.Revision = d.present()
	}
	s.PendingServices = d.pending.first(maxPendingListed)
	for _, p := range d.pending.byKey {
		if p.failures > 0 {
			s.Failing = append(s.Failing, FailingService{p.key, p.err, p.failures, p.retryAt})
		}
	}
	slices.SortFunc(s.Failing, func(a, b FailingService) int { return ordering.Keys(a.Key, b.Key) })
	return s
}

// lastProgress returns the value of Status.LastProgress.
func (d *Driver) lastProgress() time.Time {
	if at := d.progress.Load(); at != 0 {
		return d.created.Add(time.Duration(at))
	}
	return time.Time{}
}

const maxPendingListed = 100

// report logs the result of a Sync and calls the observer with it.
func (d *Driver) report(ctx context.Context, result SyncResult, failed Failed) {
	log := klog.FromContext(ctx)
	switch {
	case ctx.Err() != nil:
		log.V(2).Info("Context ended during Sync", "result", result.Err)
	case len(failed) > 0:
		logFailed(log, failed)
	case result.Err != nil:
		d.failedSyncs++
		log.Error(result.Err, "Sync failed; retrying", "pass", !result.PassStart.IsZero(), "services", result.Services, "failures", d.status.Failures)
	default:
		if log := log.V(4); log.Enabled() {
			log.Info("Synced", "pass", !result.PassStart.IsZero(), "services", result.Services, "revision", d.position, "took", result.Duration)
		}
	}
	if (result.Err == nil || len(failed) > 0) && d.failedSyncs > 0 && (result.PassStart.IsZero() || result.Passed) && d.search.limit == 0 {
		log.Info("Sync works again", "failures", d.failedSyncs)
		d.failedSyncs = 0
	}
	result.Failing = d.pending.failing
	d.opts.Observer.Synced(result)
	d.opts.Observer.Pending(len(d.pending.byKey))
	if d.pass != nil && !d.pass.start.IsZero() && time.Since(later(d.pass.start, d.pass.logged)) >= progressInterval {
		d.pass.logged = time.Now()
		log.Info("Delivering all services", "delivered", d.pass.count, "pending", len(d.pending.byKey), "after", d.pass.logged.Sub(d.pass.start).Round(time.Millisecond))
	}
	if result.Passed {
		log.Info("Delivered all services", "failing", result.Failing, "duration", time.Since(result.PassStart))
	}
}

// progressInterval is the time between the lines in the log about a long pass.
const progressInterval = 5 * time.Second

// maxLogged limits the services that one Sync logs.
const maxLogged = 10

// logRecovery logs which services of a Sync work again after failures. It is called
// before the changes are recorded as acknowledged.
func (d *Driver) logRecovery(ctx context.Context, changes []Change, failed Failed) {
	log := klog.FromContext(ctx)
	recovered := 0
	for _, c := range changes {
		s := d.pending.byKey[c.Key]
		if s == nil && d.pass != nil {
			s = d.pass.failedBefore[c.Key]
		}
		if _, fails := failed[c.Key]; fails || s == nil || s.failures == 0 || c.New == nil {
			continue
		}
		if recovered++; recovered <= maxLogged {
			log.Info("Service works again", "service", c.Key, "failures", s.failures)
		}
	}
	if recovered > maxLogged {
		log.Info("More services work again", "services", recovered-maxLogged)
	}
}

// logFailed logs the first failed services, and the number of further failed services.
func logFailed(log klog.Logger, failed Failed) {
	keys := slices.SortedFunc(maps.Keys(failed), ordering.Keys)
	for i, key := range keys {
		if i == maxLogged {
			log.Info("More services failed", "services", len(keys)-maxLogged)
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

// observeLatency calls Observer.Applied for each acknowledged change with a TriggerTime.
func (d *Driver) observeLatency(changes []Change, failed Failed) {
	now := time.Now()
	for _, c := range changes {
		if _, ok := failed[c.Key]; !ok && !c.TriggerTime.IsZero() {
			d.opts.Observer.Applied(max(now.Sub(c.TriggerTime), 0))
		}
	}
}
