// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Backend is a sink that programs nftables. See the package comment.
type Backend struct {
	opts          Options
	connections   sink.Sink
	nodeAddresses nodeaddr.Source

	// tasks run until stopTasks, from Start to Stop.
	tasks     sync.WaitGroup
	stopTasks context.CancelFunc

	// mu guards what follows: a driver calls one method at a time, but addresses
	// change at any time, and Dataplane is for everybody.
	mu      sync.Mutex
	conn    *conn
	planner *planner
	// fresh says that the skeleton was loaded and nothing else done since, and loaded
	// what the generation of tables was then.
	fresh  bool
	loaded uint32
	// seed is of all hashes.
	seed maphash.Seed
	// skeleton are the digests of the skeleton's chains, as they were sent.
	skeleton map[string]digest
	// podCIDRs are those of the Node object that the skeleton is for.
	podCIDRs []netip.Prefix
	// replaced is the name of another table of this instance, empty if there is none. The
	// end of a pass deletes it.
	replaced string
	// found is what was read since, nil if nothing was.
	found *found
	// state is nil while it is not known what the kernel has.
	state *state
	// restricted are the views of services with source ranges: what these admit
	// depends on the node's addresses too.
	restricted map[types.NamespacedName]*api.ServiceEndpoints
	// pass is the pass under way, nil if there is none.
	pass *pass
	// drifted says that somebody else changed the table and it has not been mended.
	drifted bool
	// leftovers says that the last pass left what may be of services that failed, and
	// what nobody knows how to remove when they are programmed.
	leftovers bool
	// drifting says that a change met drift: there may be more, elsewhere.
	drifting bool
	// patience is before Verify asks for a new pass because of either.
	patience patience
	// verified is how many parts the Verify under way has seen, and cutShort how often it
	// ended in the next one.
	verified, cutShort int
}

var (
	_ sink.Sink    = (*Backend)(nil)
	_ sink.Starter = (*Backend)(nil)
	_ sink.Stopper = (*Backend)(nil)
	_ sink.Cleaner = (*Backend)(nil)
)

// New returns a backend. It touches nothing; the error is about opts.
func New(opts Options) (*Backend, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("nftables options: %w", err)
	}
	return &Backend{
		opts:       opts,
		seed:       maphash.MakeSeed(),
		planner:    newPlanner(),
		restricted: map[types.NamespacedName]*api.ServiceEndpoints{},
		stopTasks:  func() {},
	}, nil
}

// Start implements [sink.Starter]. It makes the table, or what is missing of it, and
// leaves services in it as they are, checks sysctls, and begins to read the table and to
// follow the node's addresses. It needs CAP_NET_ADMIN.
//
// The sysctls are net.ipv4.ip_forward and net.ipv6.conf.all.forwarding, which
// have to be 1 for traffic that comes from elsewhere.
func (b *Backend) Start(ctx context.Context) error {
	if err := b.checkSysctls(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dial()
	if err := b.conn.checkKernel(ctx, features); err != nil {
		return err
	}
	if !b.opts.NodePodCIDRs { // or else the first pass does it, which knows the Node object
		if err := b.loadSkeleton(ctx); err != nil {
			return err
		}
		b.fresh = true
	}
	return b.startTasks(ctx)
}

// startTasks starts what runs beside Syncs.
func (b *Backend) startTasks(ctx context.Context) error {
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
	b.tasks.Go(func() { b.readAhead(tasks) })
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
	return errors.Join(append(errs, b.hangUp())...)
}

// Cleanup implements [sink.Cleaner]: it deletes the table. It may be called on a
// backend that was not started, and if there is no table.
func (b *Backend) Cleanup(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dial()
	var errs []error
	for _, name := range b.opts.tables() {
		errs = append(errs, b.conn.deleteTable(ctx, name))
	}
	return errors.Join(append(errs, b.hangUp())...)
}

// hangUp closes the connection, if there is one.
func (b *Backend) hangUp() error {
	if b.conn == nil {
		return nil
	}
	err := b.conn.Close()
	b.conn, b.found, b.state, b.pass = nil, nil, nil, nil
	return err
}

// table returns the name of the table that is programmed.
func (b *Backend) table() string {
	if b.conn == nil {
		return b.opts.tables()[0]
	}
	return b.conn.table
}

// dial makes sure that there is a connection.
func (b *Backend) dial() {
	if b.conn == nil {
		b.conn = newConn(b.opts.NetNS, b.opts.tables()[0])
		b.conn.Transacted = b.opts.Observer.Transacted
	}
}

// Sync implements [sink.Sink]. What it reports as failed is as it was
// before. The first Sync of a pass reads the table.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	err := b.sync(ctx, c)
	if _, ok := sink.Acknowledged(err); !ok {
		return err
	}
	if err := b.connections.Sync(ctx, c); err != nil {
		// The changes come again, though they have been programmed. Only reading the
		// table tells them from others then.
		return fmt.Errorf("connection tracking: %w (%w)", err, sink.ErrStartOver)
	}
	return err
}

func (b *Backend) sync(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dial()
	defer b.observe()
	err := b.program(ctx, c)
	if _, ok := sink.Acknowledged(err); !ok {
		b.state = nil
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	if err == nil && b.pass == nil && !b.drifting {
		b.mended()
	}
	return err
}

// program begins or ends a pass and programs what differs between the views of each
// service. After an error that is no [*sink.Failed] it is not known what the table has.
func (b *Backend) program(ctx context.Context, c *sink.Changes) error {
	if c.First {
		b.setPodCIDRs(c.Node)
		if err := b.beginPass(ctx, c.Node); err != nil {
			return err
		}
	} else if c.NodeChanged && b.setPodCIDRs(c.Node) {
		return errPodCIDRs
	} else if b.state == nil {
		return fmt.Errorf("it is not known what table inet %s has", b.table())
	}
	err := b.syncChanges(ctx, c)
	if _, ok := sink.Acknowledged(err); ok && c.Last {
		if err := b.endPass(ctx, err != nil || len(c.Failing) > 0); err != nil {
			return err
		}
	}
	return err
}

// syncChanges programs what differs between the views of each service, and in a pass
// what differs from what there is.
func (b *Backend) syncChanges(ctx context.Context, c *sink.Changes) error {
	p := newPatch()
	before := b.planner
	if c.NodeChanged {
		nodeaddr.SetNode(b.nodeAddresses, c.Node)
		b.planner = before.withNodeAddrs(nodeAddrs(c.Node))
	}
	moved := !slices.Equal(before.nodeAddrs, b.planner.nodeAddrs)
	changed := map[types.NamespacedName]*api.ServiceEndpoints{}
	for ch := range c.Services {
		p.begin(ch.Key)
		before.plan(ch.Old, p.remove, p.disown)
		b.want(p, ch.New)
		if moved || isRestricted(ch.Old) || isRestricted(ch.New) {
			changed[ch.Key] = ch.New
		}
	}
	if moved {
		for key, view := range b.restricted {
			if _, ok := changed[key]; !ok {
				p.begin(key)
				before.plan(view, p.remove, p.disown)
				b.want(p, view)
			}
		}
	}
	var failed sink.Failed
	if err := b.apply(ctx, p.parts(), &failed); err != nil {
		return err
	}
	if moved && len(failed) > 0 {
		// Which services have been programmed for which addresses, views do not tell.
		return fmt.Errorf("the node's addresses changed: %w (%w)", failed.Err(), sink.ErrStartOver)
	}
	if b.pass != nil {
		b.pass.settle(p, failed)
	}
	for key, view := range changed {
		if _, ok := failed[key]; !ok {
			b.restrict(key, view)
		}
	}
	if c.NodeChanged {
		if err := b.syncNodePortAddresses(ctx); err != nil {
			return fmt.Errorf("the node's addresses changed: %w (%w)", err, sink.ErrStartOver)
		}
	}
	return failed.Err()
}

// restrict remembers view if its service has source ranges.
func (b *Backend) restrict(key types.NamespacedName, view *api.ServiceEndpoints) {
	if isRestricted(view) {
		b.restricted[key] = view
	} else {
		delete(b.restricted, key)
	}
}

func isRestricted(se *api.ServiceEndpoints) bool {
	return se != nil && len(se.Service.SourceRanges) > 0
}

// nodeAddrs returns the addresses of the node, which the API has.
func nodeAddrs(n *api.Node) []netip.Addr {
	var addrs []netip.Addr
	if n != nil {
		for _, a := range n.Addresses {
			addrs = append(addrs, a.IP)
		}
	}
	return addrs
}
