// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"math/rand/v2"
	"time"

	"k8s.io/utils/clock"
)

// Options are a driver's settings. The zero value is useful.
type Options struct {
	// Name says which sink this is, in logs and status. Default: no name.
	Name string

	// MinInterval is the least time from the end of one Sync to the start of
	// the next; what changes meanwhile is told at once. Default 0: changes are
	// told as soon as the sink is free.
	MinInterval time.Duration

	// Backoff is how long to wait after a Sync that failed as a whole, and
	// before a service that failed is told again.
	Backoff Backoff

	// VerifyInterval is the time from the end of one Verify to the start of the
	// next, for a sink that is a [Verifier]. After one that changes cut short it is a
	// quarter of that. Default one minute; negative means never.
	VerifyInterval time.Duration

	// StopTimeout is how long a [Stopper] may take until its context ends.
	// Default: what a [Drainer] says, and ten seconds for others.
	StopTimeout time.Duration

	// Once makes Run end with nil as soon as the first full Changes has been
	// acknowledged to the last service, those included that failed at first.
	Once bool

	// Clock is what the driver reads the time from. Default: the real one.
	Clock clock.WithTicker

	// Observer is told what the driver does.
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

// Observer is told what a driver does, for metrics. Each function may be nil.
// They are called one at a time, and Run waits for them.
type Observer struct {
	// Queued is called when the driver notices a change that waits, the first
	// since it last looked.
	Queued func(at time.Time)
	// Pending is called with the number of services that the sink has not
	// acknowledged, as far as known: after each Sync, and before each one that
	// is not full. Services that fail count.
	Pending func(services int)
	// Synced is called after each Sync.
	Synced func(SyncResult)
	// Applied is called for each acknowledged service with a trigger time: how
	// long it took from the oldest endpoint change in it until now. Services of
	// a full Changes do not count: their changes are of any age.
	Applied func(latency time.Duration)
	// Verified is called after each Verify that was not cut short by changes.
	Verified func(took time.Duration, err error)
}

// SyncResult is what became of one Sync.
type SyncResult struct {
	// Full says that the sink was told everything.
	Full bool
	// Services is how many services it was told. Of a full Changes it is how
	// many the sink read the last time it went through them.
	Services int
	// Duration is how long it took.
	Duration time.Duration
	// Err is nil if everything was acknowledged, a [*Failed] if all but some
	// services was.
	Err error
	// Failing is how many services wait for their retry now.
	Failing int
}

func (o Options) withDefaults() Options {
	setDefault(&o.Backoff.Initial, 100*time.Millisecond)
	setDefault(&o.Backoff.Max, 30*time.Second)
	setDefault(&o.Backoff.Jitter, 0.1)
	setDefault(&o.VerifyInterval, time.Minute)
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	o.Observer = o.Observer.withDefaults()
	return o
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
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
