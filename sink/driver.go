// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Driver brings what a source has to a sink: see the package comment for how.
type Driver struct {
	src  Source
	sink Sink
	opts Options

	// The goroutine of Run alone uses these.
	notBefore time.Time // when the next Sync may begin
	verifyAt  time.Time // when the next Verify may begin, zero for never

	// The goroutine of Run writes what follows with mu held and reads it
	// without; everybody else reads it with mu held.
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
// [NewDriver] and [Driver.Run].
func Run(ctx context.Context, src Source, s Sink, opts Options) error {
	return NewDriver(src, s, opts).Run(ctx)
}

// Run starts the sink, drives it, and stops it. It returns the cause of ctx
// when ctx has ended, nil where Options.Once says so, and an error at once if
// the sink cannot be started, joined with that of Stop if there is one. It
// waits for a Sync that runs, so that nothing of the sink runs on.
//
// A driver runs once. Run begins by resetting src, and does not close it.
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
			return fmt.Errorf("start sink: %w", err)
		}
	}
	if s, ok := d.sink.(Stopper); ok {
		defer func() {
			stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.opts.StopTimeout)
			defer cancel()
			if stopErr := guard(stopCtx, "Stop", s.Stop); stopErr != nil {
				err = errors.Join(err, fmt.Errorf("stop sink: %w", stopErr))
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

// wait returns nil when there is something to tell the sink and it may be told,
// and an error when ctx has ended. Meanwhile it verifies.
func (d *Driver) wait(ctx context.Context) error {
	noted := false
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		now := d.opts.Clock.Now()
		changed := d.src.Changed()
		queued := isClosed(changed)
		if queued {
			if !noted {
				d.queued(now)
				noted = true
			}
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

// verify lets the sink verify until something is to do, as for sleep.
func (d *Driver) verify(ctx context.Context, wake time.Time, changed <-chan struct{}) {
	log := klog.FromContext(ctx)
	begin := d.opts.Clock.Now()
	verifyCtx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		d.sleep(verifyCtx, wake, changed)
		cancel()
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
		return
	case err != nil:
		log.Error(err, "Verifying failed")
	}
	d.opts.Observer.Verified(end.Sub(begin), err)
}

// step tells the sink what it does not have.
func (d *Driver) step(ctx context.Context) {
	u, err := d.src.Next()
	if err == nil && u == nil {
		err = errors.New("source has changed but has no update")
	}
	switch {
	case err != nil:
		err = fmt.Errorf("get update from source: %w", err)
		klog.FromContext(ctx).Error(err, "Nothing to tell the sink, will try again")
		d.update(func() { d.backOff(err) })
	case u.Full:
		d.syncFull(ctx, u)
	default:
		d.syncPartial(ctx, u)
	}
}

// syncFull tells the sink everything, whatever is pending included.
func (d *Driver) syncFull(ctx context.Context, u *Update) {
	var read atomic.Int64
	c := u.Changes
	c.Services = counted(u.Services, &read)
	c.NodeChanged = true
	result, failed, acked := d.sync(ctx, &c)
	result.Services = int(read.Load())
	d.update(func() {
		if !acked {
			d.backOff(result.Err)
			return
		}
		d.ack(u)
		d.synced = true
		d.status.FullSyncs++
		d.status.LastFullSync = d.status.LastSync
		before := d.pending
		d.pending = newPending()
		drawn := draw()
		for key, err := range failed {
			s := &unacked{key: key}
			if b := before.get(key); b != nil {
				s.failures = b.failures
			}
			d.fail(s, err, drawn)
		}
	})
	if acked {
		if _, ok := d.sink.(Verifier); ok && d.opts.VerifyInterval > 0 && d.verifyAt.IsZero() {
			d.verifyAt = d.status.LastSync.Add(d.opts.VerifyInterval)
		}
	} else {
		d.startOver()
	}
	d.report(ctx, result, failed)
}

// syncPartial tells the sink what changed and what is due again.
func (d *Driver) syncPartial(ctx context.Context, u *Update) {
	changes, added := d.merge(u)
	c := u.Changes
	c.Services = slices.Values(changes)
	c.NodeChanged = u.NodeChanged || d.nodePending
	if len(changes) == 0 && !c.NodeChanged {
		d.update(func() {
			d.advance(u)
			d.recovered()
		})
		return
	}
	d.opts.Observer.Pending(d.pending.len() + added)
	result, failed, acked := d.sync(ctx, &c)
	result.Services = len(changes)
	switch {
	case acked:
		d.update(func() { d.settle(u, changes, failed) })
		d.observeLatency(changes, failed)
		for key, err := range failed {
			if _, told := findChange(changes, key); !told {
				klog.FromContext(ctx).Error(err, "The sink failed a service that it was not told, will tell it", "service", key)
			}
		}
	case errors.Is(result.Err, ErrStartOver):
		d.update(func() { d.backOff(result.Err) })
		d.startOver()
	default:
		d.update(func() {
			d.backOff(result.Err)
			for _, c := range changes {
				d.pending.put(d.unacked(c))
			}
			if c.NodeChanged && !d.nodePending {
				d.nodePending, d.nodeSince = true, d.position
			}
			d.advance(u)
		})
	}
	d.report(ctx, result, failed)
}

// merge returns u's changes, together with the services that are due again, in
// order of their keys, each made a change from what was last acknowledged. It
// also returns how many of them are not pending.
//
// A pending service that has changed is told at once, whenever its retry is
// due: the change may be what it needs. Its backoff goes on from where it was.
func (d *Driver) merge(u *Update) (changes []Change, added int) {
	due := d.pending.due(d.opts.Clock.Now())
	for c := range u.Services {
		for len(due) > 0 && api.CompareKeys(due[0].key, c.Key) < 0 {
			changes = append(changes, due[0].retry(u.View(due[0].key)))
			due = due[1:]
		}
		if len(due) > 0 && due[0].key == c.Key {
			due = due[1:]
		}
		if s := d.pending.get(c.Key); s != nil {
			c = s.merge(c)
		} else {
			added++
		}
		changes = append(changes, c)
	}
	for _, s := range due {
		changes = append(changes, s.retry(u.View(s.key)))
	}
	return changes, added
}

// settle notes that the sink acknowledged changes, which bring it to u, except
// for what failed.
func (d *Driver) settle(u *Update, changes []Change, failed Failed) {
	drawn := draw()
	for key, err := range failed {
		c, told := findChange(changes, key)
		if !told {
			c.Key, c.Old = key, u.View(key)
		}
		d.fail(d.unacked(c), err, drawn)
	}
	for _, c := range changes {
		if _, ok := failed[c.Key]; !ok {
			d.pending.remove(c.Key)
		}
	}
	d.ack(u)
	d.status.PartialSyncs++
}

// unacked returns the service of c as one that was told and not acknowledged,
// and is due again at once.
func (d *Driver) unacked(c Change) *unacked {
	before := d.pending.get(c.Key)
	if before == nil {
		return &unacked{key: c.Key, old: c.Old, since: d.position, trigger: c.TriggerTime}
	}
	s := *before
	s.trigger = earlier(s.trigger, c.TriggerTime)
	s.retryAt = time.Time{}
	return &s
}

// fail notes that the sink failed s with err, and when it comes again.
func (d *Driver) fail(s *unacked, err error, drawn float64) {
	s.failures++
	s.err = err
	s.retryAt = d.opts.Clock.Now().Add(d.opts.Backoff.wait(s.failures, drawn))
	d.pending.put(s)
}

// sync calls the sink's Sync. It returns whether c was acknowledged, and which
// services of it were not.
func (d *Driver) sync(ctx context.Context, c *Changes) (result SyncResult, failed Failed, acked bool) {
	begin := d.opts.Clock.Now()
	d.update(func() {
		d.status.SyncingSince = begin
		if d.status.WaitingSince.IsZero() {
			d.status.WaitingSince = begin
		}
	})
	err := guard(ctx, "Sync", func(ctx context.Context) error { return d.sink.Sync(ctx, c) })
	end := d.opts.Clock.Now()
	d.update(func() { d.status.SyncingSince = time.Time{} })
	d.notBefore = end.Add(d.opts.MinInterval)
	failed, acked = acknowledged(err)
	if acked && len(failed) == 0 {
		err = nil
	}
	return SyncResult{Full: c.Full, Duration: end.Sub(begin), Err: err}, failed, acked
}

// acknowledged returns whether a Sync that returned err acknowledged what it
// was told, and which services it excepted.
func acknowledged(err error) (failed Failed, acked bool) {
	var f *Failed
	switch {
	case err == nil:
		return nil, true
	case errors.Is(err, ErrStartOver):
		return nil, false
	case !errors.As(err, &f):
		return nil, false
	case f == nil:
		return nil, true
	default:
		return *f, true
	}
}

// ack notes that a Sync that brings the sink to u was acknowledged.
func (d *Driver) ack(u *Update) {
	d.advance(u)
	d.nodePending = false
	d.status.LastSync = d.opts.Clock.Now()
	d.recovered()
}

// recovered notes that nothing waits, but for services with a retry of their own.
func (d *Driver) recovered() {
	d.status.WaitingSince = time.Time{}
	d.status.Err, d.status.Failures, d.status.NextAttempt = nil, 0, time.Time{}
}

// advance moves the source's position to u.
func (d *Driver) advance(u *Update) {
	d.src.Advance(u)
	d.position = u.Revision
}

// backOff notes that nothing was acknowledged because of err, and puts off the
// next Sync.
func (d *Driver) backOff(err error) {
	d.status.Failures++
	wait := d.opts.Backoff.wait(d.status.Failures, draw())
	d.notBefore = later(d.notBefore, d.opts.Clock.Now().Add(wait))
	d.status.Err, d.status.NextAttempt = err, d.notBefore
}

// startOver sees to it that the sink is told everything next.
func (d *Driver) startOver() {
	d.src.Reset()
	d.update(func() { d.synced = false })
}

// queued notes that changes wait.
func (d *Driver) queued(now time.Time) {
	d.update(func() {
		d.status.LastQueued = now
		if d.status.WaitingSince.IsZero() {
			d.status.WaitingSince = now
		}
	})
	d.opts.Observer.Queued(now)
}

// update changes what others may read, and wakes those who wait for it.
func (d *Driver) update(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	close(d.moved)
	d.moved = make(chan struct{})
}

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

// counted is services, and sets read to how many of them were read last time.
func counted(services iter.Seq[Change], read *atomic.Int64) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		n := int64(0)
		defer func() { read.Store(n) }()
		for c := range services {
			n++
			if !yield(c) {
				return
			}
		}
	}
}

// findChange returns the service's change in changes, which are in order.
func findChange(changes []Change, key types.NamespacedName) (Change, bool) {
	i, ok := slices.BinarySearchFunc(changes, key, func(c Change, key types.NamespacedName) int {
		return api.CompareKeys(c.Key, key)
	})
	if !ok {
		return Change{}, false
	}
	return changes[i], true
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
