// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netns"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
)

// backend is the dataplane of this package.
type backend struct {
	opts  options
	owner ownership.Owner
	tasks kernelnode.Tasks
	// machineAddresses are all addresses of the machine.
	machineAddresses nodeaddr.Source

	mu        sync.Mutex // guards the fields below
	dataplane *dataplane
	rest      rest
	// idleAt is the time of the next call of removeIdle. After the time searchAt, the
	// backend searches again for changes by other programs that only a pass can repair.
	idleAt, searchAt time.Time
	pause            kernelnode.DriftPause
}

var (
	_ backends.Dataplane = (*backend)(nil)
	_ backends.Capable   = (*backend)(nil)
	_ backends.Counter   = (*backend)(nil)
	_ backends.Inspector = (*backend)(nil)
)

// New returns a dataplane, which is also a [backends.Inspector] and a [backends.Counter]. It does not access the kernel. It returns an error if opts are
// invalid.
//
// The first Sync needs CAP_NET_ADMIN and the kernel module ip_vs. The kernel loads the
// modules dummy and ip_vs_* itself if it can.
func New(opts Options) (backends.Dataplane, error) {
	b, err := newBackend(options{public: opts})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newBackend(opts options) (*backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("ipvs options: %w", err)
	}
	b := &backend{opts: opts}
	b.rest.opts = &b.opts
	b.dataplane = newDataplane(&b.opts)
	return b, nil
}

// Honours implements [backends.Capable].
func (b *backend) Honours() nodeview.Parameters {
	return nodeview.Parameters{Algorithm: true, Weights: true, Resets: kernelnode.Resets(&b.opts.Options), NodePortSources: true}
}

// SharedOptions implements [backendoptions.Sharer].
func (b *backend) SharedOptions() (string, *backends.Options) { return "ipvs", &b.opts.Options }

// Start implements [sink.Starter]. It checks kernel settings and watches the node's
// addresses.
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the instance. A table of the backend
// nftables may have the same name.
func (b *backend) own(ctx context.Context) func() (release func(), err error) {
	return func() (func(), error) {
		return ownership.Objects(ctx, b.opts.NetNS, "nftables table "+b.opts.tableName())
	}
}

func (b *backend) start(ctx context.Context) error {
	var more []sysctl.Setting
	if b.opts.StrictARP {
		more = sysctl.StrictARP
	}
	if err := kernelnode.ApplySysctls(ctx, &b.opts.Options, more...); err != nil {
		return err
	}
	if err := b.tasks.Start(ctx, &b.opts.Options); err != nil {
		return err
	}
	addrs, err := b.tasks.Watch(nodeaddrs.Options{
		Selection: []string{"all"},
		// kube-proxy's mode ipvs adds the addresses of services to this interface.
		ExcludeInterfaces: []string{"kube-ipvs0"},
		NetNS:             b.opts.NetNS,
	})
	if err != nil {
		return errors.Join(err, b.tasks.Stop(ctx))
	}
	b.machineAddresses = addrs
	return nil
}

// Stop implements [sink.Stopper]. The kernel continues to forward traffic; see Cleanup.
func (b *backend) Stop(ctx context.Context) error {
	defer b.owner.Release()
	err := b.tasks.Stop(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(err, b.rest.stop(ctx), b.dataplane.close())
}

// Cleanup implements [sink.Cleaner]. It deletes the virtual servers, the interface and
// the tables of the instance if they exist. See Options.Drain. The backend need not be
// started.
//
// If another process programs the instance, Cleanup changes nothing, and its error wraps
// [sink.ErrOwned].
func (b *backend) Cleanup(ctx context.Context) error {
	return b.owner.During(b.own(ctx), func() error { return b.cleanup(ctx) })
}

func (b *backend) cleanup(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := b.dataplane.cleanup(ctx)
	if err == nil {
		err = b.rest.cleanup(ctx)
	}
	return errors.Join(err, b.dataplane.close())
}

// Sync implements [sink.Sink].
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	return b.tasks.Sync(ctx, c, b.program(ctx, c))
}

var (
	// errNodeChanged causes a new pass, which plans all services again.
	errNodeChanged = fmt.Errorf("the addresses of the node changed (%w)", sink.ErrStartOver)
	errUnknown     = fmt.Errorf("the state of the kernel is unknown (%w)", sink.ErrStartOver)
)

func (b *backend) program(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.NodeChanged {
		nodeaddrs.SetNode(b.tasks.Addresses, c.Node)
	}
	d := b.dataplane
	next := b.addresses()
	if c.NodeChanged {
		next.nodeAddrs = kernelnode.Addrs(c.Node)
	}
	switch {
	case c.First:
		d.conn.close() // so that open reads the family's number again: a reload of ip_vs changes it
		if err := d.conn.open(); err != nil {
			return err
		}
		if err := b.applyIPVSSysctls(ctx); err != nil {
			return err
		}
		if err := d.conn.checkConntrack(); err != nil {
			return err
		}
		d.planner = next
	case !d.known:
		return errUnknown
	case !d.follow(next):
		return errNodeChanged
	}
	return b.rest.sync(ctx, c, b.tasks.Addresses, func(c *sink.Changes) error { return d.sync(ctx, c) })
}

// addresses returns a copy of the planner, with the present addresses of the machine.
func (b *backend) addresses() planner {
	p := b.dataplane.planner
	p.nodePortAddrs, _ = b.tasks.Addresses.Addresses()
	p.machineAddrs, _ = b.machineAddresses.Addresses()
	return p
}

// verifyInterval is the shortest time between two comparisons with the kernel.
const verifyInterval = 10 * time.Second

// Verify implements [sink.Verifier]. It deletes removed endpoints whose connections have
// ended. From time to time, it compares the kernel with the backend's records, and
// repairs changes by other programs.
func (b *backend) Verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(b.verify(ctx), b.rest.verify(ctx))
}

func (b *backend) verify(ctx context.Context) error {
	d, now, next := b.dataplane, time.Now(), b.addresses()
	switch {
	case !d.known:
		return errUnknown
	case !d.follow(next):
		return errNodeChanged
	}
	err := d.reapLists(ctx, 0)
	if d.known && !now.Before(b.idleAt) {
		err = errors.Join(err, d.removeIdle(ctx))
		b.idleAt = time.Now().Add(kernelnode.PauseFactor * time.Since(now))
	}
	if d.known {
		// Without these objects, no service works. So Verify finds their loss even during
		// a pause.
		err = errors.Join(err, d.checkLoss(ctx))
	}
	if d.known && !now.Before(b.searchAt) {
		compareErr := d.reconciler.Verify(ctx)
		d.known = d.known && !errors.Is(compareErr, sink.ErrStartOver)
		err = errors.Join(err, compareErr)
	}
	if !d.known {
		b.searchAt = b.pause.Found(now)
	}
	return err
}

// VerifyInterval returns one second, see [sink.Verifier]. Most calls of Verify only count
// the connections of removed endpoints.
func (b *backend) VerifyInterval() time.Duration { return time.Second }

// applyIPVSSysctls corrects the settings of IPVS, except in the mode IgnoreSysctls.
func (b *backend) applyIPVSSysctls(ctx context.Context) error {
	if b.opts.Sysctls == backends.IgnoreSysctls {
		return nil
	}
	return netns.Do(b.opts.NetNS, func() { sysctl.Kernel.Apply(ctx, sysctl.IPVS, true) })
}
