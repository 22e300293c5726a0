// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

// Driver brings what a source has to a sink: see the package comment for how.
type Driver struct {
	src  Source
	sink Sink
	opts Options

	kick     chan struct{} // wakes Run after StartOver
	progress atomic.Int64  // when the sink last made progress, in Unix nanoseconds

	// Only the goroutine of Run uses these, and the one that watches for it during a
	// Verify.
	notBefore time.Time // when the next Sync may begin
	verifyAt  time.Time // when the next Verify may begin, zero for never
	noted     bool      // whether the changes that wait now were noted
	pass      *delivery // the pass under way, nil if there is none
	search    search
	wasAlone  bool // whether the last Sync was of a service that comes alone

	// The same goroutines write these with mu held and read them without. All others
	// hold mu.
	mu      sync.Mutex
	started bool
	end     error         // not nil once Run has ended
	moved   chan struct{} // closed and renewed when something below has changed
	status  Status        // without the fields that Driver.Status fills in
	pending pending

	// synced says that the last pass is complete, and restart that StartOver was
	// called and the driver has not begun the new pass.
	synced, restart bool
	// position is the revision up to which everything is acknowledged or pending.
	position uint64
	// nodePending says that the node differs from the one that the sink acknowledged
	// last, and nodeSince is the last revision at which it did not.
	nodePending bool
	nodeSince   uint64
}

// NewDriver returns a driver that brings what src has to s.
func NewDriver(src Source, s Sink, opts Options) *Driver {
	return &Driver{
		src:     src,
		sink:    s,
		opts:    opts.withDefaults(),
		kick:    make(chan struct{}, 1),
		moved:   make(chan struct{}),
		pending: newPending(),
	}
}

// Run drives s with what src has until ctx ends. It is short for
// [NewDriver] and [Driver.Run]. The caller closes src afterwards.
func Run(ctx context.Context, src Source, s Sink, opts Options) error {
	return NewDriver(src, s, opts).Run(ctx)
}

// Run starts the sink, drives it, and stops it. It returns the cause of ctx
// when ctx has ended, nil where Options.Once says so, and an error at once if
// the sink cannot be started, joined with that of Stop if there is one. It
// waits for a Sync that runs, so that nothing of the sink runs on.
//
// A driver runs once. Run begins by resetting the source, and does not close it:
// who made the source does, after Run has returned.
func (d *Driver) Run(ctx context.Context) (err error) {
	d.mu.Lock()
	started := d.started
	d.started = true
	d.mu.Unlock()
	if started {
		return errors.New("driver runs already, or has ended")
	}
	end := errEnded
	defer func() {
		if err != nil {
			end = fmt.Errorf("%w: %w", errEnded, err)
		}
		d.update(func() { d.end = end })
	}()

	log := klog.FromContext(ctx)
	if d.opts.Name != "" {
		log = log.WithValues("sink", d.opts.Name)
		ctx = klog.NewContext(ctx, log)
	}
	if s, ok := d.sink.(Starter); ok {
		if err := guard(ctx, "Start", s.Start); err != nil {
			if ctx.Err() != nil {
				log.V(2).Info("Ended while starting", "result", err)
				return context.Cause(ctx)
			}
			return fmt.Errorf("start %s: %w", d.label(), err)
		}
	}
	if s, ok := d.sink.(Stopper); ok {
		defer func() {
			stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.stopTimeout())
			defer cancel()
			if stopErr := guard(stopCtx, "Stop", s.Stop); stopErr != nil {
				err = errors.Join(err, fmt.Errorf("stop %s: %w", d.label(), stopErr))
			}
		}()
	}
	d.src.Reset()
	for {
		if err := d.wait(ctx); err != nil {
			return err
		}
		d.step(ctx)
		if d.opts.Once && d.isDone() {
			return nil
		}
	}
}

// stopTimeout returns how long the sink may take to stop.
func (d *Driver) stopTimeout() time.Duration {
	timeout := d.opts.StopTimeout
	if s, ok := d.sink.(Drainer); ok && timeout == 0 {
		timeout = s.StopTimeout()
	}
	return cmp.Or(timeout, 10*time.Second)
}

// StartOver makes the driver begin a new pass, for a caller that knows that the
// dataplane lost its state. It returns immediately. The pass begins as soon as no Sync
// runs: neither a backoff nor Options.MinInterval delays it. StartOver may be called at
// any time from any goroutine.
func (d *Driver) StartOver() {
	d.update(func() { d.restart, d.synced = true, false })
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// wait returns nil when the next Sync is due, and an error when ctx has ended.
// Meanwhile it verifies.
func (d *Driver) wait(ctx context.Context) error {
	d.noted = false
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		d.handleRestart()
		now := time.Now()
		changed := d.src.Changed()
		queued := isClosed(changed)
		if queued {
			d.queued(now)
			changed = nil
		}
		retryAt, retry := d.pending.nextRetry()
		if d.nodePending || d.pass != nil {
			retryAt, retry = time.Time{}, true
		}
		due := queued || retry && !retryAt.After(now)
		if due && !d.notBefore.After(now) {
			return nil
		}

		var wake time.Time // zero for never
		switch {
		case due:
			wake = d.notBefore
		case retry:
			wake = later(retryAt, d.notBefore)
		}
		if !due && !d.verifyAt.IsZero() {
			if !d.verifyAt.After(now) {
				d.verify(ctx, wake, changed)
				continue
			}
			if wake.IsZero() || d.verifyAt.Before(wake) {
				wake = d.verifyAt
			}
		}
		d.sleep(ctx, wake, changed)
	}
}

// handleRestart resets the source if StartOver was called.
func (d *Driver) handleRestart() {
	d.mu.Lock()
	restart := d.restart
	if d.restart {
		d.restart, d.status.NextAttempt = false, time.Time{}
	}
	d.mu.Unlock()
	if restart {
		d.src.Reset()
		d.notBefore = time.Time{}
	}
}

// isDone reports whether a pass is complete and the sink has acknowledged everything.
func (d *Driver) isDone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.synced && len(d.pending.byKey) == 0 && !d.nodePending
}

// sleep returns at wake, unless that is zero, or when changed is closed, unless
// that is nil, or when StartOver is called, or when ctx ends.
func (d *Driver) sleep(ctx context.Context, wake time.Time, changed <-chan struct{}) {
	var alarm <-chan time.Time
	if !wake.IsZero() {
		timer := time.NewTimer(time.Until(wake))
		defer timer.Stop()
		alarm = timer.C
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-alarm:
	case <-d.kick:
	}
}

// verify lets the sink verify until something is to do, as for sleep. It notes
// when that is, for a Verify may take its time.
func (d *Driver) verify(ctx context.Context, wake time.Time, changed <-chan struct{}) {
	log := klog.FromContext(ctx)
	begin := time.Now()
	verifyCtx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		defer cancel()
		d.sleep(verifyCtx, wake, changed)
		switch {
		case verifyCtx.Err() != nil:
		case isClosed(changed):
			d.queued(time.Now())
		default:
			d.waiting(time.Now())
		}
	}()
	err := guard(verifyCtx, "Verify", d.sink.(Verifier).Verify)
	cutShort := verifyCtx.Err() != nil
	cancel()
	<-watched

	end := time.Now()
	d.verifyAt = end.Add(d.opts.VerifyInterval)
	switch {
	case errors.Is(err, ErrStartOver):
		log.Info("The sink verified and starts over", "reason", err)
		d.startOver()
	case cutShort:
		d.verifyAt = end.Add(d.opts.VerifyInterval / 4)
		return
	case err != nil:
		log.Error(err, "Verifying failed")
	}
	d.opts.Observer.Verified(end.Sub(begin), err)
}

// queued notes that changes wait, unless that was noted already.
func (d *Driver) queued(now time.Time) {
	if d.noted {
		return
	}
	d.noted = true
	d.update(func() { d.status.LastQueued = now })
	d.waiting(now)
}

// waiting notes that there is something to deliver. That counts from when a Sync may
// begin: the minimum interval does not count.
func (d *Driver) waiting(now time.Time) {
	d.update(func() {
		if d.status.WaitingSince.IsZero() {
			d.status.WaitingSince = later(now, d.notBefore)
		}
	})
}

// update changes what others may read, and wakes those who wait for it.
func (d *Driver) update(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	close(d.moved)
	d.moved = make(chan struct{})
}

// guard calls a method of the sink and makes an error of a panic.
func guard(ctx context.Context, method string, f func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic in %s: %v", method, r)
			klog.FromContext(ctx).Error(err, "The sink panicked", "stack", string(debug.Stack()))
		}
	}()
	return f(ctx)
}

// label names the sink in errors.
func (d *Driver) label() string {
	if d.opts.Name == "" {
		return "sink"
	}
	return "sink " + d.opts.Name
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// later returns the later time.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// earlier returns the earlier time, of those that are not zero.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
