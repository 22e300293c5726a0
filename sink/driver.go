// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	// backoff applies after a Sync that failed as a whole, and to each failed service.
	backoff backoff
	// verifyInterval is negative if the driver never calls Verify.
	verifyInterval time.Duration

	kick chan struct{} // wakes Run after StartOver
	// progress is the time from created to the last progress of the sink. It is 0 if there
	// was none. It is not a wall-clock time, because a wall clock may be set.
	progress atomic.Int64
	created  time.Time

	// Only the goroutine of Run and the helper goroutine of verify use the fields below.
	notBefore time.Time // when the next Sync may begin
	passAt    time.Time // when the next pass may begin
	verifyAt  time.Time // when the next Verify may begin; zero means never
	noted     bool      // whether noteChanges was called since the method wait began
	queuedAt  time.Time // when noteChanges was last called
	search    search
	// failedSyncs counts the logged failures of whole Syncs since the last logged
	// recovery. During a pass or a search for faulty services, a success is not logged as
	// a recovery.
	failedSyncs int
	// verifyFailure is the error of the last Verify, or empty. Equal errors are logged once.
	verifyFailure string
	preparing     <-chan struct{} // closed when the next pass is prepared, see Preparer; may be nil
	gather        int             // changes are gathered after this many further Syncs
	immediate     bool            // changes are never gathered; only in tests
	wasAlone      bool            // the last Sync delivered one isolated service
	largeWaited   bool            // the last Sync delivered other services while a large one waited

	// The goroutine of Run writes the fields below with mu held and reads them without mu.
	// All other goroutines hold mu to read or write them.
	mu      sync.Mutex
	started bool
	end     error // not nil after the end of Run
	running running
	moved   chan struct{} // closed when a field below changes; nil if no goroutine waits
	status  Status        // without the fields that Driver.Status fills in
	pending pending
	pass    *delivery // the current pass, nil if there is none
	// position: a revision. All changes up to it are acknowledged or pending.
	position uint64
	// passed: the result of d.applied() at the end of the last pass.
	passed uint64
	node   nodeState

	// Any goroutine may write the fields below. All goroutines hold mu for them.
	//
	// passes: the number of passes that are needed. When Status.Passes reaches this number,
	// no further pass is needed. hurry: StartOver was called, so no backoff applies.
	passes uint64
	hurry  bool
}

// NewDriver returns a driver that delivers the services of src to s.
func NewDriver(src Source, s Sink, opts Options) *Driver {
	d := &Driver{
		src:            src,
		sink:           s,
		opts:           opts.withDefaults(s),
		backoff:        defaultBackoff,
		verifyInterval: time.Minute,
		kick:           make(chan struct{}, 1),
		created:        time.Now().Add(-1), // progress is never 0
		pending:        newPending(),
		passes:         1,
	}
	if p, ok := As[interface{ VerifyInterval() time.Duration }](s); ok {
		d.verifyInterval = cmp.Or(p.VerifyInterval(), d.verifyInterval)
	}
	return d
}

// Run delivers the services of src to s until ctx ends. It combines [NewDriver] and
// [Driver.Run]. The caller closes src afterwards.
func Run(ctx context.Context, src Source, s Sink, opts Options) error {
	return NewDriver(src, s, opts).Run(ctx)
}

// Run starts the sink, delivers services to it, and stops it. When ctx ends, Run returns
// the cause of ctx. With Options.Once, it returns nil when everything is acknowledged. If
// Start fails, it returns the error immediately. It also returns an error of Stop, joined
// with any other error. When Run has returned, no method of the sink runs any more.
//
// A driver runs only once. Run resets the source at the beginning, but does not close it.
// The code that created the source closes it after Run has returned. Run returns an error
// if a setting is invalid (see [Driver.Validate]) or if another running driver uses the
// source or the sink.
//
// If a method of the sink makes no progress for about eight seconds, Run logs its name.
// If ctx has ended and the method has not returned about eight seconds later, Run logs
// that, too.
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

	if err := d.Validate(); err != nil {
		return err
	}
	release, err := d.use()
	if err != nil {
		return err
	}
	defer release()
	log := klog.FromContext(ctx)
	if d.opts.Name != "" {
		log = log.WithValues("sink", d.opts.Name)
		ctx = klog.NewContext(ctx, log)
	}
	if s, ok := As[Starter](d.sink); ok {
		if err := d.call(ctx, "Start", s.Start); err != nil {
			if ctx.Err() != nil {
				log.V(2).Info("Context ended during Start", "result", err)
				return context.Cause(ctx)
			}
			return fmt.Errorf("start %s: %w", d.label(), err)
		}
	}
	if s, ok := As[Stopper](d.sink); ok {
		defer func() {
			stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.stopTimeout(ctx))
			defer cancel()
			if stopErr := d.call(stopCtx, "Stop", s.Stop); stopErr != nil {
				err = errors.Join(err, fmt.Errorf("stop %s: %w", d.label(), stopErr))
			}
		}()
	}
	d.src.Reset()
	silent := time.AfterFunc(hangAfter, func() { log.Info("Waiting for the source to provide services") })
	defer silent.Stop()
	for {
		if err := d.wait(ctx); err != nil {
			return err
		}
		silent.Stop()
		d.step(ctx)
		if d.opts.Once && d.isDone() {
			return nil
		}
	}
}

// stopTimeout returns the time limit of the sink's Stop.
func (d *Driver) stopTimeout(ctx context.Context) time.Duration {
	var timeout time.Duration
	if s, ok := As[interface{ StopTimeout() time.Duration }](d.sink); ok {
		_ = d.call(ctx, "StopTimeout", func(context.Context) error {
			timeout = s.StopTimeout()
			return nil
		})
	}
	if timeout <= 0 {
		return 10 * time.Second
	}
	return timeout
}

// StartOver requests a new pass. Call it when the dataplane has lost its state. It
// returns immediately; [Driver.WaitSynced] then waits for this pass. The pass begins when
// no Sync runs and the sink is prepared, see [Preparer]. It waits neither for a backoff nor
// for Options.MinInterval.
//
// If a pass is in progress, it continues, and the new pass begins after its end. So every
// pass ends, however often StartOver is called. Passes begin at least 100 ms apart. A
// Sync should not call StartOver, but return [ErrStartOver].
func (d *Driver) StartOver() {
	d.update(func() {
		d.requestPass()
		if d.status.SyncingSince.IsZero() {
			d.hurry = true
		}
	})
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// wait blocks until the next Sync is due. If ctx ends earlier, wait returns an error.
// While it blocks, it calls Verify whenever the time verifyAt has come.
func (d *Driver) wait(ctx context.Context) error {
	d.noted = false
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		d.handleStartOver(ctx)
		now := time.Now()
		changed := d.src.Changed()
		queued := isClosed(changed)
		if queued {
			d.noteChanges(now)
			changed = nil
		}
		retryAt, retry := d.pending.nextRetry()
		switch {
		case d.pass != nil || d.node.pending && d.node.failures == 0:
			retryAt, retry = time.Time{}, true
		case d.node.failures > 0:
			retryAt, retry = earlier(retryAt, d.node.retryAt), true
		}
		due := queued || retry && !retryAt.After(now)
		if due && !d.notBefore.After(now) {
			return nil
		}

		var wake time.Time // zero: sleep without a time limit
		switch {
		case due:
			wake = d.notBefore
		case retry:
			wake = later(retryAt, d.notBefore)
		}
		if !due && !d.verifyAt.IsZero() && d.preparing == nil {
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

// requestPass records that a new pass is needed. If the first Sync of a pass has begun,
// that pass does not suffice. The caller holds d.mu.
func (d *Driver) requestPass() {
	next := d.status.Passes + 1
	if d.pass != nil && !d.pass.start.IsZero() {
		next++
	}
	d.passes = max(d.passes, next)
}

// handleStartOver ends the wait for a backoff if StartOver was called. It begins a pass if
// one is needed, none is in progress, and the sink is prepared.
func (d *Driver) handleStartOver(ctx context.Context) {
	d.mu.Lock()
	// Before the first pass, the source has not synced. Its first update begins that pass.
	needed := d.pass == nil && d.status.Passes > 0 && !d.isSynced()
	d.mu.Unlock()
	begin := needed && d.prepare(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if begin || d.hurry {
		d.hurry, d.notBefore, d.status.NextAttempt = false, d.passAt, time.Time{}
	}
	if begin {
		d.begin()
	}
}

// prepare reports whether the sink is prepared for a pass. The first call for a pass begins
// the preparation.
func (d *Driver) prepare(ctx context.Context) bool {
	p, ok := As[Preparer](d.sink)
	if !ok {
		return true
	}
	if d.preparing == nil {
		_ = d.call(ctx, "PreparePass", func(ctx context.Context) error {
			d.preparing = p.PreparePass(ctx)
			return nil
		})
	}
	return d.preparing == nil || isClosed(d.preparing)
}

// isSynced reports whether a pass is complete and no newer pass is needed. The caller
// holds d.mu.
func (d *Driver) isSynced() bool { return d.status.Passes >= d.passes }

// isDone reports whether the pass is complete and everything is acknowledged.
func (d *Driver) isDone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.isSynced() && len(d.pending.byKey) == 0 && !d.node.pending
}

// sleep waits until the time wake, unless wake is zero. It returns earlier if the channel
// changed is closed, if StartOver is called, if the sink is prepared for a pass, or if ctx
// ends.
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
	case <-d.preparing:
	}
}

// verify calls the sink's Verify, and cancels it as soon as other work waits. Before the
// cancellation, verify sets Status.WaitingSince, because Verify may take long to return.
func (d *Driver) verify(ctx context.Context, wake time.Time, changed <-chan struct{}) {
	log := klog.FromContext(ctx)
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
	verifier, _ := As[Verifier](d.sink)
	err := brief(d.call(verifyCtx, "Verify", verifier.Verify))
	cutShort := verifyCtx.Err() != nil
	cancel()
	<-watched

	end := time.Now()
	d.verifyAt = end.Add(d.verifyInterval)
	failure := ""
	switch {
	case errors.Is(err, ErrStartOver):
		log.Info("Verify requested a new pass", "reason", err)
		d.update(d.requestPass)
	case cutShort:
		d.verifyAt = end.Add(d.verifyInterval / 4)
		return
	case err != nil:
		if failure = err.Error(); failure != d.verifyFailure {
			log.Error(err, "Verify failed; retrying")
		}
	case d.verifyFailure != "":
		log.Info("Verify works again")
	}
	d.verifyFailure = failure
	d.opts.Observer.Verified(err)
}

// noteChanges records that changes of the source wait, unless that is already recorded.
func (d *Driver) noteChanges(now time.Time) {
	if d.noted {
		return
	}
	d.noted = true
	d.queuedAt = now
	d.noteWork(now)
}

// noteWork sets Status.WaitingSince, if it is zero, to the later of the times now and
// notBefore. Waiting during Options.MinInterval does not count.
func (d *Driver) noteWork(now time.Time) {
	d.update(func() {
		if d.status.WaitingSince.IsZero() {
			d.status.WaitingSince = later(now, d.notBefore)
		}
	})
}

// update calls the function change with mu held, and wakes all waiting goroutines.
func (d *Driver) update(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	if d.moved != nil {
		close(d.moved)
		d.moved = nil
	}
}

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

// earlier returns the earlier of a and b. If one of them is zero, it returns the other.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
