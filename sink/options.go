// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"time"
)

// Options are a driver's settings. The zero value means the defaults.
type Options struct {
	// Name is the name of the sink in logs and in Status. Default: no name.
	Name string

	// MinInterval is the minimum time from the end of one Sync to the start of the next.
	// Changes in that time are merged. MinInterval does not delay the batches of a pass.
	// Default 0: the driver delivers changes as soon as no Sync runs. If changes are so
	// frequent that several wait at the same time, the driver pauses after each Sync to
	// gather changes. This pause is as long as the Sync, but at most 20 ms. Any positive
	// MinInterval replaces this behaviour.
	MinInterval time.Duration

	// BatchSize limits the size of a batch of a pass, and the total size of the retries
	// in a Sync. The size of a service is one plus its elements: frontends, endpoints ×
	// ports, and source ranges (see cluster.Options.MaxElements). The limit does not
	// apply to new changes of the source. Default 10,000. Services of size 4096 or more
	// are large, and are delivered alone. A sink that needs another default has the
	// method BatchSize() int.
	BatchSize int

	// If Once is true, Run returns nil as soon as a pass is complete and all services are
	// acknowledged. Run waits for services that failed at first.
	Once bool

	// Observer receives reports of the driver's work.
	Observer Observer
}

// Observer receives reports of a driver's work, for metrics. Each function may be nil.
// The driver calls one function at a time and waits until it returns.
type Observer struct {
	// Queued is called before a Sync that has new changes. The argument at is the time when
	// the driver noticed the first of these changes. Changes that do not affect this node do
	// not count.
	Queued func(at time.Time)
	// Pending is called before and after each Sync with the number of unacknowledged
	// services. Failing services count; services that the pass has not reached do not count.
	Pending func(services int)
	// Synced is called after each Sync.
	Synced func(SyncResult)
	// Applied is called for each acknowledged service that has a trigger time. The latency
	// is the time since the trigger time. Applied is not called for services that have not
	// changed, like most services in a pass.
	Applied func(latency time.Duration)
	// Verified is called after each Verify, unless changes interrupted the Verify.
	Verified func(err error)
}

// SyncResult is the result of one Sync.
type SyncResult struct {
	// PassStart is the start of the pass that the Sync belongs to. It is zero if the Sync
	// was not part of a pass. Passed reports whether the Sync completed the pass.
	PassStart time.Time
	Passed    bool
	// Services is the number of delivered services.
	Services int
	// Duration is the duration of the Sync.
	Duration time.Duration
	// Err is nil if all services were acknowledged, and a [*Failed] if some were not. With
	// any other error, nothing was acknowledged.
	Err error
	// Failing is the number of failed services that wait for a retry.
	Failing int
}

func (o Options) withDefaults(s Sink) Options {
	if sized, ok := As[interface{ BatchSize() int }](s); ok && o.BatchSize == 0 {
		o.BatchSize = sized.BatchSize()
	}
	o.BatchSize = cmp.Or(o.BatchSize, 10_000)
	o.Observer = o.Observer.withDefaults()
	return o
}

// withDefaults replaces nil functions with functions that do nothing.
func (o Observer) withDefaults() Observer {
	if o.Queued == nil {
		o.Queued = func(time.Time) {}
	}
	if o.Pending == nil {
		o.Pending = func(int) {}
	}
	if o.Synced == nil {
		o.Synced = func(SyncResult) {}
	}
	if o.Applied == nil {
		o.Applied = func(time.Duration) {}
	}
	if o.Verified == nil {
		o.Verified = func(error) {}
	}
	return o
}
