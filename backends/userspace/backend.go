// SPDX-License-Identifier: Apache-2.0

package userspace

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
		// One address too many is no reason to serve none.
		b.log.Error(err, "Addresses stay on this host until the next start or cleanup")
	}
	tasks, stop := context.WithCancel(context.WithoutCancel(ctx))
	b.stopTasks = stop
	b.tasks.Go(func() { b.machine.Run(tasks) })
	if b.watcher != nil {
		b.tasks.Go(func() { b.watcher.Run(tasks) })
	}
	b.tasks.Go(func() { b.followNode(tasks) })
	b.tasks.Go(func() { b.sweep(tasks) })
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
}

// Sync implements sink.Sink.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	nodeaddr.SetNode(b.node, c.Node)
	node, _ := b.node.Addresses()

	if c.First {
		for _, s := range b.services {
			s.stale = true
		}
	}
	var updates []update
	for change := range c.Services {
		s := b.services[change.Key]
		if s == nil {
			if change.New == nil {
				continue
			}
			s = newService(&b.engine, change.Key)
		}
		s.stale = false
		updates = append(updates, update{s, change.New, s.planFor(change.New, node)})
	}
	if c.Last {
		for _, s := range b.services {
			if s.stale {
				updates = append(updates, update{s, nil, s.planFor(nil, node)})
			}
		}
	}
	err := b.bringAbout(ctx, updates)
	failed, acknowledged := sink.Acknowledged(err)
	if acknowledged && c.Last {
		b.local.abandon()
		b.sweepAddresses(ctx)
	}
	for _, u := range updates {
		_, u.service.failed = failed[u.key]
	}
	return err
}

// bringAbout closes what is not needed any more, for all services, before it
// opens what is new, so that services can exchange places.
func (b *Backend) bringAbout(ctx context.Context, updates []update) error {
	for _, u := range updates {
		u.withdraw(u.plan)
		b.services[u.key] = u.service
	}
	lacking := b.makeLocal(ctx, updates)
	var failed sink.Failed
	var needless []netip.Addr
	defer func() { b.forgo(ctx, needless...) }()
	for _, u := range updates {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		failed.Add(u.key, errors.Join(lacking[u.key], u.apply(ctx, u.plan)))
		needless = append(needless, u.forget(u.plan)...)
		if u.view == nil {
			delete(b.services, u.key)
			continue
		}
		u.service.view = nil
		if u.dependsOnNode {
			u.service.view = u.view
		}
	}
	return failed.Err()
}

// makeLocal makes the addresses local that services are going to have, all at
// once. It returns why services lack one.
func (b *Backend) makeLocal(ctx context.Context, updates []update) map[types.NamespacedName]error {
	type need struct {
		*service
		addr netip.Addr
		err  error
	}
	var needs []*need
	for _, u := range updates {
		for _, addr := range u.plan.addresses {
			if _, has := u.service.addresses[addr]; !has {
				needs = append(needs, &need{service: u.service, addr: addr})
			}
		}
	}
	atOnce(needs, func(n *need) error {
		n.err = b.local.acquire(ctx, n.addr)
		return nil
	})
	lacking := map[types.NamespacedName]error{}
	for _, n := range needs {
		if n.err != nil {
			lacking[n.key] = errors.Join(lacking[n.key], n.err)
			continue
		}
		n.service.addresses[n.addr] = struct{}{}
	}
	return lacking
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
	defer b.mu.Unlock()
	var updates []update
	for _, s := range b.services {
		if s.view != nil && !s.failed {
			updates = append(updates, update{s, s.view, s.planFor(s.view, node)})
		}
	}
	return b.bringAbout(ctx, updates)
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
		b.sweepAddresses(ctx)
	}
}

func (b *Backend) sweepAddresses(ctx context.Context) {
	if err := b.local.sweep(ctx); err != nil && ctx.Err() == nil {
		b.log.Error(err, "Addresses stay on this host for now")
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
	defer b.mu.Unlock()
	var updates []update
	for _, s := range b.services {
		updates = append(updates, update{s, nil, s.planFor(nil, nil)})
	}
	stop := context.AfterFunc(ctx, func() { close(b.hurry) })
	// Addresses go even if there is no time left for anything else.
	last := context.WithoutCancel(ctx)
	err := b.bringAbout(last, updates)
	b.running.Wait()
	stop()
	b.pipes.close()
	b.local.abandon()
	return errors.Join(err, b.local.sweep(last))
}
