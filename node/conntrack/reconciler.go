// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options are a Reconciler's settings. The zero value selects the defaults.
type Options struct {
	// NodeAddrs provides the addresses of node ports. Default: none, so connections to node
	// ports are kept.
	NodeAddrs nodeaddr.Source
	// NetNS is the file descriptor of the network namespace whose table is read.
	// Default 0: the namespace of the process.
	NetNS int
	// Observe is called after each pass, for metrics. Default: none.
	Observe func(Pass)
	// Clock measures the duration of passes and the pauses between them. Default: the real
	// clock.
	Clock clock.Clock
}

// Pass is the result of one read of the connection-tracking table.
type Pass struct {
	// Seen is the number of entries that the kernel returned. Ended is the number of
	// entries that were deleted.
	Seen, Ended int
	// Duration is how long the pass took.
	Duration time.Duration
	// Err is the error of a failed pass, or nil. A failed pass is repeated.
	Err error
}

// Reconciler deletes the entries of stale connections. It has the methods of a sink, so
// that another sink can embed it. Sync does not return the failure of a pass. The
// Reconciler logs the failure, passes it to Options.Observe and retries.
type Reconciler struct {
	opts  Options
	queue *queue
	wake  chan struct{} // has a value while destinations may be queued
	late  []lateReplies // used only by the goroutine that Start starts

	stop    context.CancelFunc
	running chan struct{} // closed when the goroutine has ended

	mu    sync.Mutex
	ended chan struct{} // closed and replaced after each pass
	last  error         // the error of the last pass
	upTo  uint64        // passes have checked all destinations whose count in the queue is at most upTo
}

// New returns a Reconciler. It does nothing before Start.
func New(opts Options) *Reconciler {
	if opts.NodeAddrs == nil {
		opts.NodeAddrs = &nodeaddr.List{}
	}
	if opts.Observe == nil {
		opts.Observe = func(Pass) {}
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Reconciler{opts: opts, queue: newQueue(), wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Start implements sink.Starter. It starts the goroutine that reads the table, and does
// not wait for it. The goroutine runs until Stop, even after ctx ends.
func (r *Reconciler) Start(ctx context.Context) error {
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	r.running = make(chan struct{})
	go func() {
		defer close(r.running)
		r.run(ctx)
	}()
	return nil
}

// Stop implements sink.Stopper. It first waits until the stale connections of earlier
// Syncs are deleted, their deletion fails, or ctx ends.
func (r *Reconciler) Stop(ctx context.Context) error {
	err := r.Flush(ctx)
	r.stop()
	<-r.running
	return err
}

// Sync implements sink.Sink. Call it after c has been programmed, even if single services
// failed. It always returns nil.
func (r *Reconciler) Sync(_ context.Context, c *sink.Changes) error {
	if c.NodeChanged {
		nodeaddr.SetNode(r.opts.NodeAddrs, c.Node)
	}
	if r.queue.add(c) {
		r.signal()
	}
	return nil
}

// Flush waits until the stale connections of all earlier Syncs are deleted. It returns an
// error if ctx ends first or if the last pass failed.
func (r *Reconciler) Flush(ctx context.Context) error {
	_, count := r.queue.pending()
	for {
		r.mu.Lock()
		ended, last, upTo := r.ended, r.last, r.upTo
		r.mu.Unlock()
		if upTo >= count {
			return nil
		}
		if last != nil {
			return last
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return fmt.Errorf("wait for the deletion of stale connections: %w", context.Cause(ctx))
		}
	}
}

func (r *Reconciler) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

const (
	// After a pass, the goroutine pauses for pauseFactor times the duration of the pass. So
	// constant changes of a large table cost at most a fifth of a CPU.
	pauseFactor = 4
	// minBackoff and maxBackoff limit the pause after a failed pass.
	minBackoff = 100 * time.Millisecond
	maxBackoff = time.Minute
)

func (r *Reconciler) run(ctx context.Context) {
	log := klog.FromContext(ctx)
	backoff := minBackoff
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.lateDue():
			r.deleteLate(ctx)
			continue
		case <-r.wake:
		}
		p := r.pass(ctx)
		pause := pauseFactor * p.Duration
		switch {
		case ctx.Err() != nil:
			return
		case p.Err != nil:
			log.Error(p.Err, "Cannot delete stale connections", "retryIn", backoff)
			pause = backoff
			backoff = min(2*backoff, maxBackoff)
			r.signal()
		default:
			backoff = minBackoff
			log.V(4).Info("Deleted stale connections", "seen", p.Seen, "deleted", p.Ended, "duration", p.Duration)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.opts.Clock.After(pause):
		}
	}
}

// pass reads the table once and deletes the stale flows to all queued destinations.
func (r *Reconciler) pass(ctx context.Context) (p Pass) {
	start := r.opts.Clock.Now()
	filters, count := r.queue.pending()
	nodeAddrs := map[netip.Addr]bool{}
	addrs, _ := r.opts.NodeAddrs.Addresses()
	for _, a := range addrs {
		nodeAddrs[a] = true
	}
	stale := func(f flow) bool { return r.queue.isStale(f, nodeAddrs) }
	var errs []error
	for k, f := range filters {
		seen, ended, late, err := deleteStale(ctx, r.opts.NetNS, k, f, stale)
		p.Seen += seen
		p.Ended += ended
		if len(late) > 0 {
			r.late = append(r.late, lateReplies{k.family, late, time.Now().Add(minLateWait), minLateWait})
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", k.family, err))
		}
	}
	p.Err = errors.Join(errs...)
	p.Duration = r.opts.Clock.Since(start)
	r.opts.Observe(p)

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last = p.Err; p.Err == nil {
		r.queue.removeUpTo(count)
		r.upTo = count
	}
	close(r.ended)
	r.ended = make(chan struct{})
	return p
}
