// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/klog/v2"
)

// report tells the log and the observer what became of a Sync.
func (d *Driver) report(ctx context.Context, result SyncResult, failed Failed) {
	log := klog.FromContext(ctx)
	switch {
	case ctx.Err() != nil:
		log.V(2).Info("Ended while syncing", "result", result.Err)
	case len(failed) > 0:
		logFailed(log, failed)
	case result.Err != nil:
		log.Error(result.Err, "Sync failed, will be tried again", "full", result.Full, "failures", d.status.Failures)
	default:
		log.V(4).Info("Synced", "full", result.Full, "services", result.Services, "revision", d.position, "took", result.Duration)
	}
	result.Failing = d.pending.failing
	d.opts.Observer.Synced(result)
	d.opts.Observer.Pending(d.pending.len())
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
		log.Error(failed[key], "Service failed, will be tried again", "service", key)
	}
}

// observeLatency tells the observer how old the acknowledged changes are.
func (d *Driver) observeLatency(changes []Change, failed Failed) {
	now := d.opts.Clock.Now()
	for _, c := range changes {
		if _, ok := failed[c.Key]; !ok && !c.TriggerTime.IsZero() {
			d.opts.Observer.Applied(max(now.Sub(c.TriggerTime), 0))
		}
	}
}
