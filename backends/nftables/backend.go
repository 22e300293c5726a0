// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// The type backend is the dataplane of this package.
//
// It passes changes to package conntrack. It ensures that calls of a driver and updates of
// the node's addresses do not overlap. The field table does all other work.
type backend struct {
	opts  options
	owner ownership.Owner
	tasks kernelnode.Tasks

	mu    sync.Mutex // guards table
	table *table
}

var (
	_ backends.Dataplane = (*backend)(nil)
	_ backends.Inspector = (*backend)(nil)
	_ backends.Capable   = (*backend)(nil)
	_ backends.Counter   = (*backend)(nil)
	_ sink.Preparer      = (*backend)(nil)
)

// New returns a dataplane, which is also a [backends.Inspector] and a [backends.Counter]. New
// does not access the kernel. It returns an error if opts are invalid.
//
// Start needs CAP_NET_ADMIN. While the kernel is short of memory or busy, Start retries,
// until its context ends.
func New(opts Options) (backends.Dataplane, error) {
	b, err := newBackend(options{public: opts})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newBackend(opts options) (*backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("nftables options: %w", err)
	}
	if opts.now == nil {
		opts.now = time.Now
	}
	opts.maxDumped = cmp.Or(opts.maxDumped, maxDumped)
	opts.maxHashSlots = cmp.Or(opts.maxHashSlots, maxHashSlots)
	opts.Observer = backendoptions.Observe(opts.Observer)
	b := &backend{opts: opts}
	b.table = newTable(&b.opts)
	b.table.beside = b.tasks.Go
	b.table.unlocked = func(f func()) {
		b.mu.Unlock()
		defer b.mu.Lock()
		f()
	}
	return b, nil
}

// SharedOptions implements [backendoptions.Sharer].
func (b *backend) SharedOptions() (string, *backends.Options) { return "nftables", &b.opts.Options }

// Honours implements [backends.Capable].
func (b *backend) Honours() nodeview.Parameters {
	return nodeview.Parameters{Algorithm: true, Weights: true, NodePortSources: true, Resets: kernelnode.Resets(&b.opts.Options)}
}

// Start implements [sink.Starter]. It checks sysctls and creates the missing parts of the
// table. It does not change the services in the table. Then it reads the table and
// watches the node's addresses, in the background.
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the table.
func (b *backend) own(ctx context.Context) func() (release func(), err error) {
	return func() (func(), error) { return ownership.Objects(ctx, b.opts.NetNS, b.opts.object()) }
}

func (b *backend) start(ctx context.Context) error {
	if err := kernelnode.ApplySysctls(ctx, &b.opts.Options); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	foreignCommits := int64(-1)
	err := retryTransient(ctx, "Kernel not ready; retrying to make the table", func() (err error) {
		if err := b.table.conn.checkKernel(ctx, b.opts.features()); err != nil {
			return err
		}
		// If NodePodCIDRs is set, the first pass loads the skeleton, which needs the Node
		// object.
		if !b.opts.NodePodCIDRs {
			foreignCommits, err = b.table.loadSkeleton(ctx)
			if mayBeDrift(err) { // another program changed the table after loadSkeleton had read it
				foreignCommits, err = b.table.loadSkeleton(ctx)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	return b.startTasks(ctx, foreignCommits)
}

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 10 * time.Second
)

// retryTransient calls f until f succeeds or returns an error that is not transient, or
// until ctx ends. Before each retry, it logs the argument message.
func retryTransient(ctx context.Context, message string, f func() error) error {
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

// startTasks starts connection tracking and the backend's goroutines. The argument
// foreignCommits is the number that conn.foreignCommits returned before Start loaded the
// skeleton. A negative argument means that Start did not load the skeleton.
func (b *backend) startTasks(ctx context.Context, foreignCommits int64) error {
	if err := b.tasks.Start(ctx, &b.opts.Options); err != nil {
		return err
	}
	if foreignCommits >= 0 {
		b.tasks.Go(func(ctx context.Context) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.table.readAhead(ctx, foreignCommits)
		})
	}
	b.tasks.FollowAddresses(b.updateNodePortAddresses, "table", b.table.conn.Table)
	if follow := b.opts.FollowServiceCIDRs; follow != nil {
		b.tasks.Go(func(ctx context.Context) {
			follow(ctx, func(cidrs []netip.Prefix) { b.setServiceCIDRs(ctx, cidrs) })
		})
	}
	return nil
}

func (b *backend) setServiceCIDRs(ctx context.Context, cidrs []netip.Prefix) {
	b.mu.Lock()
	defer b.mu.Unlock()
	cidrs = outermost(cidrs)
	if b.table.serviceCIDRs != nil && slices.Equal(cidrs, b.table.serviceCIDRs) {
		return
	}
	log := klog.FromContext(ctx).WithValues("table", b.table.conn.Table)
	log.Info("Service CIDRs have changed; dropping new connections to their addresses without a service", "serviceCIDRs", cidrs)
	if err := b.table.setServiceCIDRs(ctx, cidrs); err != nil && ctx.Err() == nil {
		log.Error(err, "Cannot write the service CIDRs; writing them in a new pass")
	}
}

func (b *backend) updateNodePortAddresses(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.table.state == nil {
		return nil // the next pass updates the addresses
	}
	addrs, _ := b.tasks.Addresses.Addresses()
	return b.table.syncNodePortAddresses(ctx, addrs)
}

// Stop implements [sink.Stopper]. The table stays and forwards traffic; see Cleanup.
func (b *backend) Stop(ctx context.Context) error {
	defer b.owner.Release()
	err := b.tasks.Stop(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(err, b.table.close())
}

// Cleanup implements [sink.Cleaner]. It deletes the table if there is one. The backend
// need not be started. If another process programs the table, Cleanup changes nothing, and
// its error wraps [sink.ErrOwned].
func (b *backend) Cleanup(ctx context.Context) error {
	return b.owner.During(b.own(ctx), func() error { return b.cleanup(ctx) })
}

func (b *backend) cleanup(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for _, name := range b.opts.tables() {
		errs = append(errs, b.table.conn.Other(name).Delete(ctx))
	}
	return errors.Join(append(errs, b.table.close())...)
}

// Sync implements [sink.Sink]. It does not change a service that it reports as failed.
// The first Sync of a pass reads the table.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	return b.tasks.Sync(ctx, c, b.program(ctx, c))
}

func (b *backend) program(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.NodeChanged {
		nodeaddrs.SetNode(b.tasks.Addresses, c.Node)
	}
	nodePortAddrs, _ := b.tasks.Addresses.Addresses()
	return b.table.sync(ctx, c, nodePortAddrs)
}

// PreparePass implements [sink.Preparer]. It reads the table beside the calls of Sync.
func (b *backend) PreparePass(ctx context.Context) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	read := b.table.preparePass(ctx)
	if read == nil {
		return nil
	}
	ready := make(chan struct{})
	b.tasks.Go(func(ctx context.Context) {
		defer close(ready)
		p, err := read(ctx)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.table.prepared(ctx, p, err)
	})
	return ready
}

// BatchSize limits the size of a batch of a pass, because a change waits for the batch before
// it. See [sink.Options].
func (b *backend) BatchSize() int { return 2_000 }

// Verify implements [sink.Verifier]. It looks for changes that other programs made to the
// table. If it finds any, its error wraps [sink.ErrStartOver], so that a new pass repairs
// the table. If ctx ends during a Verify, the next Verify continues the search.
func (b *backend) Verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.table.verify(ctx)
}

// VerifyInterval returns one second, see [sink.Verifier]. A Verify is cheap: it sends one
// small request if no other program has changed tables in the network namespace.
func (b *backend) VerifyInterval() time.Duration { return time.Second }
