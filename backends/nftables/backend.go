// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// Backend is a sink that programs nftables. See the package comment.
type Backend struct {
	opts          Options
	connections   sink.Sink
	nodeAddresses nodeaddr.Source
	piece         int // defaultPiece, but in tests

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
	// skeleton are the rules of the skeleton's chains, as they were loaded.
	skeleton map[string]digest
	// found is what was read since, nil if nothing was.
	found *found
	// state is nil while it is not known what the kernel has.
	state *state
	// restricted are the views of services with source ranges: what these admit
	// depends on the node's addresses too.
	restricted map[types.NamespacedName]*api.ServiceEndpoints
	// ahead are the services that the last full Sync programmed as it was told
	// meanwhile, until the driver tells them again.
	ahead map[types.NamespacedName]*api.ServiceEndpoints
	// drifted says that somebody else changed the table and it has not been mended.
	drifted bool
	// leftovers says that the last full Sync left what may be of services that it could
	// not program, and what nobody knows how to remove when they are.
	leftovers bool
	// drifting says that a change met drift: there may be more, elsewhere.
	drifting bool
	// patience is before Verify asks for a full Sync because of either.
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
		piece:      defaultPiece,
		seed:       maphash.MakeSeed(),
		planner:    newPlanner(),
		restricted: map[types.NamespacedName]*api.ServiceEndpoints{},
		ahead:      map[types.NamespacedName]*api.ServiceEndpoints{},
		stopTasks:  func() {},
	}, nil
}

// Start implements [sink.Starter]. It makes the table, or what is missing of it, and
// leaves services in it as they are, checks sysctls, and begins to read the table and to
// follow the node's addresses. It needs CAP_NET_ADMIN and the nft program.
//
// The sysctls are net.ipv4.ip_forward and net.ipv6.conf.all.forwarding, which
// have to be 1 for traffic that comes from elsewhere.
func (b *Backend) Start(ctx context.Context) error {
	if err := b.checkSysctls(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.dial(); err != nil {
		return err
	}
	if err := b.loadSkeleton(ctx); err != nil {
		return err
	}
	b.fresh = true
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
	if err := b.dial(); err != nil {
		return err
	}
	return errors.Join(b.conn.deleteTable(ctx), b.hangUp())
}

// hangUp closes the connection, if there is one.
func (b *Backend) hangUp() error {
	if b.conn == nil {
		return nil
	}
	err := b.conn.close()
	b.conn, b.found, b.state = nil, nil, nil
	return err
}

// dial makes sure that there is a connection.
func (b *Backend) dial() error {
	if b.conn != nil {
		return nil
	}
	c, err := dial(b.opts.NetNS, b.opts.table())
	if err != nil {
		return err
	}
	c.transacted = b.opts.Observer.Transacted
	b.conn = c
	return nil
}

// Sync implements [sink.Sink]. What it reports as failed is as it was
// before. A full Sync reads the table and writes what differs.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	err := b.sync(ctx, c)
	if _, ok := sink.Acknowledged(err); !ok {
		return err
	}
	if err := b.connections.Sync(ctx, b.programmed(c)); err != nil {
		// The changes come again, though they have been programmed. Only reading the
		// table tells them from others then.
		return fmt.Errorf("connection tracking: %w (%w)", err, sink.ErrStartOver)
	}
	return err
}

// programmed returns c as it has been programmed: after a full Sync with what it was told
// meanwhile, for connections go by that already.
func (b *Backend) programmed(c *sink.Changes) *sink.Changes {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !c.Full || len(b.ahead) == 0 {
		return c
	}
	told, ahead := *c, maps.Clone(b.ahead)
	told.Services = func(yield func(sink.Change) bool) {
		keys := slices.SortedFunc(maps.Keys(ahead), api.CompareKeys)
		// next yields the first of keys, unless it has gone.
		next := func() bool {
			key := keys[0]
			keys = keys[1:]
			return ahead[key] == nil || yield(sink.Change{Key: key, New: ahead[key]})
		}
		for ch := range c.Services {
			for len(keys) > 0 && api.CompareKeys(keys[0], ch.Key) < 0 {
				if !next() {
					return
				}
			}
			if len(keys) > 0 && keys[0] == ch.Key {
				if !next() {
					return
				}
			} else if !yield(ch) {
				return
			}
		}
		for len(keys) > 0 && next() {
		}
	}
	return &told
}

func (b *Backend) sync(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.dial(); err != nil {
		return err
	}
	defer b.observe()
	var err error
	switch {
	case c.Full:
		err = b.syncFull(ctx, c)
	case b.state == nil:
		err = fmt.Errorf("it is not known what table inet %s has: %w", b.opts.table(), sink.ErrStartOver)
	default:
		err = b.syncChanges(ctx, c)
	}
	if err == nil && !b.drifting {
		b.mended()
	}
	return err
}

// syncChanges programs what differs between the views of each service.
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
		old := ch.Old
		if programmed, ok := b.ahead[ch.Key]; ok {
			old = programmed
		}
		p.begin(ch.Key)
		before.plan(old, p.remove, p.disown)
		b.planner.plan(ch.New, p.add, p.own)
		if moved || isRestricted(old) || isRestricted(ch.New) {
			changed[ch.Key] = ch.New
		}
	}
	if moved {
		for key, view := range b.restricted {
			if _, ok := changed[key]; !ok {
				p.begin(key)
				before.plan(view, p.remove, p.disown)
				b.planner.plan(view, p.add, p.own)
			}
		}
	}
	var failed sink.Failed
	if err := b.apply(ctx, p.parts(), &failed); err != nil {
		b.state = nil
		return err
	}
	if moved && len(failed) > 0 {
		// Which services have been programmed for which addresses, views do not tell.
		b.state = nil
		return fmt.Errorf("the node's addresses changed: %w (%w)", failed.Err(), sink.ErrStartOver)
	}
	for key, view := range changed {
		if _, ok := failed[key]; !ok {
			b.restrict(key, view)
		}
	}
	for ch := range c.Services {
		if _, ok := failed[ch.Key]; !ok {
			delete(b.ahead, ch.Key)
		}
	}
	if c.NodeChanged {
		if err := b.syncNodePortAddresses(ctx); err != nil {
			b.state = nil
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
