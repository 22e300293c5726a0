// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"math/rand/v2"
	"time"
)

// Options are a driver's settings. The zero value means the defaults. See also
// [Driver.Validate].
type Options struct {
	// Name is the name of the sink in logs and in Status. Default: no name.
	Name string

	// MinInterval is the minimum time from the end of one Sync to the start of the next.
	// Changes in that time are merged. MinInterval does not delay the batches of a pass.
	// Default 0: the driver delivers changes as soon as no Sync runs.
	MinInterval time.Duration

	// BatchSize limits the size of a batch of a pass, and the total size of the retries in a
	// Sync. The size of a service is one, and its frontends, endpoints of ports, and source
	// ranges (see [api.Elements]). The limit does not apply to new changes of the source.
	// Default 10,000. Services of size 4096 or more are large, and are delivered alone.
	BatchSize int

	// Backoff defines how long the driver waits after a Sync that failed as a whole, and
	// before it delivers a failed service again.
	Backoff Backoff

	// For a [Verifier], VerifyInterval is the time from the end of one Verify to the start
	// of the next. If changes interrupt a Verify, the driver waits only a quarter of this
	// time. Default: the interval of the sink, see [Verifier]. If VerifyInterval
	// is negative, the driver never calls Verify.
	VerifyInterval time.Duration

	// For a [Stopper], StopTimeout is the time after which the context of Stop ends.
	// Default: the limit of the sink, see [Stopper].
	StopTimeout time.Duration

	// If Once is true, Run returns nil as soon as a pass is complete and all services are
	// acknowledged. Run waits for services that failed at first.
	Once bool

	// Observer receives reports of the driver's work.
	Observer Observer
}

// Backoff defines how long to wait after failures in a row. The wait is Initial after the
// first failure, and doubles with each further failure, up to Max.
type Backoff struct {
	// Initial is the first wait. Default 100 ms, or Max if that is shorter.
	Initial time.Duration
	// Max is the longest wait, before Jitter is added. Default 30 s, or Initial if that is
	// longer.
	Max time.Duration
	// Jitter limits the random time that is added to a wait, as a fraction of the wait. It
	// keeps nodes from retrying at the same time. Default 0.1; negative means none. Services
	// that fail in one Sync get the same random time, so that they are retried in one Sync.
	Jitter float64
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
	Verified func(took time.Duration, err error)
}

// SyncResult is the result of one Sync.
type SyncResult struct {
	// InPass reports whether the Sync was part of a pass.
	InPass bool
	// Passed reports whether the Sync was the last Sync of a pass. PassDuration is then the
	// duration of the pass, from the start of its first Sync.
	Passed       bool
	PassDuration time.Duration
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

func (o Options) withDefaults() Options {
	o.BatchSize = cmp.Or(o.BatchSize, 10_000)
	o.Backoff.Initial = cmp.Or(o.Backoff.Initial, min(100*time.Millisecond, cmp.Or(o.Backoff.Max, time.Hour)))
	o.Backoff.Max = cmp.Or(o.Backoff.Max, max(30*time.Second, o.Backoff.Initial))
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

// wait returns the time to wait after a number of failures in a row. It consists of the
// backoff and the jitter. The jitter grows with random, a number from 0 to 1.
func (b Backoff) wait(failures int, random float64) time.Duration {
	d := b.Initial
	for i := 1; i < failures && d < b.Max; i++ {
		d += min(d, b.Max-d)
	}
	return d + time.Duration(max(b.Jitter, 0)*random*float64(d))
}

// draw returns a random number for Backoff.wait.
func draw() float64 { return rand.Float64() }
