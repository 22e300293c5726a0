// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Backend is a sink that proxies in this process. It is to be started, and
// stopped when it is not needed any more, which is what a sink.Driver does; it
// runs once.
type Backend struct {
	engine
	node nodeaddr.Source
	// watcher is node if that is the backend's own, to be run.
	watcher *nodeaddr.Watcher

	// mu is held by who changes what is served.
	mu       sync.Mutex
	services map[types.NamespacedName]*service

	life      context.Context // of what the backend does by itself
	stopTasks context.CancelFunc
	tasks     sync.WaitGroup
}

var (
	_ sink.Sink    = (*Backend)(nil)
	_ sink.Starter = (*Backend)(nil)
	_ sink.Drainer = (*Backend)(nil)
	_ sink.Cleaner = (*Backend)(nil)
)

// New returns a Backend. It fails if the options make no sense, or if the
// machine's addresses cannot be read.
func New(opts Options) (*Backend, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	b := &Backend{
		engine: engine{
			opts:    &opts,
			log:     klog.Background(),
			local:   newReferences(opts.Addresses),
			buffers: newBuffers(),
			pipes:   newPipes(),
			batches: newBatches(),
			hurry:   make(chan struct{}),
		},
		services: map[types.NamespacedName]*service{},
	}
	b.held.all = map[place]*service{}
	limit := openFilesLimit()
	b.descriptors = newDescriptors(limit - limit/10) // the rest is for what else this process does
	b.udp = newUDPClients(min(opts.MaxUDPClients, limit/2))
	var err error
	if b.machine, err = nodeaddr.New(nodeaddr.Options{Selection: everyAddress, Clock: opts.Clock}); err != nil {
		return nil, err
	}
	if b.node = opts.NodeAddresses; b.node == nil {
		if b.watcher, err = nodeaddr.New(nodeaddr.Options{Selection: opts.NodePorts, ExcludeInterfaces: opts.ExcludeInterfaces, Clock: opts.Clock}); err != nil {
			return nil, err
		}
		b.node = b.watcher
	}
	return b, nil
}

// everyAddress selects those of a link, too.
var everyAddress = nodeaddr.Selection{All: true, CIDRs: []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")}}

// NodeAddresses returns the source of the addresses at which node ports are
// served, for who serves something else there.
func (b *Backend) NodeAddresses() nodeaddr.Source { return b.node }

// Start implements sink.Starter. Addresses that a process that was killed left behind are
// kept for the services that need them. Logs go to the logger of ctx from now on.
func (b *Backend) Start(ctx context.Context) error {
	b.log = klog.FromContext(ctx)
	if err := b.local.adopt(ctx); err != nil {
		return err
	}
	b.life, b.stopTasks = context.WithCancel(context.WithoutCancel(ctx))
	b.tasks.Go(func() { b.machine.Run(b.life) })
	if b.watcher != nil {
		b.tasks.Go(func() { b.watcher.Run(b.life) })
	}
	b.tasks.Go(func() { b.followNode(b.life) })
	b.tasks.Go(func() { b.sweep(b.life) })
	return nil
}

// Cleanup implements sink.Cleaner. It removes the addresses that backends with
// the same Addresses have made local.
func (b *Backend) Cleanup(ctx context.Context) error {
	if b.opts.Addresses == nil {
		return nil
	}
	if err := b.opts.Addresses.Cleanup(ctx); err != nil {
		return fmt.Errorf("removing addresses left on this host: %w", err)
	}
	return nil
}

// Verify implements sink.Verifier. It makes the addresses of services local again
// that somebody else took away.
func (b *Backend) Verify(ctx context.Context) error { return b.local.restore(ctx) }

// update is what becomes of one service.
type update struct {
	*service
	view *api.ServiceEndpoints // nil if it goes
	*plan
	err error // why not all of plan is served, guarded by Backend.mu
}

// Sync implements sink.Sink. A service that waits for an address fails if no other address
// comes or goes for a while. It is served there as soon as the address comes, and comes again.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	nodeaddr.SetNode(b.node, c.Node)
	b.mu.Lock()
	updates := b.updates(c)
	changes := b.bringAbout(ctx, updates)
	if c.Last && ctx.Err() == nil {
		changes = append(changes, b.abandon()...)
	}
	b.mu.Unlock()
	b.await(ctx, b.life, changes)

	b.mu.Lock()
	defer b.mu.Unlock()
	for _, u := range updates {
		u.service.failed = u.err != nil
	}
	return failures(ctx, updates)
}

// updates returns what becomes of the services of c, and with c.Last of those that were not
// delivered in the pass.
func (b *Backend) updates(c *sink.Changes) (updates []*update) {
	node, _ := b.node.Addresses()
	if c.First {
		for _, s := range b.services {
			s.stale = true
		}
	}
	for change := range c.Services {
		s := b.services[change.Key]
		if s == nil {
			if change.New == nil {
				continue
			}
			s = newService(&b.engine, change.Key)
		}
		s.stale = false
		updates = append(updates, &update{service: s, view: change.New, plan: s.planFor(change.New, node)})
	}
	if c.Last {
		for _, s := range b.services {
			if s.stale {
				updates = append(updates, &update{service: s, plan: s.planFor(nil, node)})
			}
		}
	}
	return updates
}

// failures returns the errors of updates.
func failures(ctx context.Context, updates []*update) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var failed sink.Failed
	for _, u := range updates {
		failed.Add(u.key, u.err)
	}
	return failed.Err()
}

// bringAbout closes what is not needed any more, for all services, before it
// opens what is new, so that services can exchange places. It returns the changes of
// addresses that are left to await.
func (b *Backend) bringAbout(ctx context.Context, updates []*update) (changes []*change) {
	for _, u := range updates {
		u.withdraw(u.plan)
		b.services[u.key] = u.service
	}
	for _, u := range updates {
		if ctx.Err() != nil {
			break
		}
		changes = append(changes, u.lacking()...)
		u.err = u.apply(ctx, u.plan)
		changes = append(changes, u.forget(u.plan)...)
		if u.view == nil {
			delete(b.services, u.key)
			continue
		}
		u.service.view = nil
		if u.dependsOnNode {
			u.service.view = u.view
		}
	}
	return changes
}

// abandon returns the removal of the addresses of a process before this one. Those that
// services need stay.
func (b *Backend) abandon() (changes []*change) {
	for _, addr := range b.local.abandon() {
		changes = append(changes, &change{addr: addr})
	}
	return changes
}

// followNode lets services follow the node's addresses until ctx ends.
func (b *Backend) followNode(ctx context.Context) {
	const patience = 5 * time.Second
	for {
		node, changed := b.node.Addresses()
		var again <-chan time.Time
		if err := b.replan(ctx, node); err != nil && ctx.Err() == nil {
			b.log.Error(err, "Services do not follow the addresses of this node yet")
			again = b.opts.Clock.After(patience)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again:
		}
	}
}

// replan brings the services that depend on the node's addresses in line with
// them, but for those that failed: they come again.
func (b *Backend) replan(ctx context.Context, node []netip.Addr) error {
	b.mu.Lock()
	var updates []*update
	for _, s := range b.services {
		if s.view != nil && !s.failed {
			updates = append(updates, &update{service: s, view: s.view, plan: s.planFor(s.view, node)})
		}
	}
	changes := b.bringAbout(ctx, updates)
	b.mu.Unlock()
	b.await(ctx, ctx, changes)

	b.mu.Lock()
	defer b.mu.Unlock()
	for _, u := range updates {
		if u.waiting != nil {
			u.err = nil // a Sync under way awaits its address
		}
	}
	return failures(ctx, updates)
}

// sweep ends, at intervals, what has been silent for too long.
func (b *Backend) sweep(ctx context.Context) {
	ticker := b.opts.Clock.NewTicker(max(b.opts.UDPTimeout/8, 10*time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		now := b.opts.Clock.Now()
		b.udp.expire(now.Add(-b.opts.UDPTimeout))
		for _, p := range b.served.list() {
			p.affinity.expire(now)
		}
		if err := b.local.sweep(ctx); err != nil && ctx.Err() == nil {
			b.log.Error(err, addressesStay)
		}
	}
}

// StopTimeout implements sink.Drainer: Options.DrainTimeout, and time to remove
// addresses after it.
func (b *Backend) StopTimeout() time.Duration { return b.opts.DrainTimeout + 5*time.Second }

// Stop implements sink.Stopper. It listens no more, lets connections end for
// Options.DrainTimeout at most and as long as ctx does not end, and leaves no
// address behind.
func (b *Backend) Stop(ctx context.Context) error {
	b.stopTasks()
	b.tasks.Wait()
	b.mu.Lock()
	var updates []*update
	for _, s := range b.services {
		updates = append(updates, &update{service: s, plan: s.planFor(nil, nil)})
	}
	stop := context.AfterFunc(ctx, func() { close(b.hurry) })
	// Addresses go even if there is no time left for anything else.
	last := context.WithoutCancel(ctx)
	changes := append(b.bringAbout(last, updates), b.abandon()...)
	b.mu.Unlock()
	b.await(last, last, changes)
	b.running.Wait()
	stop()
	b.pipes.close()
	return b.local.sweep(last)
}
