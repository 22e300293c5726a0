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
func (p *pass) logJournalError(err error) {
	if err != nil {
		p.log.Error(err, "Cannot write the state file; a killed process may leave load balancers behind")
	}
}

// The method own returns the IDs of this backend's load balancers at a frontend. Usually
// there is only one ID.
func (p *pass) own(f frontend) []string {
	var ids []string
	for _, id := range p.holdings.byFrontend[f] {
		if p.record.owns(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// holder returns the service for which this backend has a load balancer at the frontend.
func (p *pass) holder(f frontend) types.NamespacedName {
	for _, id := range p.own(f) {
		return p.record.made[id].Service
	}
	return types.NamespacedName{}
}

// remove deletes this backend's load balancers at a frontend.
func (p *pass) remove(f frontend) error {
	for _, id := range p.own(f) {
		if err := p.deleteBalancer(id); err != nil {
			return err
		}
	}
	return nil
}

// announce records the load balancers that are about to be created, so that their owner
// is known even after a crash. It flushes the journal once for all of them.
func (p *pass) announce(frontends []frontend) {
	for _, f := range frontends {
		if w := p.wanted[f]; p.isToBeCreated(f, w.policy) {
			p.plan(f, w)
		}
	}
	p.logJournalError(p.record.journal.Sync())
}

func (p *pass) plan(f frontend, w want) {
	p.record.plan(f, planned{Service: w.service, Target: w.policy.target, Asked: digestOf(w.policy.toLoadBalancer(nil))})
}

// isToBeCreated reports whether a policy needs a new load balancer. It needs one if its
// frontend has no load balancer, or a load balancer that cannot be changed in place.
func (p *pass) isToBeCreated(f frontend, policy *policy) bool {
	own := p.own(f)
	if len(own) == 0 {
		return len(p.holdings.byFrontend[f]) == 0 // the method balance decides whether to replace a load balancer of another owner
	}
	var ids []string
	for _, d := range policy.endpoints {
		id, ok := p.holdings.endpointFor(d)
		if !ok && !p.environment.features.ModifyLoadBalancer {
			return true
		}
		ids = append(ids, id)
	}
	have, want := p.holdings.balancers[own[0]], policy.toLoadBalancer(ids)
	return !p.record.unchanged(have, want) || !p.environment.features.ModifyLoadBalancer && !sameEndpoints(have, want)
}

// ensure creates or changes the wanted load balancer at a frontend. The load balancer
// gets the endpoints that exist. If some endpoints are missing, ensure returns an error.
func (p *pass) ensure(f frontend) error {
	w := p.wanted[f]
	ids, lacking := p.endpoints(w.policy)
	if isFatal(lacking) {
		return lacking
	}
	if len(ids) == 0 {
		if err := p.remove(f); err != nil {
			return err
		}
		return lacking
	}
	if w.policy.needsVIPEndpoint {
		if err := p.ensureVIPEndpoint(f.VIP); err != nil {
			return err
		}
	}
	if err := p.balance(f, w, w.policy.toLoadBalancer(ids)); err != nil {
		return err
	}
	return lacking
}

// The method balance creates the wanted load balancer at a frontend, or changes the
// existing load balancer so that it matches.
func (p *pass) balance(f frontend, w want, want hns.LoadBalancer) error {
	holders := p.holdings.byFrontend[f]
	if len(holders) == 0 {
		return p.create(f, w, want)
	}
	have := p.holdings.balancers[holders[0]]
	if own := p.own(f); len(own) > 0 {
		have = p.holdings.balancers[own[0]]
		for _, id := range own[1:] {
			if err := p.deleteBalancer(id); err != nil {
				return err
			}
		}
	}
	unchanged := p.record.unchanged(have, want)
	if unchanged && sameEndpoints(have, want) {
		p.keep(f, w, have, want)
		return nil
	}
	if err := p.mayReplace(f, have); err != nil {
		return err
	}
	if unchanged && p.environment.features.ModifyLoadBalancer {
		err := p.update(f, w, have, want)
		if !errors.Is(err, hns.ErrNotSupported) {
			return err
		}
		p.environment.features.ModifyLoadBalancer = false
	}
	if err := p.deleteBalancer(have.ID); err != nil {
		return err
	}
	return p.create(f, w, want)
}

// dropEmpty deletes load balancers without endpoints, before any other change. A load
// balancer loses its endpoints when others delete them. On some versions of Windows, all
// later changes of load balancers then fail until it is deleted. A load balancer of
// another owner is deleted only if it has frontends, and this backend may replace it.
func (p *pass) dropEmpty() error {
	for _, id := range sortedKeys(p.holdings.balancers) {
		lb := p.holdings.balancers[id]
		if p.record.owns(id) {
			if slices.ContainsFunc(lb.Endpoints, p.holdings.hasEndpoint) {
				continue
			}
		} else if _, other := p.unwanted(lb); other || len(lb.Endpoints) > 0 || len(lb.Ports) == 0 {
			continue
		}
		for _, f := range frontendsOf(lb) {
			p.todo[f] = true
		}
		if err := p.deleteBalancer(id); isFatal(err) {
			return err
		} else if err != nil {
			p.log.Error(err, "Cannot delete load balancer without endpoints; retrying later", "id", id, "frontends", frontendsOf(lb))
		}
	}
	return nil
}

// unwanted returns a frontend of a load balancer that this backend does not serve.
func (p *pass) unwanted(lb hns.LoadBalancer) (f frontend, ok bool) {
	for _, f := range frontendsOf(lb) {
		if _, wanted := p.wanted[f]; !wanted {
			return f, true
		}
	}
	return frontend{}, false
}

// The method keep adds a correct load balancer to this backend's record. Another owner
// may have created the load balancer.
func (p *pass) keep(f frontend, w want, have, want hns.LoadBalancer) {
	if m := p.record.made[have.ID]; m == nil || m.Service != w.service {
		p.record.add(have.ID, made{Frontend: f, Service: w.service, Asked: digestOf(want), Answered: digestOf(have)})
	}
}

// The method update changes the endpoints of a load balancer. It returns ErrNotSupported
// if this version of Windows cannot change load balancers.
func (p *pass) update(f frontend, w want, have, want hns.LoadBalancer) error {
	want.ID = have.ID
	if err := p.hns.UpdateLoadBalancer(want); errors.Is(err, hns.ErrNotSupported) {
		return err
	} else if err != nil {
		p.wrong = true
		return fmt.Errorf("update load balancer %s: %w", have.ID, err)
	}
	p.log.V(3).Info("Updated load balancer", "service", w.service, "frontend", f.String(), "id", have.ID, "endpoints", len(want.Endpoints))
	p.keep(f, w, have, want)
	p.holdings.removeBalancer(have.ID)
	have.Endpoints = want.Endpoints
	p.holdings.addBalancer(have)
	return nil
}

// mayReplace returns an error if a load balancer of another owner also has frontends that
// this backend does not serve. Without such frontends, the load balancer is a leftover of
// another proxy, and this backend may replace it.
func (p *pass) mayReplace(f frontend, lb hns.LoadBalancer) error {
	if p.record.owns(lb.ID) {
		return nil
	}
	if other, ok := p.unwanted(lb); ok {
		return fmt.Errorf("load balancer %s of another owner has this frontend and also %s", lb.ID, other)
	}
	p.log.Info("Replacing a load balancer of another owner", "frontend", f.String(), "id", lb.ID)
	return nil
}

// create creates a load balancer. If HNS already has a load balancer with this frontend,
// the method lists all load balancers and changes or replaces the existing load balancer.
func (p *pass) create(f frontend, w want, want hns.LoadBalancer) error {
	if p.record.planned[f] == nil {
		p.plan(f, w)
		p.logJournalError(p.record.journal.Sync())
	}
	p.record.planned[f].requested = true
	answer, err := p.hns.CreateLoadBalancer(want)
	if errors.Is(err, hns.ErrExists) {
		p.record.planned[f].requested = false // the existing load balancer is not the result of this request
		if !p.listed {
			if err := p.relist(); err != nil {
				return err
			}
			return p.balance(f, w, want)
		}
	}
	if err != nil {
		p.wrong = true
		return fmt.Errorf("create load balancer: %w", err)
	}
	p.log.V(3).Info("Created load balancer", "service", w.service, "frontend", f.String(), "id", answer.ID, "endpoints", len(want.Endpoints))
	p.record.add(answer.ID, made{Frontend: f, Service: w.service, Asked: digestOf(want), Answered: digestOf(answer)})
	answer.Endpoints = want.Endpoints
	p.holdings.addBalancer(answer)
	return nil
}

// deleteBalancer deletes a load balancer. If it does not exist, there is no error.
func (p *pass) deleteBalancer(id string) error {
	err := p.hns.DeleteLoadBalancer(id)
	if err != nil && !isFatal(err) && !errors.Is(err, hns.ErrNotFound) {
		// Retry: Windows Server 2019 may return an error although it deletes the load balancer.
		err = p.hns.DeleteLoadBalancer(id)
	}
	if err != nil && !errors.Is(err, hns.ErrNotFound) {
		p.wrong = true
		return fmt.Errorf("delete load balancer %s: %w", id, err)
	}
	p.log.V(3).Info("Deleted load balancer", "id", id)
	p.holdings.removeBalancer(id)
	p.record.setDeleted(id, true)
	return nil
}
