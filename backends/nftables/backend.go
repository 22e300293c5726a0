// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// Backend is a sink that programs nftables. See the package comment.
//
// It joins what happens at the same time: the calls of a driver, changes of the node's
// addresses, and connection tracking. Its table does the work.
type Backend struct {
	opts          Options
	connections   sink.Sink
	nodeAddresses nodeaddr.Source

	// tasks run until stopTasks, from Start to Stop.
	tasks     sync.WaitGroup
	stopTasks context.CancelFunc

	mu    sync.Mutex // guards table
	table *table
}

var (
	_ sink.Sink    = (*Backend)(nil)
	_ sink.Starter = (*Backend)(nil)
	_ sink.Stopper = (*Backend)(nil)
	_ sink.Cleaner = (*Backend)(nil)
	_ sink.Poller  = (*Backend)(nil)
)

// New returns a backend. It touches nothing; the error is about opts.
func New(opts Options) (*Backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("nftables options: %w", err)
	}
	b := &Backend{opts: opts, stopTasks: func() {}}
	b.table = newTable(&b.opts)
	return b, nil
}

// Start implements [sink.Starter]. It makes the table, or what is missing of it, and
// leaves services in it as they are, checks sysctls, and begins to read the table and to
// follow the node's addresses. It needs CAP_NET_ADMIN. While the kernel is short of memory
// or busy, Start waits and tries again, until ctx ends.
//
// The sysctls are net.ipv4.ip_forward and net.ipv6.conf.all.forwarding, which
// have to be 1 for traffic that comes from elsewhere.
func (b *Backend) Start(ctx context.Context) error {
	if err := b.checkSysctls(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	others := int64(-1)
	err := retry(ctx, "The kernel is not ready; waiting before the table is made", func() (err error) {
		if err := b.table.conn.checkKernel(ctx, features); err != nil {
			return err
		}
		if !b.opts.NodePodCIDRs { // else the first pass does it, which knows the Node object
			others, err = b.table.loadSkeleton(ctx)
		}
		return err
	})
	if err != nil {
		return err
	}
	return b.startTasks(ctx, others)
}

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 10 * time.Second
)

// retry calls f until it succeeds, fails for a reason that does not pass, or ctx ends. It
// logs message before each wait.
func retry(ctx context.Context, message string, f func() error) error {
	for backoff := minBackoff; ; backoff = min(2*backoff, maxBackoff) {
		err := f()
		if !netfilter.IsTransient(err) && !errors.Is(err, netfilter.ErrUnknownOutcome) {
			return err
		}
		klog.FromContext(ctx).Info(message, "reason", err, "retryIn", backoff)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		case <-time.After(backoff):
		}
	}
}

// startTasks starts what runs beside Syncs. others is conn.others at the time when the
// skeleton was loaded, negative if it was not.
func (b *Backend) startTasks(ctx context.Context, others int64) error {
	tasks, stop := context.WithCancel(context.WithoutCancel(ctx))
	b.stopTasks = stop
	if b.nodeAddresses = b.opts.NodeAddresses; b.nodeAddresses == nil {
		watcher, err := nodeaddr.New(nodeaddr.Options{NetNS: b.opts.NetNS})
		if err != nil {
			return err
		}
		b.nodeAddresses = watcher
		b.tasks.Go(func() { watcher.Run(tasks) })
	}
	if b.connections = b.opts.Conntrack; b.connections == nil {
		b.connections = conntrack.New(conntrack.Options{NodeAddrs: b.nodeAddresses, NetNS: b.opts.NetNS})
	}
	if s, ok := b.connections.(sink.Starter); ok {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	if others >= 0 {
		b.tasks.Go(func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.table.readAhead(tasks, others)
		})
	}
	b.tasks.Go(func() { b.followAddresses(tasks) })
	return nil
}

// Stop implements [sink.Stopper]. The table stays, so that traffic flows on;
// see Cleanup.
func (b *Backend) Stop(ctx context.Context) error {
	b.stopTasks()
	b.tasks.Wait()
	var errs []error
	if s, ok := b.connections.(sink.Stopper); ok {
		errs = append(errs, s.Stop(ctx))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(append(errs, b.table.close())...)
}

// Cleanup implements [sink.Cleaner]: it deletes the table. It may be called on a
// backend that was not started, and if there is no table.
func (b *Backend) Cleanup(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for _, name := range b.opts.tables() {
		errs = append(errs, b.table.conn.deleteTable(ctx, name))
	}
	return errors.Join(append(errs, b.table.close())...)
}

// Sync implements [sink.Sink]. A service that it reports as failed is as it was
// before. The first Sync of a pass reads the table.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	err := b.program(ctx, c)
	if _, ok := sink.Acknowledged(err); !ok {
		return err
	}
	if err := b.connections.Sync(ctx, c); err != nil {
		// The driver delivers the changes again, although they are programmed. Only a pass,
		// which reads the table, can tell them from others.
		return fmt.Errorf("connection tracking: %w (%w)", err, sink.ErrStartOver)
	}
	return err
}

func (b *Backend) program(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.NodeChanged {
		nodeaddr.SetNode(b.nodeAddresses, c.Node)
	}
	nodePortAddrs, _ := b.nodeAddresses.Addresses()
	return b.table.sync(ctx, c, nodePortAddrs)
}

// Verify implements [sink.Verifier]: it finds out whether other programs changed the
// table. If they did, the error wraps [sink.ErrStartOver], and the pass that follows mends
// the table. When ctx ends, Verify remembers how far it came, and the next one goes on
// there.
func (b *Backend) Verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.table.verify(ctx)
}

// VerifyInterval implements [sink.Poller]: once a second. As long as no other program
// changes any table of the network namespace, a Verify is one small request.
func (b *Backend) VerifyInterval() time.Duration { return time.Second }
