// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Driver brings what a source has to a sink: see the package comment for how.
type Driver struct {
	src  Source
	sink Sink
	opts Options

	// The goroutine of Run alone uses these, and the one that watches for it
	// during a Verify.
	notBefore time.Time // when the next Sync may begin
	verifyAt  time.Time // when the next Verify may begin, zero for never
	noted     bool      // whether the changes that wait now were noted

	// The same goroutines write what follows with mu held and read it without;
	// everybody else reads it with mu held.
	mu      sync.Mutex
	started bool
	end     error         // not nil once Run has ended
	moved   chan struct{} // closed and renewed when something below has changed
	status  Status        // but for what Status adds
	pending pending

	// synced is whether the sink acknowledged a full Changes and has not asked
	// to start over since. If not, all it has to know comes in a full one.
	synced bool
	// position is the revision of the source's position.
	position uint64
	// nodePending is whether the node was told and not acknowledged, and
	// nodeSince the last revision at which the sink had the right one.
	nodePending bool
	nodeSince   uint64
}

// NewDriver returns a driver that brings what src has to s.
func NewDriver(src Source, s Sink, opts Options) *Driver {
	return &Driver{
		src:     src,
		sink:    s,
		opts:    opts.withDefaults(),
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
		if d.opts.Once && d.synced && d.pending.len() == 0 && !d.nodePending {
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

// wait returns nil when there is something to tell the sink and it may be told,
// and an error when ctx has ended. Meanwhile it verifies.
func (d *Driver) wait(ctx context.Context) error {
	d.noted = false
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		now := d.opts.Clock.Now()
		changed := d.src.Changed()
		queued := isClosed(changed)
		if queued {
			d.queued(now)
			changed = nil
		}
		retryAt, retry := d.pending.nextRetry()
		if d.nodePending {
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

// sleep returns at wake, unless that is zero, or when changed is closed, unless
// that is nil, or when ctx ends.
func (d *Driver) sleep(ctx context.Context, wake time.Time, changed <-chan struct{}) {
	var alarm <-chan time.Time
	if !wake.IsZero() {
		timer := d.opts.Clock.NewTimer(wake.Sub(d.opts.Clock.Now()))
		defer timer.Stop()
		alarm = timer.C()
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-alarm:
	}
}

// verify lets the sink verify until something is to do, as for sleep. It notes
// when that is, for a Verify may take its time.
func (d *Driver) verify(ctx context.Context, wake time.Time, changed <-chan struct{}) {
	log := klog.FromContext(ctx)
	begin := d.opts.Clock.Now()
	verifyCtx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		defer cancel()
		d.sleep(verifyCtx, wake, changed)
		switch {
		case verifyCtx.Err() != nil:
		case isClosed(changed):
			d.queued(d.opts.Clock.Now())
		default:
			d.waiting(d.opts.Clock.Now())
		}
	}()
	err := guard(verifyCtx, "Verify", d.sink.(Verifier).Verify)
	cutShort := verifyCtx.Err() != nil
	cancel()
	<-watched

	end := d.opts.Clock.Now()
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
	d.opts.Observer.Queued(now)
}

// waiting notes that there is something to tell the sink, which counts from when
// the sink may be told. As long as nothing waits, no failure puts that off: only
// the minimum interval does.
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
