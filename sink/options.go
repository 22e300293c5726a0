// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"math/rand/v2"
	"time"
)

// Options are a driver's settings. The zero value is useful.
type Options struct {
	// Name identifies the sink in logs and status. Default: no name.
	Name string

	// MinInterval is the minimum time from the end of one Sync to the start of the next.
	// Changes in that time are merged. It does not delay the batches of a pass. Default
	// 0: the driver delivers changes as soon as the sink is free.
	MinInterval time.Duration

	// BatchSize limits the size of a Sync of a pass, and the retries in one Sync. The
	// size is the number of services plus the number of their endpoints. A larger service
	// is delivered in a Sync of its own. The limit does not apply to new changes of the
	// source. Default 10,000.
	BatchSize int

	// Backoff is the wait after a Sync that failed as a whole, and before a failed
	// service is delivered again.
	Backoff Backoff

	// VerifyInterval is the time from the end of one Verify to the start of the next, for
	// a [Verifier]. After a Verify that changes interrupted, a quarter of it applies.
	// Default: the VerifyInterval of a [Poller], else one minute; negative means never.
	VerifyInterval time.Duration

	// StopTimeout limits Stop of a [Stopper]: its context ends after that time. Default:
	// the StopTimeout of a [Drainer], else ten seconds.
	StopTimeout time.Duration

	// Once makes Run return nil when a pass is complete and every service is
	// acknowledged, including services that failed at first.
	Once bool

	// Observer receives reports of the driver's work.
	Observer Observer
}

// Backoff defines the wait after failures in a row: Initial after the first failure,
// doubled after each further one, up to Max.
type Backoff struct {
	// Initial is the first wait. Default 100 ms.
	Initial time.Duration
	// Max is the longest wait, before Jitter. Default 30 s.
	Max time.Duration
	// Jitter is the maximum random part that is added to a wait, so that nodes do not
	// retry in step. Default 0.1; negative means none. Services that fail in one Sync get
	// the same jitter, so that one Sync retries them together.
	Jitter float64
}

// Observer receives reports of a driver's work, for metrics. Each function may be nil.
// The driver makes one call at a time and waits for it to return.
type Observer struct {
	// Queued is called before a Sync with new changes. The argument at is when the driver
	// noticed the first of them. Changes that do not affect this node do not count.
	Queued func(at time.Time)
	// Pending is called before and after each Sync with the number of unacknowledged
	// services known so far. The number includes failing services. It excludes services
	// that the pass has not reached.
	Pending func(services int)
	// Synced is called after each Sync.
	Synced func(SyncResult)
	// Applied is called for each acknowledged service that has a trigger time. The
	// argument latency is the time since the service's oldest endpoint change. Applied is
	// not called for services that a pass delivers unchanged.
	Applied func(latency time.Duration)
	// Verified is called after each Verify that changes did not interrupt.
	Verified func(took time.Duration, err error)
}

// SyncResult is the result of one Sync.
type SyncResult struct {
	// InPass reports whether the Sync was part of a pass.
	InPass bool
	// Passed reports whether the Sync completed a pass. PassDuration is the duration of
	// that pass, from the start of its first Sync.
	Passed       bool
	PassDuration time.Duration
	// Services is the number of delivered services.
	Services int
	// Duration is how long the Sync took.
	Duration time.Duration
	// Err is nil if all services were acknowledged, and a [*Failed] if some were not. Any
	// other error means that nothing was.
	Err error
	// Failing is the number of failed services that wait for a retry.
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
		o.Verified = func(time.Duration, error) {}
	}
	return o
}

// wait returns the time to wait after this number of failures in a row. The random number
// drawn, from 0 to 1, selects the part of the jitter.
func (b Backoff) wait(failures int, drawn float64) time.Duration {
	d := b.Initial
	for i := 1; i < failures && d < b.Max; i++ {
		d *= 2
	}
	d = min(d, b.Max)
	return d + time.Duration(max(b.Jitter, 0)*drawn*float64(d))
}

// draw returns a random number for Backoff.wait.
func draw() float64 { return rand.Float64() }
