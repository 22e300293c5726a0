// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
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
}

var _ backends.Dataplane = (*backend)(nil)

// New returns a dataplane. It does not connect to the switch. It returns an error if opts
// are invalid. Start fails with [sink.ErrOwned] only if the other process is in the same
// network namespace.
func New(opts Options) (backends.Dataplane, error) {
	b, err := newBackend(options{public: opts})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newBackend(opts options) (*backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("ovs options: %w", err)
	}
	b := &backend{opts: opts}
	b.dataplane = newDataplane(&b.opts)
	return b, nil
}

// Honours implements [backends.Capable].
func (b *backend) Honours() nodeview.Parameters {
	return nodeview.Parameters{Algorithm: true, Weights: true, Resets: b.opts.forgets, NodePortSources: true}
}

// SharedOptions implements [backendoptions.Sharer].
func (b *backend) SharedOptions() (string, *backends.Options) { return "ovs", &b.opts.Options }

// Start implements [sink.Starter]. It watches the node's addresses.
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the instance's flows and groups.
func (b *backend) own(ctx context.Context) func() (release func(), err error) {
	return func() (func(), error) {
		socket := b.opts.socket()
		if dir, err := filepath.EvalSymlinks(b.opts.RunDir); err == nil { // /var/run usually is a link to /run
			socket = filepath.Join(dir, filepath.Base(socket))
		}
		return ownership.Objects(ctx, 0, fmt.Sprintf("flows of instance %d in the bridge %s", b.opts.number, socket))
	}
}

func (b *backend) start(ctx context.Context) error {
	if err := kernelnode.ApplySysctls(ctx, &b.opts.Options); err != nil {
		return err
	}
	if err := b.tasks.Start(ctx, &b.opts.Options); err != nil {
		return err
	}
	addrs, err := b.tasks.Watch(nodeaddrs.Options{Selection: []string{"all"}})
	if err != nil {
		return errors.Join(err, b.tasks.Stop(ctx))
	}
	b.machineAddresses = addrs
	return nil
}

// Stop implements [sink.Stopper]. The switch continues to forward traffic; see Cleanup.
func (b *backend) Stop(ctx context.Context) error {
	defer b.owner.Release()
	err := b.tasks.Stop(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(err, b.dataplane.close())
}

// Cleanup implements [sink.Cleaner]. It deletes the flows and groups of the instance. The
// backend need not be started.
//
// If another process programs the instance, Cleanup changes nothing, and its error wraps
// [sink.ErrOwned].
func (b *backend) Cleanup(ctx context.Context) error {
	return b.owner.During(b.own(ctx), func() error { return b.cleanup(ctx) })
}

func (b *backend) cleanup(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(b.dataplane.cleanup(ctx), b.dataplane.close())
}

// Sync implements [sink.Sink].
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	return b.tasks.Sync(ctx, c, b.program(ctx, c))
}

func (b *backend) program(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.NodeChanged {
		nodeaddrs.SetNode(b.tasks.Addresses, c.Node)
	}
	d := b.dataplane
	next := b.node()
	if c.First {
		if err := b.connect(ctx); err != nil {
			return err
		}
		d.planner.node, d.passing = next, true
	} else if !d.planner.equal(&next) {
		return errNodeChanged
	}
	err := d.reconciler.Sync(ctx, c)
	d.observer.Holds("flows", d.flows)
	d.observer.Holds("groups", len(d.groups))
	return err
}

var (
	// errNodeChanged causes a new pass, which plans all services again.
	errNodeChanged = fmt.Errorf("the addresses of the node changed (%w)", sink.ErrStartOver)
	errLost        = fmt.Errorf("the connection to the switch is lost (%w)", sink.ErrStartOver)
)

// While there is no switch, connect tries again after dialInterval, at most for
// maxDialTime. Then Sync fails, so that the error is visible, and the driver calls Sync
// again.
const (
	dialInterval = 50 * time.Millisecond
	maxDialTime  = 10 * time.Second
)

// connect connects to the switch if there is no connection.
func (b *backend) connect(ctx context.Context) error {
	deadline := time.Now().Add(maxDialTime)
	for logged := false; ; logged = true {
		err := b.dataplane.open(ctx)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		if !logged {
			klog.FromContext(ctx).Info("Waiting for the switch", "bridge", b.opts.Bridge, "err", err)
		}
		select {
		case <-time.After(dialInterval):
		case <-ctx.Done():
			return err
		}
	}
}

// node returns the present addresses of the node.
func (b *backend) node() (n node) {
	all, _ := b.tasks.Addresses.Addresses()
	n.nodePortAddrs = slices.DeleteFunc(slices.Clone(all), netip.Addr.IsLoopback)
	n.machineAddrs, _ = b.machineAddresses.Addresses()
	return n
}

// Verify implements [sink.Verifier]. It notices a lost connection to the switch. From time
// to time, and after the switch has reported changes by other programs, it compares the
// switch with the backend's records.
func (b *backend) Verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, next := b.dataplane, b.node()
	switch {
	case d.conn == nil:
		return errLost
	case !d.planner.equal(&next):
		return errNodeChanged
	}
	select {
	case <-d.conn.Lost():
		return errLost
	case <-d.conn.Changed():
		d.reconciler.Suspect()
	default:
	}
	if err := d.forgetAgain(ctx, time.Now()); err != nil {
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	return d.reconciler.Verify(context.WithoutCancel(ctx))
}

// minPause is the shortest time between two comparisons with the switch if the switch has
// not reported changes.
const minPause = 5 * time.Second

// VerifyInterval returns 100 ms, see [sink.Verifier]. Most calls of Verify only check
// whether the connection to the switch is lost.
func (b *backend) VerifyInterval() time.Duration { return 100 * time.Millisecond }
