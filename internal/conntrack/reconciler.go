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

	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options are a Reconciler's settings. The zero value selects the defaults.
type Options struct {
	// NodeAddresses provides the addresses of node ports. Default: none, so connections to node
	// ports are kept.
	NodeAddresses nodeaddr.Source
	// NetNS is the file descriptor of the network namespace whose table is read.
	// Default 0: the namespace of the process.
	NetNS int
	// Observe is called after each read of the table, for metrics. Its arguments are the
	// number of entries that the kernel returned (seen), the number of entries that were
	// deleted (deleted), the duration (took), and the error. If err is not nil, the read
	// is repeated. Default: none.
	Observe func(seen, deleted int, took time.Duration, err error)

	clock clock.Clock // replaced by tests
}

// Reconciler deletes the entries of stale connections, and resets established TCP
// connections to lost endpoints. It has the methods of a sink, so that another sink can
// embed it.
//
// Call Sync after the changes have been programmed, even if single services failed. Sync
// always returns nil. If a read of the table fails, the Reconciler logs the failure, passes
// it to Options.Observe and retries. Start starts the goroutine that reads the table, and
// does not wait for it. The goroutine runs until Stop, even after the context of Start
// ends. Stop first waits until the stale connections of earlier Syncs are deleted, their
// deletion fails, or the context of Stop ends.
type Reconciler interface {
	sink.Sink
	sink.Starter
	sink.Stopper
	// Honours returns nodeview.Parameters.Resets.
	Honours() nodeview.Parameters
}

// reconciler implements [Reconciler].
type reconciler struct {
	opts  Options
	queue *queue
	wake  chan struct{} // has a value while destinations may be queued
	late  []lateReplies // used only by the goroutine that Start starts
	// The connections stay open while the goroutine runs, see netfilter.Conn.Close.
	reader, writer *netfilter.Conn

	resets *resetter

	stop    context.CancelFunc
	running chan struct{} // closed when the goroutine has ended

	mu    sync.Mutex
	ended chan struct{} // closed and replaced after each pass
	last  error         // the error of the last pass
	upTo  uint64        // passes have checked all destinations whose count in the queue is at most upTo
}

// New returns a Reconciler. It does nothing before Start.
func New(opts Options) Reconciler { return newReconciler(opts) }

func newReconciler(opts Options) *reconciler {
	if opts.NodeAddresses == nil {
		opts.NodeAddresses = nodeaddr.Of()
	}
	if opts.Observe == nil {
		opts.Observe = func(int, int, time.Duration, error) {}
	}
	if opts.clock == nil {
		opts.clock = clock.RealClock{}
	}
	return &reconciler{
		opts: opts, queue: newQueue(), wake: make(chan struct{}, 1), resets: newResetter(opts.NetNS), ended: make(chan struct{}),
		reader: netfilter.NewConn(opts.NetNS), writer: netfilter.NewConn(opts.NetNS),
	}
}

// Honours implements [Reconciler].
func (*reconciler) Honours() nodeview.Parameters { return nodeview.Parameters{Resets: true} }

// Start implements [Reconciler].
func (r *reconciler) Start(ctx context.Context) error {
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	r.running = make(chan struct{})
	go func() {
		defer close(r.running)
		defer r.reader.Close()
		defer r.writer.Close()
		var resets sync.WaitGroup
		resets.Go(func() { r.resets.run(ctx) })
		r.run(ctx)
		resets.Wait()
	}()
	return nil
}

// Stop implements [Reconciler].
func (r *reconciler) Stop(ctx context.Context) error {
	err := r.flush(ctx)
	r.stop()
	<-r.running
	return err
}

// Sync implements [Reconciler].
func (r *reconciler) Sync(_ context.Context, c *sink.Changes) error {
	if c.NodeChanged {
		nodeaddrs.SetNode(r.opts.NodeAddresses, c.Node)
	}
	if r.queue.add(c) {
		r.signal()
	}
	return nil
}

// flush waits until the stale connections of all earlier Syncs are deleted or reset. It
// returns an error if ctx ends first or if the last pass failed.
func (r *reconciler) flush(ctx context.Context) error {
	_, count := r.queue.pending()
	for {
		r.mu.Lock()
		ended, last, upTo := r.ended, r.last, r.upTo
		r.mu.Unlock()
		if upTo >= count {
			return r.resets.wait(ctx)
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

func (r *reconciler) signal() {
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

func (r *reconciler) run(ctx context.Context) {
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
		p := r.read(ctx)
		pause := pauseFactor * p.took
		switch {
		case ctx.Err() != nil:
			return
		case p.err != nil:
			log.Error(p.err, "Cannot delete stale connections", "retryIn", backoff)
			pause = backoff
			backoff = min(2*backoff, maxBackoff)
			r.signal()
		default:
			backoff = minBackoff
			if p.more {
				pause = max(pause, minBackoff)
				r.signal()
			}
			log.V(4).Info("Deleted stale connections", "seen", p.seen, "deleted", p.deleted, "duration", p.took)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.opts.clock.After(pause):
		}
	}
}

// outcome has the arguments of Options.Observe. The field more is true if another pass is
// necessary, because too many connections wait for their reset.
type outcome struct {
	seen, deleted int
	took          time.Duration
	err           error
	more          bool
}

// read reads the table once and deletes the stale flows to all queued destinations.
func (r *reconciler) read(ctx context.Context) (p outcome) {
	start := r.opts.clock.Now()
	filters, count := r.queue.pending()
	nodeAddrs := map[netip.Addr]bool{}
	addrs, _ := r.opts.NodeAddresses.Addresses()
	for _, a := range addrs {
		nodeAddrs[a] = true
	}
	stale := func(f flow) bool { return r.queue.isStale(f, nodeAddrs) }
	reset := func(c lostConnection) {
		if r.resets.add(c) {
			p.deleted++
		} else {
			p.more = true
		}
	}
	var errs []error
	for k, f := range filters {
		seen, deleted, late, err := deleteStale(ctx, r.reader, r.writer, k, f, stale, reset)
		p.seen += seen
		p.deleted += deleted
		if len(late) > 0 {
			r.late = append(r.late, lateReplies{k.family, late, time.Now().Add(minLateWait), minLateWait})
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", k.family, err))
		}
	}
	p.err = errors.Join(errs...)
	p.took = r.opts.clock.Since(start)
	r.opts.Observe(p.seen, p.deleted, p.took, p.err)

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last = p.err; p.err == nil && !p.more {
		r.queue.removeUpTo(count)
		r.upTo = count
	}
	close(r.ended)
	r.ended = make(chan struct{})
	return p
}
