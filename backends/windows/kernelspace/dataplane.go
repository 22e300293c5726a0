// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

type op = reconcile.Op[frontend, *policy]

// Plan implements [reconcile.Dataplane]. A service with too many frontends keeps its load
// balancers, also those of an earlier process. But it loses the load balancers of frontends
// with source ranges, because HNS would admit all sources.
func (b *backend) Plan(view *api.View, emit func(frontend, *policy)) error {
	key := view.Key()
	policies, lacking, err := plan(view, &b.environment)
	if err != nil {
		restricted := map[frontend]bool{}
		for f := range nodeview.Frontends(view) {
			if f.Sources.Restricted {
				restricted[frontendOf(&f)] = true
			}
		}
		for id, m := range b.record.made {
			if _, exists := b.holdings.balancers[id]; exists && m.Service == key {
				var keep *policy
				if restricted[m.Frontend] {
					keep = &policy{frontend: m.Frontend} // without endpoints, so no load balancer
				}
				emit(m.Frontend, keep)
			}
		}
		return err
	}
	b.logLacking(key, lacking)
	for i := range policies {
		emit(policies[i].frontend, &policies[i])
	}
	return nil
}

// logLacking logs once which frontends of a service are not served or only partly served.
func (b *backend) logLacking(service types.NamespacedName, lacking []unservedFrontend) {
	logged, ok := b.unserved[service]
	if !ok {
		logged = b.unservedBefore[service]
	}
	if b.unserved[service] = lacking; len(lacking) == 0 {
		delete(b.unserved, service)
	}
	if slices.Equal(lacking, logged) {
		return
	}
	log := b.log.WithValues("service", service)
	for _, u := range lacking {
		if u.degraded {
			log.Info("Frontend not fully supported", "frontend", u.key.String(), "reason", u.reason)
		} else {
			log.Info("Frontend not supported", "frontend", u.key.String(), "reason", u.reason)
		}
	}
}

// List implements [reconcile.Dataplane].
func (b *backend) List(_ context.Context, emit func(frontend, *policy)) error {
	b.doubtful, b.distrusted = false, b.doubtful
	if err := b.survey(); err != nil {
		return err
	}
	b.beginning = false
	for f := range b.holdings.byFrontend {
		if len(b.balancersAt(f)) > 0 {
			emit(f, nil)
		}
	}
	for f := range b.void {
		if len(b.balancersAt(f)) == 0 {
			emit(f, nil)
		}
	}
	return nil
}

// equal compares a recorded policy with a wanted policy. If want is nil, it compares the
// recorded policy with HNS.
func (b *backend) equal(is, want *policy) bool {
	switch {
	case is == nil:
		return want == nil
	case want == nil:
		return b.isProgrammed(is, false)
	default:
		return b.isProgrammed(want, true)
	}
}

// isProgrammed reports whether HNS has exactly the load balancer of a policy. If complete
// is false, endpoints may be missing.
func (b *backend) isProgrammed(p *policy, complete bool) bool {
	own := b.balancersAt(p.frontend)
	ids, all := b.endpointIDs(p)
	if len(own) != min(len(ids), 1) || complete && !all {
		return false
	}
	if len(ids) == 0 {
		return true
	}
	if _, ok := b.holdings.endpointAt(p.VIP); p.needsVIPEndpoint && !ok {
		return false
	}
	have, want := b.holdings.balancers[own[0]], p.toLoadBalancer(ids)
	return sameEndpoints(have, want) && b.record.unchanged(have, want)
}

// Apply implements [reconcile.Dataplane]. If HNS lacks endpoints of a load balancer, the
// load balancer gets the others, and Sync makes the service fail.
func (b *backend) Apply(ctx context.Context, ops []op) error {
	b.wanted = make(map[frontend]bool, len(ops))
	for i := range ops {
		if ops[i].New != nil {
			b.wanted[ops[i].Key] = true
		}
	}
	defer func() { b.wanted = nil }()
	b.announce(ops)
	failed := reconcile.Failed[frontend]{}
	for i := range ops {
		o := &ops[i]
		err := context.Cause(ctx)
		if err == nil {
			err = b.change(o)
		}
		if isFatal(err) {
			return fmt.Errorf("service %s: frontend %s: %w", o.Service, o.Key, err)
		}
		if err != nil {
			b.trouble(o)
			failed[o.Key] = fmt.Errorf("frontend %s: %w", o.Key, err)
		}
	}
	if len(failed) > 0 {
		return &failed
	}
	return nil
}

// change executes an operation.
func (b *backend) change(o *op) error {
	delete(b.troubled, o.Key)
	if o.New == nil {
		return b.remove(o.Key)
	}
	if *o.New == nil {
		return nil // the load balancer of a refused service stays
	}
	lacking, err := b.ensure(*o.New, o.Service)
	if lacking != nil {
		b.trouble(o)
		lacking = fmt.Errorf("frontend %s: %w", o.Key, lacking)
		if before := b.lacking[o.Service]; before != nil {
			lacking = fmt.Errorf("%w; %w", before, lacking)
		}
		b.lacking.Add(o.Service, lacking)
	}
	return err
}

// trouble records that an operation of a service has failed.
func (b *backend) trouble(o *op) {
	if o.Service.Name != "" {
		b.troubled[o.Key] = o.Service
	}
}

// isFatal reports whether the state of HNS is unknown after err.
func isFatal(err error) bool {
	return errors.Is(err, hns.ErrNotRunning) || errors.Is(err, sink.ErrStartOver)
}

// relist reads the state of HNS again, unless this call of the driver has already done so.
func (b *backend) relist() error {
	if b.listed {
		return nil
	}
	if err := b.survey(); err != nil {
		return startOver(err)
	}
	return nil
}

// survey reads the state of HNS, and removes the objects that would make later calls fail.
// A changed network is an error, unless a pass begins.
func (b *backend) survey() error {
	if !b.surveyed {
		features, err := b.hns.Features()
		if err != nil {
			return fmt.Errorf("read features of HNS: %w", err)
		}
		if err := b.checkFeatures(features); err != nil {
			return err
		}
		b.environment.features, b.surveyed = features, true
		b.log.V(1).Info("HNS runs", "features", features)
	}
	network, err := b.hns.Network(b.opts.Network)
	if err != nil {
		return fmt.Errorf("find HNS network %q: %w", b.opts.Network, err)
	}
	if network.Overlay {
		if !b.environment.features.RemoteSubnet {
			return fmt.Errorf("HNS network %q is an overlay network: remote subnets are %w", b.opts.Network, hns.ErrNotSupported)
		}
		if !b.environment.sourceVIP4.IsValid() {
			return fmt.Errorf("HNS network %q is an overlay network, which needs a source VIP of IPv4", b.opts.Network)
		}
	}
	endpoints, err := b.hns.Endpoints(network.ID)
	if err != nil {
		return fmt.Errorf("list endpoints of HNS network %q: %w", b.opts.Network, err)
	}
	balancers, err := b.hns.LoadBalancers()
	if err != nil {
		return fmt.Errorf("list load balancers of HNS: %w", err)
	}
	if old := b.environment.network; old != nil && old.ID != network.ID {
		b.log.Info("HNS network was recreated", "network", b.opts.Network, "id", network.ID)
	}
	if !reflect.DeepEqual(b.environment.network, network) {
		b.environment.network, b.environment.tunnels = network, newTunnels(network)
		if !b.beginning {
			return startOver(fmt.Errorf("HNS network %q has changed", b.opts.Network))
		}
	}
	b.holdings, b.listed, b.mac, b.root = newHoldings(b.opts.Instance, endpoints, balancers), true, "", ""
	b.record.confirm(b.holdings)
	if err := b.ensureSourceVIPs(); err != nil {
		return err
	}
	if err := b.dropEmpty(); err != nil {
		return err
	}
	return b.dropMoved()
}
