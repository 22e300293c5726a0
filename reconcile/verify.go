// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

const (
	// pauseFactor times the duration of a comparison is the pause after it.
	pauseFactor = 50
	// After maxInterrupted interrupted comparisons in a row, the next comparison ignores its
	// context.
	maxInterrupted = 2
	// While drift recurs, the pause after it doubles from VerifyInterval up to
	// maxDriftPause.
	maxDriftPause = time.Minute
)

// verifier has the times of comparisons.
type verifier struct {
	// The next comparison never begins before pauseUntil. Unless the dataplane is suspect, it
	// also does not begin before compareAt.
	compareAt, pauseUntil time.Time
	driftPause            time.Duration
	interrupted           int
}

// VerifyInterval returns Options.VerifyInterval, see [sink.Verifier].
func (r *reconciler[K, V]) VerifyInterval() time.Duration { return max(r.opts.VerifyInterval, 0) }

// Suspect implements [Reconciler].
func (r *reconciler[K, V]) Suspect() { r.suspect.Store(true) }

// Verify implements [sink.Verifier]. During a pause, it returns immediately.
func (r *reconciler[K, V]) Verify(ctx context.Context) error {
	begin := time.Now()
	if !r.known {
		return errUnknown
	}
	if begin.Before(r.pauseUntil) || begin.Before(r.compareAt) && !r.suspect.Load() {
		return nil
	}
	if r.interrupted >= maxInterrupted {
		ctx = context.WithoutCancel(ctx)
	}
	r.known = false
	r.suspect.Store(false)
	drift, err := r.list(ctx, r.opts.Virtual)
	if err != nil {
		r.known = true
		r.suspect.Store(true)
		if ctx.Err() != nil {
			r.interrupted++
		}
		return err
	}
	r.interrupted = 0
	err = r.repair(context.WithoutCancel(ctx), drift)
	r.known = err == nil
	if len(drift) == 0 {
		r.driftPause = 0
	} else {
		r.driftPause = min(max(2*r.driftPause, r.opts.VerifyInterval), maxDriftPause)
	}
	if r.opts.VerifyInterval > 0 {
		now := time.Now()
		r.pauseUntil = now.Add(max(pauseFactor*now.Sub(begin), r.driftPause))
		r.compareAt = now.Add(r.opts.VerifyInterval)
	}
	return err
}

// list makes the record equal to the dataplane. It returns the objects that differed. It
// ignores a missing object for which ignored, if it is not nil, returns true. If List fails, list changes nothing.
func (r *reconciler[K, V]) list(ctx context.Context, ignored func(K) bool) (drift []*object[K, V], err error) {
	type listed struct {
		key   K
		value V
	}
	var others []listed // objects that differ
	err = r.dataplane.List(ctx, func(k K, v V) {
		if o := r.objects[k]; o != nil && o.exists && r.opts.Equal(o.value, v) {
			o.marked = true
		} else {
			others = append(others, listed{k, v})
		}
	})
	if err = cmp.Or(err, context.Cause(ctx)); err != nil {
		err = fmt.Errorf("list the dataplane: %w", err)
	} else {
		for _, l := range others {
			o := r.object(l.key)
			if !o.marked {
				drift = append(drift, o)
			}
			o.value, o.exists, o.marked = l.value, true, true
			o.old = o.old || o.users.owner == nil
		}
	}
	for k, o := range r.objects {
		if err == nil && o.exists && !o.marked && (ignored == nil || !ignored(k)) {
			r.remove(o)
			drift = append(drift, o)
		}
		o.marked = false
	}
	return drift, err
}

// repair repairs objects that another program has changed, and prunes stale objects.
func (r *reconciler[K, V]) repair(ctx context.Context, drift []*object[K, V]) error {
	if len(drift) > 0 {
		r.opts.Drifted(true)
	}
	plans := plans[K, V]{}
	var ops []Op[K, V]
	for _, o := range drift {
		if o.users.owner == nil {
			r.prune = !r.passing // a pass prunes at its end
		}
		// A user that fails now sets the object later, when it succeeds.
		if u := o.users.find(func(u *service[K, V]) bool { return !u.failed }); u != nil {
			o.users.own(u)
			if op, ok := r.setting(o, plans.of(r, u.view)[o.key]); ok {
				ops = append(ops, op)
			}
		}
	}
	r.sort(ops)
	for part := range slices.Chunk(ops, r.opts.MaxOps) {
		failed, err := r.applyParts(ctx, [][]Op[K, V]{part})
		if err = cmp.Or(err, failed.first()); err != nil {
			return startOver(fmt.Errorf("repair objects that another program changed: %w", err))
		}
	}
	if len(ops) > 0 {
		klog.FromContext(ctx).Info("Repaired objects that another program changed", "objects", len(ops))
	}
	if err := r.pruneStale(ctx); err != nil {
		return startOver(err)
	}
	if !r.prune {
		r.opts.Drifted(false)
	}
	return nil
}
