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

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options are a Reconciler's settings. The zero value is useful.
type Options struct {
	// NodeAddrs are the addresses at which node ports are served. Default: none,
	// so that connections to node ports are left alone.
	NodeAddrs nodeaddr.Source
	// NetNS is the file descriptor of the network namespace whose connections
	// are meant. Default 0: that of the process.
	NetNS int
	// Observe is called after each pass, for metrics. Default: nobody is told.
	Observe func(Pass)
	// Clock is what backoff and pauses are measured with. Default: the real one.
	Clock clock.Clock
}

// Pass says what became of one look at the table of connections.
type Pass struct {
	// Seen is how many entries the kernel told of, and Ended how many were deleted.
	Seen, Ended int
	// Duration is how long it took.
	Duration time.Duration
	// Err is why it was cut short; what it was to look at is looked at again.
	Err error
}

// Reconciler ends connections that have become stale. It is a part of a
// sink and has its methods; nothing that fails in it is an error of the sink:
// it is logged, reported to Options.Observe and tried again.
type Reconciler struct {
	opts  Options
	notes *notes
	wake  chan struct{} // has a value while there may be something due

	stop    context.CancelFunc
	running chan struct{} // closed when there is no goroutine any more

	mu    sync.Mutex
	ended chan struct{} // closed and replaced after each pass
	last  error         // of the last pass
	upTo  uint64        // what the last pass that succeeded has done
}

// New returns a Reconciler that has nothing to do yet.
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
	return &Reconciler{opts: opts, notes: newNotes(), wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Start implements sink.Starter. It returns at once; what it starts goes on after
// the end of ctx, until Stop.
func (r *Reconciler) Start(ctx context.Context) error {
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	r.running = make(chan struct{})
	go func() {
		defer close(r.running)
		r.run(ctx)
	}()
	return nil
}

// Stop implements sink.Stopper: it lets what was noted be done first, unless that
// fails or takes longer than ctx.
func (r *Reconciler) Stop(ctx context.Context) error {
	err := r.Flush(ctx)
	r.stop()
	<-r.running
	return err
}

// Sync implements sink.Sink. It is to be called when c has been programmed, some
// services perhaps excepted, and always returns nil.
func (r *Reconciler) Sync(_ context.Context, c *sink.Changes) error {
	if c.NodeChanged {
		nodeaddr.SetNode(r.opts.NodeAddrs, c.Node)
	}
	if r.notes.add(c) {
		r.rouse()
	}
	return nil
}

// Flush waits until everything is done that Sync has noted by now. It returns an
// error if ctx ends before, or while passes fail.
func (r *Reconciler) Flush(ctx context.Context) error {
	_, count := r.notes.open()
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
			return fmt.Errorf("waiting for stale connections to be ended: %w", context.Cause(ctx))
		}
	}
}

func (r *Reconciler) rouse() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

const (
	// rest is how long a pause after a pass is, in durations of the pass, so that
	// large tables under constant change cost a fifth of a CPU at most.
	rest = 4
	// minBackoff and maxBackoff limit the pause after one that failed.
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
		case <-r.wake:
		}
		p := r.pass(ctx)
		pause := rest * p.Duration
		switch {
		case ctx.Err() != nil:
			return
		case p.Err != nil:
			log.Error(p.Err, "Stale connections are left for now", "retryIn", backoff)
			pause = backoff
			backoff = min(2*backoff, maxBackoff)
			r.rouse()
		default:
			backoff = minBackoff
			log.V(4).Info("Looked for stale connections", "seen", p.Seen, "ended", p.Ended, "duration", p.Duration)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.opts.Clock.After(pause):
		}
	}
}

// pass looks at the table once, for all that is due.
func (r *Reconciler) pass(ctx context.Context) (p Pass) {
	start := r.opts.Clock.Now()
	places, count := r.notes.open()
	nodeAddrs := map[netip.Addr]bool{}
	addrs, _ := r.opts.NodeAddrs.Addresses()
	for _, a := range addrs {
		nodeAddrs[a] = true
	}
	stale := func(f flow) bool { return r.notes.stale(f, nodeAddrs) }
	byKind := map[kind][]place{}
	for _, place := range places {
		k := kind{api.FamilyOf(place.Addr()), place.protocol}
		byKind[k] = append(byKind[k], place)
	}
	var errs []error
	for k, places := range byKind {
		seen, ended, err := end(ctx, r.opts.NetNS, k, places, stale)
		p.Seen += seen
		p.Ended += ended
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
		r.notes.done(count)
		r.upTo = count
	}
	close(r.ended)
	r.ended = make(chan struct{})
	return p
}
