// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// step tells the sink what it does not have.
func (d *Driver) step(ctx context.Context) {
	d.waiting(d.opts.Clock.Now())
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
	d.src.Advance(u) // so that what comes next is seen; if this fails it starts over anyway
	ahead := ahead{base: u.Revision, reached: u.Revision, told: map[types.NamespacedName]*unacked{}}
	c.Meanwhile = func() []Change { return d.meanwhile(&ahead) }
	result, failed, acked := d.sync(ctx, &c)
	result.Services = int(read.Load())
	d.update(func() {
		if !acked {
			d.backOff(result.Err)
			return
		}
		d.ack()
		d.position = ahead.reached
		d.synced = true
		d.status.FullSyncs++
		d.status.LastFullSync = d.status.LastSync
		before := d.pending
		d.pending = newPending()
		for _, s := range ahead.told {
			d.pending.put(s)
		}
		drawn := draw()
		for key, err := range failed {
			s := &unacked{key: key}
			if told := ahead.told[key]; told != nil {
				s.trigger = told.trigger
			}
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

// ahead is what a sink was told by Meanwhile, in a full Sync of what was at the
// revision base: services that are pending when it ends, and the position then.
type ahead struct {
	base, reached uint64
	told          map[types.NamespacedName]*unacked
}

// meanwhile returns what changed since a.reached, and notes it in a. What is no
// difference of services alone comes after the full Sync.
func (d *Driver) meanwhile(a *ahead) []Change {
	if !isClosed(d.src.Changed()) {
		return nil
	}
	d.noted = false
	d.queued(d.opts.Clock.Now())
	u, err := d.src.Next()
	if err != nil || u == nil || u.Full || u.NodeChanged {
		return nil
	}
	changes := slices.Collect(u.Services)
	for _, c := range changes {
		if s := a.told[c.Key]; s != nil {
			s.trigger = earlier(s.trigger, c.TriggerTime)
		} else {
			a.told[c.Key] = &unacked{key: c.Key, old: c.Old, since: a.base, trigger: c.TriggerTime}
		}
	}
	d.src.Advance(u)
	a.reached = u.Revision
	return changes
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
	d.advance(u)
	d.ack()
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
	d.update(func() { d.status.SyncingSince = begin })
	err := guard(ctx, "Sync", func(ctx context.Context) error { return d.sink.Sync(ctx, c) })
	end := d.opts.Clock.Now()
	d.update(func() { d.status.SyncingSince = time.Time{} })
	d.notBefore = end.Add(d.opts.MinInterval)
	failed, acked = Acknowledged(err)
	if acked && len(failed) == 0 {
		err = nil
	}
	return SyncResult{Full: c.Full, Duration: end.Sub(begin), Err: err}, failed, acked
}

// ack notes that a Sync was acknowledged.
func (d *Driver) ack() {
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
