// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/internal/hns"
	"k8s.io/apimachinery/pkg/types"
)

// logJournalError logs an error of the journal. Proxying continues.
func (b *backend) logJournalError(err error) {
	if err != nil {
		b.log.Error(err, "Cannot write the state file; a killed process may leave load balancers behind")
	}
}

// balancersAt returns the IDs of this backend's load balancers at a frontend. Usually
// there is only one ID.
func (b *backend) balancersAt(f frontend) []string {
	var ids []string
	for _, id := range b.holdings.byFrontend[f] {
		if b.record.owns(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// remove deletes this backend's load balancers at a frontend.
func (b *backend) remove(f frontend) error {
	for _, id := range b.balancersAt(f) {
		if err := b.deleteBalancer(id); err != nil {
			return err
		}
	}
	delete(b.void, f)
	return nil
}

// announce records the load balancers that are about to be created, so that their owner
// is known even after a crash. It flushes the journal once for all of them.
func (b *backend) announce(ops []op) {
	for _, o := range ops {
		if o.New != nil && *o.New != nil && b.isToBeCreated(*o.New) {
			b.planCreation(*o.New, o.Service)
		}
	}
	b.logJournalError(b.record.journal.Sync())
}

func (b *backend) planCreation(p *policy, service types.NamespacedName) {
	b.record.plan(p.frontend, plannedBalancer{Service: service, Target: p.target, Asked: digestOf(p.toLoadBalancer(nil))})
}

// isToBeCreated reports whether a policy needs a new load balancer. It needs one if its
// frontend has no load balancer, or a load balancer that cannot be changed in place.
func (b *backend) isToBeCreated(p *policy) bool {
	own := b.balancersAt(p.frontend)
	if len(own) == 0 {
		return len(b.holdings.byFrontend[p.frontend]) == 0 // the method balance decides whether to replace a load balancer of another owner
	}
	ids, all := b.endpointIDs(p)
	have, want := b.holdings.balancers[own[0]], p.toLoadBalancer(ids)
	return !b.record.unchanged(have, want) || !b.environment.features.ModifyLoadBalancer && !(all && sameEndpoints(have, want))
}

// ensure creates or changes the load balancer of a policy. The load balancer gets the
// endpoints that exist. The error lacking names the endpoints that are missing.
func (b *backend) ensure(p *policy, service types.NamespacedName) (lacking, err error) {
	ids, lacking := b.endpoints(p)
	if isFatal(lacking) {
		return nil, lacking
	}
	if len(ids) == 0 {
		if err := b.remove(p.frontend); err != nil {
			return nil, err
		}
		b.void[p.frontend] = true
		return lacking, nil
	}
	delete(b.void, p.frontend)
	if p.needsVIPEndpoint {
		if err := b.ensureVIPEndpoint(p.VIP); err != nil {
			return nil, err
		}
	}
	return lacking, b.balance(p, service, p.toLoadBalancer(ids))
}

// balance creates the wanted load balancer at a frontend, or changes the
// existing load balancer so that it matches.
func (b *backend) balance(p *policy, service types.NamespacedName, want hns.LoadBalancer) error {
	holders := b.holdings.byFrontend[p.frontend]
	if len(holders) == 0 {
		return b.create(p, service, want)
	}
	have := b.holdings.balancers[holders[0]]
	if own := b.balancersAt(p.frontend); len(own) > 0 {
		have = b.holdings.balancers[own[0]]
		for _, id := range own[1:] {
			if err := b.deleteBalancer(id); err != nil {
				return err
			}
		}
	}
	unchanged := b.record.unchanged(have, want)
	if unchanged && sameEndpoints(have, want) {
		b.keep(p, service, have, want)
		return nil
	}
	if err := b.mayReplace(p.frontend, have); err != nil {
		return err
	}
	if unchanged && b.environment.features.ModifyLoadBalancer {
		err := b.update(p, service, have, want)
		if !errors.Is(err, hns.ErrNotSupported) {
			return err
		}
		b.environment.features.ModifyLoadBalancer = false
	}
	if err := b.deleteBalancer(have.ID); err != nil {
		return err
	}
	return b.create(p, service, want)
}

// dropEmpty deletes load balancers without endpoints, before any other change. A load
// balancer loses its endpoints when other owners delete them. On some versions of Windows,
// all changes of load balancers then fail until the empty load balancer is deleted. A load
// balancer of another owner is deleted only if it has frontends and this backend may
// replace it.
func (b *backend) dropEmpty() error {
	for _, id := range sortedKeys(b.holdings.balancers) {
		lb := b.holdings.balancers[id]
		if b.record.owns(id) {
			if slices.ContainsFunc(lb.Endpoints, b.holdings.hasEndpoint) {
				continue
			}
		} else if _, other := b.unservedAt(lb); other || len(lb.Endpoints) > 0 || len(lb.Ports) == 0 {
			continue
		}
		if err := b.deleteBalancer(id); isFatal(err) {
			return err
		} else if err != nil {
			b.log.Error(err, "Cannot delete load balancer without endpoints; retrying later", "id", id, "frontends", frontendsOf(lb))
		}
	}
	return nil
}

// unservedAt returns a frontend of a load balancer that this backend does not serve.
func (b *backend) unservedAt(lb hns.LoadBalancer) (f frontend, ok bool) {
	for _, f := range frontendsOf(lb) {
		if _, troubled := b.troubled[f]; !b.wanted[f] && !b.void[f] && !troubled && len(b.balancersAt(f)) == 0 {
			return f, true
		}
	}
	return frontend{}, false
}

// keep adds a correct load balancer to this backend's record. Another owner
// may have created the load balancer.
func (b *backend) keep(p *policy, service types.NamespacedName, have, want hns.LoadBalancer) {
	if m := b.record.made[have.ID]; m == nil || m.Service != service {
		b.record.add(have.ID, madeBalancer{Frontend: p.frontend, Service: service, Asked: digestOf(want), Answered: digestOf(have)})
	}
}

// update changes the endpoints of a load balancer. It returns ErrNotSupported
// if this version of Windows cannot change load balancers.
func (b *backend) update(p *policy, service types.NamespacedName, have, want hns.LoadBalancer) error {
	want.ID = have.ID
	if err := b.hns.UpdateLoadBalancer(want); errors.Is(err, hns.ErrNotSupported) {
		return err
	} else if err != nil {
		b.doubtful = true
		return fmt.Errorf("update load balancer %s: %w", have.ID, err)
	}
	b.log.V(3).Info("Updated load balancer", "service", service, "frontend", p.frontend.String(), "id", have.ID, "endpoints", len(want.Endpoints))
	b.keep(p, service, have, want)
	b.holdings.removeBalancer(have.ID)
	have.Endpoints = want.Endpoints
	b.holdings.addBalancer(have)
	return nil
}

// mayReplace returns an error if a load balancer of another owner also has frontends that
// this backend does not serve. Without such frontends, the load balancer is a leftover of
// another proxy, and this backend may replace it.
func (b *backend) mayReplace(f frontend, lb hns.LoadBalancer) error {
	if b.record.owns(lb.ID) {
		return nil
	}
	if other, ok := b.unservedAt(lb); ok {
		return fmt.Errorf("load balancer %s of another owner has this frontend and also %s", lb.ID, other)
	}
	b.log.Info("Replacing a load balancer of another owner", "frontend", f.String(), "id", lb.ID)
	return nil
}

// create creates a load balancer. If HNS already has a load balancer with this frontend,
// the method lists all load balancers and changes or replaces the existing load balancer.
func (b *backend) create(p *policy, service types.NamespacedName, want hns.LoadBalancer) error {
	if b.record.planned[p.frontend] == nil {
		b.planCreation(p, service)
		b.logJournalError(b.record.journal.Sync())
	}
	b.record.planned[p.frontend].requested = true
	answer, err := b.hns.CreateLoadBalancer(want)
	if errors.Is(err, hns.ErrExists) {
		b.record.planned[p.frontend].requested = false // the existing load balancer is not the result of this request
		if !b.listed {
			if err := b.relist(); err != nil {
				return err
			}
			return b.balance(p, service, want)
		}
	}
	if err != nil {
		b.doubtful = true
		return fmt.Errorf("create load balancer: %w", err)
	}
	b.log.V(3).Info("Created load balancer", "service", service, "frontend", p.frontend.String(), "id", answer.ID, "endpoints", len(want.Endpoints))
	b.record.add(answer.ID, madeBalancer{Frontend: p.frontend, Service: service, Asked: digestOf(want), Answered: digestOf(answer)})
	answer.Endpoints = want.Endpoints
	b.holdings.addBalancer(answer)
	return nil
}

// deleteBalancer deletes a load balancer. If it does not exist, there is no error.
func (b *backend) deleteBalancer(id string) error {
	err := b.hns.DeleteLoadBalancer(id)
	if err != nil && !isFatal(err) && !errors.Is(err, hns.ErrNotFound) {
		// Retry: Windows Server 2019 may return an error although it deletes the load balancer.
		err = b.hns.DeleteLoadBalancer(id)
	}
	if err != nil && !errors.Is(err, hns.ErrNotFound) {
		b.doubtful = true
		return fmt.Errorf("delete load balancer %s: %w", id, err)
	}
	b.log.V(3).Info("Deleted load balancer", "id", id)
	b.holdings.removeBalancer(id)
	b.record.setDeleted(id, true)
	return nil
}
