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

// Driver delivers the services of a Source to a Sink. The package comment describes how.
type Driver struct {
	src  Source
	sink Sink
	opts Options

	kick     chan struct{} // wakes Run after StartOver
	progress atomic.Int64  // last progress of the sink, in Unix nanoseconds

	// Only the goroutine of Run uses the fields below. During a Verify, a helper
	// goroutine uses them instead.
	notBefore time.Time // when the next Sync may begin
	verifyAt  time.Time // when the next Verify may begin, zero for never
	noted     bool      // the waiting changes are counted in status already
	pass      *delivery // the current pass, nil if there is none
	search    search
	wasAlone  bool // the last Sync delivered one isolated service

	// The same goroutines write the fields below with mu held and read them without it.
	// All other goroutines hold mu.
	mu      sync.Mutex
	started bool
	end     error         // not nil once Run has ended
	moved   chan struct{} // closed and replaced when a field below changes
	status  Status        // lacks the fields that Driver.Status fills in
	pending pending

	// The flag synced reports that the last pass is complete. The flag restart reports
	// that StartOver was called and the new pass has not begun.
	synced, restart bool
	// position is the revision up to which everything is acknowledged or pending.
	position uint64
	// The flag nodePending reports that the node differs from the one last acknowledged.
	// The field nodeSince is the last revision at which it did not differ.
	nodePending bool
	nodeSince   uint64
}

// NewDriver returns a driver that delivers the services of src to s.
func NewDriver(src Source, s Sink, opts Options) *Driver {
	if p, ok := s.(Poller); ok && opts.VerifyInterval == 0 {
		opts.VerifyInterval = p.VerifyInterval()
	}
	return &Driver{
		src:     src,
		sink:    s,
		opts:    opts.withDefaults(),
		kick:    make(chan struct{}, 1),
		moved:   make(chan struct{}),
		pending: newPending(),
	}
}

// Run drives s with the services of src until ctx ends. It combines [NewDriver] and
// [Driver.Run]. The caller closes src afterwards.
func Run(ctx context.Context, src Source, s Sink, opts Options) error {
	return NewDriver(src, s, opts).Run(ctx)
}

// Run starts the sink, drives it, and stops it. It returns the cause of ctx when ctx
// ends, and nil when Options.Once is done. If Start fails, it returns the error
// immediately. If Stop fails too, Run joins both errors. Run waits for a running Sync, so
// no method of the sink runs after it.
//
// A driver runs only once. Run first resets the source. It does not close the source: the
// code that created it does so after Run returns.
func (d *Driver) Run(ctx context.Context) (err error) {
	d.mu.Lock()
	started := d.started
	d.started = true
	d.mu.Unlock()
	if started {
		return errors.New("driver is already running or has ended")
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
				log.V(2).Info("Context ended during Start", "result", err)
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

// stopTimeout returns the time limit of the sink's Stop.
func (d *Driver) stopTimeout() time.Duration {
	timeout := d.opts.StopTimeout
	if s, ok := d.sink.(Drainer); ok && timeout == 0 {
		timeout = s.StopTimeout()
	}
	return cmp.Or(timeout, 10*time.Second)
}

// StartOver begins a new pass. Call it when the dataplane lost its state. It returns
// immediately. The pass begins as soon as no Sync runs; neither a backoff nor
// Options.MinInterval delays it. StartOver is safe for concurrent use.
func (d *Driver) StartOver() {
	d.update(func() { d.restart, d.synced = true, false })
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// wait returns nil when the next Sync is due, and an error when ctx ends. It calls Verify
// while it waits.
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
			d.noteChanges(now)
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

		var wake time.Time // zero if nothing is scheduled
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

// isDone reports whether a pass is complete and every service is acknowledged.
func (d *Driver) isDone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.synced && len(d.pending.byKey) == 0 && !d.nodePending
}

// sleep returns at the time wake, when changed is closed, after a StartOver, or when ctx
// ends. It ignores a zero wake and a nil changed.
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

// verify calls Verify, and cancels it when one of the events that end sleep happens. It
// records waiting changes itself, because a Verify may take long to return.
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
			d.noteChanges(time.Now())
		default:
			d.noteWork(time.Now())
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
		log.Info("Verify requested a new pass", "reason", err)
		d.startOver()
	case cutShort:
		d.verifyAt = end.Add(d.opts.VerifyInterval / 4)
		return
	case err != nil:
		log.Error(err, "Verify failed")
	}
	d.opts.Observer.Verified(end.Sub(begin), err)
}

// noteChanges records that changes wait, unless that is already recorded.
func (d *Driver) noteChanges(now time.Time) {
	if d.noted {
		return
	}
	d.noted = true
	d.update(func() { d.status.LastQueued = now })
	d.noteWork(now)
}

// noteWork records that there is something to deliver. The wait counts from the earliest
// time of the next Sync, so Options.MinInterval is not part of it.
func (d *Driver) noteWork(now time.Time) {
	d.update(func() {
		if d.status.WaitingSince.IsZero() {
			d.status.WaitingSince = later(now, d.notBefore)
		}
	})
}

// update calls change with mu held and wakes all waiters.
func (d *Driver) update(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	close(d.moved)
	d.moved = make(chan struct{})
}

// guard calls a method of the sink and turns a panic into an error.
func guard(ctx context.Context, method string, f func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic in %s: %v", method, r)
			klog.FromContext(ctx).Error(err, "Sink panicked", "stack", string(debug.Stack()))
		}
	}()
	return f(ctx)
}

// label returns the name of the sink for errors.
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

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// earlier returns the earlier time. It ignores zero times.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
