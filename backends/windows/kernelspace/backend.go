// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/windows/internal/journal"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Backend is a [sink.Sink] that keeps HNS' load balancers, and the endpoints
// that they need, in step with services. It is for one driver.
type Backend struct {
	opts   Options
	hns    HNS
	record *record

	views   map[types.NamespacedName]*api.ServiceEndpoints
	nodeIPs []netip.Addr
	// plans, lacking and wanted follow from views and terrain. planned says that
	// they do; if not, all is to be planned anew.
	plans   map[types.NamespacedName][]policy
	lacking map[types.NamespacedName][]unserved
	wanted  map[Frontend]want
	planned bool

	terrain terrain
	// surveyed says that the terrain's features are known.
	surveyed bool
	// have is what HNS has, nil while that is not known.
	have *holdings
	// todo are frontends that are yet to be looked at.
	todo map[Frontend]bool
	// passing says that a pass of the driver has begun and not ended. views are those of
	// the services delivered since, and nothing is pruned.
	passing bool
	// failing are services whose last sync failed: their driver says when to try
	// again.
	failing map[types.NamespacedName]bool
}

// want is a load balancer that there has to be.
type want struct {
	service types.NamespacedName
	policy  *policy
}

var (
	_ sink.Sink     = &Backend{}
	_ sink.Starter  = &Backend{}
	_ sink.Verifier = &Backend{}
	_ sink.Cleaner  = &Backend{}
)

// New returns a backend. It fails if the options make no sense, and does
// nothing yet.
func New(opts Options) (*Backend, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	opts.Name, opts.RootEndpoint = cmp.Or(opts.Name, "kpng"), cmp.Or(opts.RootEndpoint, "cbr0")
	b := &Backend{
		opts:    opts,
		hns:     opts.HNS,
		nodeIPs: opts.NodeIPs,
		views:   map[types.NamespacedName]*api.ServiceEndpoints{},
		plans:   map[types.NamespacedName][]policy{},
		wanted:  map[Frontend]want{},
		todo:    map[Frontend]bool{},
		failing: map[types.NamespacedName]bool{},
		lacking: map[types.NamespacedName][]unserved{},
	}
	if opts.Observer.Called != nil {
		b.hns = &observed{opts.HNS, opts.Observer.Called, time.Now}
	}
	b.terrain.dsr = opts.EnableDSR
	b.terrain.forwardHealthChecks, b.terrain.healthzPort = opts.ForwardHealthChecks, opts.HealthzPort
	for _, a := range opts.SourceVIPs {
		if a.Is4() {
			b.terrain.sourceVIP4 = a
		} else {
			b.terrain.sourceVIP6 = a
		}
	}
	return b, nil
}

// Start reads which load balancers an earlier process made. It fails if the state file is
// something else, or if HNS answers that it cannot do what the options ask for. HNS need not
// run yet.
func (b *Backend) Start(ctx context.Context) error {
	r, err := readRecord(b.opts.StateFile)
	switch {
	case errors.Is(err, journal.ErrForeign):
		return err
	case err != nil:
		// To go on is better than not to proxy. What can be lost is load balancers
		// of services that are no more.
		klog.FromContext(ctx).Error(err, "Load balancers of services that were deleted meanwhile will be left behind")
		r = newRecord(journal.New(b.opts.StateFile, journalKind))
	}
	b.record = r
	if b.opts.EnableDSR {
		if features, err := b.hns.Features(); err == nil {
			return b.checkFeatures(features)
		}
	}
	return nil
}

// checkFeatures returns an error if HNS cannot do what the options ask for.
func (b *Backend) checkFeatures(f Features) error {
	if b.opts.EnableDSR && !f.DSR {
		return fmt.Errorf("direct server return, which Options.EnableDSR asks for, is %w", ErrNotSupported)
	}
	return nil
}

// Sync implements [sink.Sink]. HNS is listed when a pass begins and after
// a failure, and at most once more, where the changes name a pod of this node
// that was not there. What fails is reported in a [*sink.Failed], by service with
// frontend and HNS' error. If HNS does not run, or the network is not there, everything
// fails, and Sync asks for a new pass, which is tried until HNS is back.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		clear(b.views)
		clear(b.failing)
		b.have, b.planned = nil, false
	}
	b.passing = (b.passing || c.First) && !c.Last
	told := b.learn(ctx, c)
	p := &pass{Backend: b, ctx: ctx, log: klog.FromContext(ctx), told: told}
	err := p.run()
	if _, ok := sink.Acknowledged(err); !ok {
		return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
	}
	return err
}

// Verify implements [sink.Verifier]: it lists HNS and mends what is not as it was
// left. It leaves alone what has failed, as that comes again by itself. If it
// fails, what HNS has is not known, and it asks for a new pass.
func (b *Backend) Verify(ctx context.Context) error {
	if b.have == nil {
		return nil // nothing was programmed yet, or a Sync will list
	}
	b.have = nil
	p := &pass{Backend: b, ctx: ctx, log: klog.FromContext(ctx), told: map[types.NamespacedName]bool{}}
	err := p.run()
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
}

// learn takes c into the views and plans, and returns the services in it.
func (b *Backend) learn(ctx context.Context, c *sink.Changes) map[types.NamespacedName]bool {
	told := map[types.NamespacedName]bool{}
	for change := range c.Services {
		told[change.Key] = true
		if change.New == nil {
			delete(b.views, change.Key)
		} else {
			b.views[change.Key] = change.New
		}
	}
	if c.NodeChanged && len(b.opts.NodeIPs) == 0 && c.Node != nil {
		var ips []netip.Addr
		for _, a := range c.Node.Addresses {
			ips = append(ips, a.IP)
		}
		if !slices.Equal(ips, b.nodeIPs) {
			b.nodeIPs, b.planned = ips, false
		}
	}
	if b.planned {
		b.replan(ctx, maps.Keys(told))
	}
	return told
}

// survey asks HNS what there is. What it finds changed of the network is a
// reason to look at everything.
func (b *Backend) survey(ctx context.Context) error {
	b.have = nil
	if !b.surveyed {
		features, err := b.hns.Features()
		if err != nil {
			return fmt.Errorf("ask HNS what it can do: %w", err)
		}
		if err := b.checkFeatures(features); err != nil {
			return err
		}
		b.terrain.features, b.surveyed = features, true
		klog.FromContext(ctx).V(1).Info("HNS runs", "features", features)
	}
	network, err := b.hns.Network(b.opts.Network)
	if err != nil {
		return fmt.Errorf("look up HNS network %q: %w", b.opts.Network, err)
	}
	if network.Overlay {
		if !b.terrain.features.RemoteSubnet {
			return fmt.Errorf("HNS network %q is an overlay network: remote subnets are %w", b.opts.Network, ErrNotSupported)
		}
		if !b.terrain.sourceVIP4.IsValid() {
			return fmt.Errorf("HNS network %q is an overlay network, which needs a source VIP of IPv4", b.opts.Network)
		}
	}
	endpoints, err := b.hns.Endpoints(network.ID)
	if err != nil {
		return fmt.Errorf("list the endpoints of HNS network %q: %w", b.opts.Network, err)
	}
	balancers, err := b.hns.LoadBalancers()
	if err != nil {
		return fmt.Errorf("list HNS' load balancers: %w", err)
	}
	if old := b.terrain.network; old != nil && old.ID != network.ID {
		klog.FromContext(ctx).Info("The network was made anew", "network", b.opts.Network, "id", network.ID)
	}
	if !reflect.DeepEqual(b.terrain.network, network) {
		b.terrain.network, b.planned = network, false
	}
	b.have = newHoldings(b.opts.Name, endpoints, balancers)
	b.record.confirm(b.have)
	for f := range b.wanted {
		b.todo[f] = true
	}
	for _, m := range b.record.made {
		b.todo[m.Frontend] = true
	}
	return nil
}

// replan plans services anew, and notes the frontends that this concerns.
func (b *Backend) replan(ctx context.Context, keys func(yield func(types.NamespacedName) bool)) {
	var again []types.NamespacedName
	var shared []Frontend
	for key := range keys {
		for i := range b.plans[key] {
			f := b.plans[key][i].Frontend
			if b.wanted[f].service == key {
				delete(b.wanted, f)
				if b.plans[key][i].toRoot {
					shared = append(shared, f)
				}
			}
			b.todo[f] = true
		}
		delete(b.plans, key)
		again = append(again, key)
	}
	slices.SortFunc(again, api.CompareKeys)
	for _, key := range again {
		view := b.views[key]
		if view == nil {
			delete(b.lacking, key)
			continue
		}
		policies, lacking := plan(view, &b.terrain)
		b.tellLacking(ctx, key, lacking)
		b.plans[key] = policies
		for i := range policies {
			f := policies[i].Frontend
			b.todo[f] = true
			b.wanted[f] = want{key, &policies[i]} // perhaps in place of a service that is about to change
		}
	}
	for _, f := range shared {
		b.inherit(f)
	}
}

// inherit finds another service that has a frontend for health checks, which services with
// one load-balancer address share.
func (b *Backend) inherit(f Frontend) {
	if _, wanted := b.wanted[f]; wanted {
		return
	}
	for key, policies := range b.plans {
		for i := range policies {
			if heir, ok := b.wanted[f]; policies[i].Frontend == f && (!ok || api.CompareKeys(key, heir.service) < 0) {
				b.wanted[f] = want{key, &policies[i]}
			}
		}
	}
}

// replanAll plans everything anew.
func (b *Backend) replanAll(ctx context.Context) {
	b.terrain.nodeIPs = b.nodeIPs
	keys := maps.Clone(b.views)
	for key := range b.plans {
		keys[key] = b.views[key]
	}
	b.replan(ctx, maps.Keys(keys))
	b.planned = true
}

// tellLacking logs what of a service is not provided as it is asked for, once.
func (b *Backend) tellLacking(ctx context.Context, service types.NamespacedName, lacking []unserved) {
	if slices.Equal(lacking, b.lacking[service]) {
		return
	}
	log := klog.FromContext(ctx).WithValues("service", service)
	for _, u := range lacking {
		if u.degraded {
			log.Info("Not served as it asks", "frontend", u.key.String(), "reason", u.reason)
		} else {
			log.Info("Not served", "frontend", u.key.String(), "reason", u.reason)
		}
	}
	if len(lacking) == 0 {
		delete(b.lacking, service)
	} else {
		b.lacking[service] = lacking
	}
}

// Cleanup implements [sink.Cleaner]: it removes what was made by backends of
// this name and state file. If that file cannot be read nothing is removed, for
// whose the load balancers are is not known.
func (b *Backend) Cleanup(context.Context) error {
	r, err := readRecord(b.opts.StateFile)
	if err != nil {
		return err
	}
	balancers, err := b.hns.LoadBalancers()
	if err != nil {
		return fmt.Errorf("list HNS' load balancers: %w", err)
	}
	var endpoints []Endpoint
	network, err := b.hns.Network(b.opts.Network)
	if err == nil {
		endpoints, err = b.hns.Endpoints(network.ID)
	}
	if err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("list the endpoints of HNS network %q: %w", b.opts.Network, err)
	}
	h := newHoldings(b.opts.Name, endpoints, balancers)
	r.confirm(h)
	var errs []error
	for _, id := range sortedKeys(r.made) {
		if err := b.hns.DeleteLoadBalancer(id); err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, fmt.Errorf("delete load balancer %s, %s: %w", id, r.made[id].Frontend, err))
			continue
		}
		h.removeBalancer(id)
	}
	for _, e := range endpoints {
		if !h.idle[e.ID] && e.Name != sourceVIPName(b.opts.Name) {
			continue
		}
		if err := b.hns.DeleteEndpoint(e.ID); err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, fmt.Errorf("delete endpoint %s, %v: %w", e.ID, e.Addrs, err))
		}
	}
	if len(errs) == 0 {
		errs = append(errs, r.journal.Remove())
	}
	return errors.Join(errs...)
}

// sourceVIPName returns the name of the endpoint of a source VIP.
func sourceVIPName(backend string) string { return backend + "-source-vip" }
