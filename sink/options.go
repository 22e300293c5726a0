// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"math/rand/v2"
	"time"
)

// Options are a driver's settings. The zero value is useful.
type Options struct {
	// Name says which sink this is, in logs and status. Default: no name.
	Name string

	// MinInterval is the least time from the end of one Sync to the start of the
	// next. Changes during that time come together. It does not delay the Syncs of a
	// pass. Default 0: changes are delivered as soon as the sink is free.
	MinInterval time.Duration

	// BatchSize limits the size of one Sync in a pass, and of the retries in one Sync:
	// the number of services plus that of their endpoints. A larger service comes
	// alone. Changes of the source are not limited. Default 10,000.
	BatchSize int

	// Backoff is how long to wait after a Sync that failed as a whole, and before a
	// service that failed is delivered again.
	Backoff Backoff

	// VerifyInterval is the time from the end of one Verify to the start of the
	// next, for a sink that is a [Verifier]. After one that changes cut short it is a
	// quarter of that. Default one minute; negative means never.
	VerifyInterval time.Duration

	// StopTimeout is how long a [Stopper] may take until its context ends.
	// Default: what a [Drainer] says, and ten seconds for others.
	StopTimeout time.Duration

	// Once makes Run end with nil as soon as a pass is complete and every service is
	// acknowledged, those included that failed at first.
	Once bool

	// Observer gets reports of what the driver does.
	Observer Observer
}

// Backoff is how the wait grows with each failure in a row: Initial after the
// first, then twice the wait before, up to Max.
type Backoff struct {
	// Initial is the first wait. Default 100 ms.
	Initial time.Duration
	// Max is the longest wait, before Jitter. Default 30 s.
	Max time.Duration
	// Jitter is the part of a wait, at random up to this, that is added to it,
	// so that many nodes do not fail in step. Default 0.1; negative means none.
	// Services that fail in one Sync get the same, so that they come again in one.
	Jitter float64
}

// Observer gets reports of what a driver does, for metrics. Each function may be nil.
// The driver calls one at a time and waits for it.
type Observer struct {
	// Queued is called before a Sync with new changes: at is when the driver noticed the
	// first. Changes in the source that this node does not see do not count.
	Queued func(at time.Time)
	// Pending is called before and after each Sync with the number of services that
	// the sink has not acknowledged, as far as known. Services that fail count. Those
	// that a pass has not reached do not.
	Pending func(services int)
	// Synced is called after each Sync.
	Synced func(SyncResult)
	// Applied is called for each acknowledged service with a trigger time: the time
	// since the oldest endpoint change in it. It is not called for services that a
	// pass delivers without a change: their changes are of any age.
	Applied func(latency time.Duration)
	// Verified is called after each Verify that was not cut short by changes.
	Verified func(took time.Duration, err error)
}

// SyncResult is the result of one Sync.
type SyncResult struct {
	// InPass says that the Sync was part of a pass.
	InPass bool
	// PassDuration is the duration of the pass that the Sync completed, from the start
	// of its first Sync. Passed says that the Sync completed a pass.
	Passed       bool
	PassDuration time.Duration
	// Services is the number of services that were delivered.
	Services int
	// Duration is how long the Sync took.
	Duration time.Duration
	// Err is nil if everything was acknowledged, a [*Failed] if everything except some
	// services was.
	Err error
	// Failing is the number of services that failed and wait for their retry.
	Failing int
}

func (o Options) withDefaults() Options {
	o.BatchSize = cmp.Or(o.BatchSize, 10_000)
	o.Backoff.Initial = cmp.Or(o.Backoff.Initial, 100*time.Millisecond)
	o.Backoff.Max = cmp.Or(o.Backoff.Max, 30*time.Second)
	o.Backoff.Jitter = cmp.Or(o.Backoff.Jitter, 0.1)
	o.VerifyInterval = cmp.Or(o.VerifyInterval, time.Minute)
	o.Observer = o.Observer.withDefaults()
	return o
}

// withDefaults puts functions that do nothing where there are none.
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
		o.Verified = func(time.Duration, error) {}
	}
	return o
}

// wait returns how long to wait after so many failures in a row. What is drawn,
// from 0 to 1, says how much of the jitter is in it.
func (b Backoff) wait(failures int, drawn float64) time.Duration {
	d := b.Initial
	for i := 1; i < failures && d < b.Max; i++ {
		d *= 2
	}
	d = min(d, b.Max)
	return d + time.Duration(max(b.Jitter, 0)*drawn*float64(d))
}

// draw returns a random number for wait.
func draw() float64 { return rand.Float64() }
