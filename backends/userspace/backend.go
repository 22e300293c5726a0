// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// backend is the dataplane of this package. It proxies in this process. After a
// stop, it cannot start again.
type backend struct {
	engine
	owner ownership.Owner
	node  nodeaddr.Source
	// watcher is nil if Options.NodeAddresses is set. Otherwise the field node is this
	// watcher, and Start runs it.
	watcher *nodeaddrs.Watcher

	// mu guards the services and their listeners.
	mu       sync.Mutex
	services map[types.NamespacedName]*service

	life      context.Context // ends when Stop is called
	stopTasks context.CancelFunc
	tasks     sync.WaitGroup
}

var (
	_ backends.Dataplane = (*backend)(nil)
	_ backends.Capable   = (*backend)(nil)
	_ backends.Counter   = (*backend)(nil)
)

// New returns a dataplane that proxies with sockets of this process. It returns an error if
// an option is invalid, or if it cannot read the addresses of the machine. It does not
// change the host.
//
// When the dataplane starts, it keeps the addresses that a killed process added, because
// services may need them. Stop drains connections and then removes all addresses, so
// traffic does not flow while the program is replaced. Cleanup removes the addresses that
// this process or an earlier one added.
func New(opts Options) (backends.Dataplane, error) {
	b, err := newBackend(settings{Options: opts})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newBackend(opts settings) (*backend, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	b := &backend{
		engine: engine{
			opts:        &opts,
			log:         klog.Background(),
			local:       newReferences(opts.addresses),
			buffers:     newBuffers(),
			pipes:       opts.pipes,
			batches:     newBatches(),
			udp:         newUDPClients(min(opts.MaxUDPClients, openFilesLimit()/2)),
			descriptors: opts.descriptors,
			drainEnded:  make(chan struct{}),
		},
		services: map[types.NamespacedName]*service{},
	}
	b.sockets.all = map[socketAddr]*service{}
	var err error
	if b.machine, err = nodeaddrs.New(nodeaddrs.Options{Selection: everyAddress}); err != nil {
		return nil, err
	}
	if b.node = opts.NodeAddresses; b.node == nil {
		if b.watcher, err = nodeaddrs.New(nodeaddrs.Options{ExcludeInterfaces: []string{opts.Interface}}); err != nil {
			return nil, err
		}
		b.node = b.watcher
	}
	return b, nil
}

// everyAddress selects all addresses, including link-local addresses.
var everyAddress = []string{"all", "169.254.0.0/16", "fe80::/10"}

// Start implements [sink.Starter]. Start keeps the addresses that a killed process made
// local, because services may need them. The backend logs to the logger of ctx. If another
// process owns the addresses of the same instance, the error wraps [sink.ErrOwned].
func (b *backend) Start(ctx context.Context) error {
	return b.owner.Start(b.own(ctx), func() error { return b.start(ctx) })
}

// own returns a function that takes the ownership of the local addresses.
func (b *backend) own(ctx context.Context) func() (release func(), err error) {
	if a, ok := b.opts.addresses.(exclusive); ok {
		return func() (func(), error) { return a.Own(ctx) }
	}
	return func() (func(), error) { return func() {}, nil }
}

func (b *backend) start(ctx context.Context) error {
	b.log = klog.FromContext(ctx)
	if err := b.local.adopt(ctx); err != nil {
		return err
	}
	b.life, b.stopTasks = context.WithCancel(context.WithoutCancel(ctx))
	for _, w := range []*nodeaddrs.Watcher{b.machine, b.watcher} {
		if w != nil {
			b.tasks.Go(func() {
				stop := w.Start(b.life)
				<-b.life.Done()
				stop()
			})
		}
	}
	b.tasks.Go(func() { b.followNode(b.life) })
	b.tasks.Go(func() { b.sweep(b.life) })
	return nil
}

// Cleanup implements [sink.Cleaner]. It removes the addresses that this process or an
// earlier one made local. If another process owns them, Cleanup changes nothing, and its
// error wraps [sink.ErrOwned].
func (b *backend) Cleanup(ctx context.Context) error {
	if b.opts.addresses == nil {
		return nil
	}
	return b.owner.During(b.own(ctx), func() error {
		if err := b.opts.addresses.Cleanup(ctx); err != nil {
			return fmt.Errorf("remove addresses left on this host: %w", err)
		}
		return nil
	})
}

// Verify implements [sink.Verifier]. If another process removed addresses, Verify makes
// them local again.
func (b *backend) Verify(ctx context.Context) error { return b.local.restore(ctx) }

// update is a change of one service.
type update struct {
	*service
	view *api.View // nil if the service is deleted
	*plan
	// refused is the reason why the service keeps its last state instead of the plan.
	refused error
}

// newUpdate returns an update to a view on a node with these addresses. It refuses the
// view if the service would get too many listeners.
func (b *backend) newUpdate(s *service, view *api.View, node []netip.Addr) *update {
	p, err := s.planFor(view, node)
	if err == nil {
		err = s.account.reserve(p.size())
	}
	return &update{service: s, view: view, plan: p, refused: err}
}

// err returns the reasons why the update is not completely applied.
func (u *update) err() error {
	if u.refused != nil {
		return u.refused
	}
	return u.service.err(u.plan)
}

// Sync implements [sink.Sink]. It waits until all needed addresses are local. If an address
// takes too long, Sync returns errors for the services that need this address. Their
// listeners open as soon as the addresses are local, and the driver delivers these services
// again.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	nodeaddrs.SetNode(b.node, c.Node)
	b.mu.Lock()
	updates := b.updates(c)
	changes := b.applyAll(ctx, updates)
	if c.Last && ctx.Err() == nil {
		changes = append(changes, b.abandon()...)
	}
	b.mu.Unlock()
	b.makeChanges(ctx, b.life, changes)

	b.mu.Lock()
	defer b.mu.Unlock()
	var failed sink.Failed
	for _, u := range updates {
		err := u.err()
		u.failed = err != nil
		failed.Add(u.service.service, err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return failed.Err()
}

// updates returns an update for each service in c. If c.Last is true, it also returns
// updates to delete the services that the pass did not deliver.
func (b *backend) updates(c *sink.Changes) (updates []*update) {
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
		updates = append(updates, b.newUpdate(s, change.New, node))
	}
	if c.Last {
		for _, s := range b.services {
			if s.stale {
				updates = append(updates, b.newUpdate(s, nil, node))
			}
		}
	}
	return updates
}

// applyAll applies updates. It first closes the unneeded listeners of all services and
// then opens new ones, so that services can swap addresses. It returns changes of
// addresses, which the caller must pass to makeChanges.
func (b *backend) applyAll(ctx context.Context, updates []*update) (changes []*change) {
	updates = slices.DeleteFunc(slices.Clone(updates), func(u *update) bool { return u.refused != nil })
	for _, u := range updates {
		u.withdraw(u.plan)
		b.services[u.service.service] = u.service
	}
	for _, u := range updates {
		if ctx.Err() != nil {
			break
		}
		changes = append(changes, u.missingAddresses()...)
		u.apply(ctx, u.plan)
		changes = append(changes, u.forget(u.plan)...)
		if u.view == nil {
			delete(b.services, u.service.service)
			continue
		}
		u.service.view = nil
		if u.dependsOnNode {
			u.service.view = u.view
		}
	}
	return changes
}

// For each address that adopt has read, abandon returns a change that removes one user.
// If an address has other users, it stays local.
func (b *backend) abandon() (changes []*change) {
	for _, addr := range b.local.abandon() {
		changes = append(changes, &change{addr: addr})
	}
	return changes
}

// followNode updates services when the addresses of the node change, until ctx ends.
func (b *backend) followNode(ctx context.Context) {
	const patience = 5 * time.Second
	for {
		node, changed := b.node.Addresses()
		var again <-chan time.Time
		if err := b.replan(ctx, node); err != nil && ctx.Err() == nil {
			b.log.Error(err, "Cannot update services to new node addresses; retrying")
			again = b.opts.clock.After(patience)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again:
		}
	}
}

// replan updates the services that depend on the addresses of the node. It skips failed
// services, because the driver delivers them again.
func (b *backend) replan(ctx context.Context, node []netip.Addr) error {
	b.mu.Lock()
	var updates []*update
	for _, s := range b.services {
		if s.view != nil && !s.failed {
			updates = append(updates, b.newUpdate(s, s.view, node))
		}
	}
	changes := b.applyAll(ctx, updates)
	b.mu.Unlock()
	b.makeChanges(ctx, ctx, changes)

	b.mu.Lock()
	defer b.mu.Unlock()
	var failed sink.Failed
	for _, u := range updates {
		if u.refused != nil || u.waiting == nil { // else the service only waits for addresses
			failed.Add(u.service.service, u.err())
		}
	}
	return failed.Err()
}

// sweep does three things regularly until ctx ends. It closes the sockets of idle UDP
// clients, forgets expired affinity, and tries again to remove addresses whose removal
// failed.
func (b *backend) sweep(ctx context.Context) {
	ticker := b.opts.clock.NewTicker(max(b.opts.UDPTimeout/8, 10*time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		now := b.opts.clock.Now()
		b.udp.expire(now.Add(-b.opts.UDPTimeout))
		b.mu.Lock()
		services := slices.Collect(maps.Values(b.services))
		b.mu.Unlock()
		for _, s := range services {
			s.affinity.expire(now)
		}
		if err := b.local.sweep(ctx); err != nil && ctx.Err() == nil {
			b.log.Error(err, addressesStay)
		}
	}
}

// Honours implements [backends.Capable]. The backend honours all parameters.
func (b *backend) Honours() nodeview.Parameters {
	return nodeview.Parameters{Algorithm: true, Weights: true, Resets: true, NodePortSources: true}
}

// StopTimeout returns the time limit for [sink.Stopper]. It is Options.DrainTimeout plus
// five seconds for the removal of addresses.
func (b *backend) StopTimeout() time.Duration { return b.opts.DrainTimeout + 5*time.Second }

// Stop implements [sink.Stopper]. It closes all listeners, and drains connections until
// Options.DrainTimeout has passed or ctx ends. Then it removes the local addresses.
func (b *backend) Stop(ctx context.Context) error {
	defer b.owner.Release()
	b.stopTasks()
	b.tasks.Wait()
	b.mu.Lock()
	var updates []*update
	for _, s := range b.services {
		updates = append(updates, b.newUpdate(s, nil, nil))
	}
	stop := context.AfterFunc(ctx, func() { close(b.drainEnded) })
	// If ctx ends, addresses must still be removed.
	last := context.WithoutCancel(ctx)
	changes := append(b.applyAll(last, updates), b.abandon()...)
	b.mu.Unlock()
	b.makeChanges(last, last, changes)
	b.running.Wait()
	stop()
	b.pipes.close()
	return b.local.sweep(last)
}

// Totals calls f for each IP family with the numbers of open listeners and of failed
// attempts to open a listener. It returns the number of TCP connections and UDP clients
// so far. Totals is safe for concurrent use. Package app/program uses it for metrics.
func (b *backend) Totals(f func(family api.Family, listeners, failures int64)) (accepted int64) {
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
		f(family, b.listening[family].Load(), b.unopened[family].Load())
	}
	return b.accepted.Load()
}

// PortStats calls f for each port of a service. It passes the total and the present number
// of TCP connections and UDP clients, and the number of failed attempts to reach an
// endpoint. The other arguments are the bytes sent to endpoints and received from them.
// Counting begins when the port is added. PortStats is safe for concurrent use. Package
// app/program uses it for metrics.
func (b *backend) PortStats(f func(service types.NamespacedName, protocol api.Protocol, port int32, connections, active, dialFailures, sent, received int64)) {
	for _, p := range b.served.list() {
		c := &p.counters
		f(p.service, p.protocol, p.number, c.connections.Load(), c.active.Load(), c.dialFailures.Load(), c.bytesToEndpoints.Load(), c.bytesFromEndpoints.Load())
	}
}
