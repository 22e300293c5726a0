// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// pass is one time of making HNS what it has to be.
type pass struct {
	*Backend
	ctx context.Context
	log klog.Logger
	// told are the services that may be tried although they failed before.
	told map[types.NamespacedName]bool

	failed sink.Failed
	// listed says that HNS was listed in this pass, which happens once.
	listed bool
	// wrong says that a call failed, so that what HNS has is not known.
	wrong bool
}

// errAbort is wrapped by an error after which a pass cannot go on.
var errAbort = errors.New("start again")

// run looks at all frontends that are to do.
func (p *pass) run() error {
	if p.have == nil {
		if err := p.list(); err != nil {
			return err
		}
	}
	if !p.planned {
		p.replanAll(p.ctx)
	}
	err := p.steps()
	p.saveRecord()
	if p.have != nil && p.opts.Observer.Holds != nil {
		p.opts.Observer.Holds(p.have.own, p.record.len())
	}
	if p.wrong || err != nil && p.ctx.Err() == nil {
		p.have = nil
	}
	if err != nil {
		return err
	}
	for key := range p.told {
		delete(p.failing, key)
	}
	for key := range p.failed {
		p.failing[key] = true
	}
	return p.failed.Err()
}

// list asks HNS what there is.
func (p *pass) list() error {
	p.listed = true
	return p.survey(p.ctx)
}

// relist asks HNS what there is if that is to be known better.
func (p *pass) relist() error {
	if p.listed {
		return nil
	}
	before := p.terrain.network
	if err := p.list(); err != nil {
		return fmt.Errorf("%w: %w", err, errAbort)
	}
	if !reflect.DeepEqual(before, p.terrain.network) {
		return fmt.Errorf("HNS network %q has changed: %w", p.opts.Network, errAbort)
	}
	return nil
}

// steps brings about what there is to do. An error ends the pass.
func (p *pass) steps() error {
	if err := p.ensureSourceVIPs(); err != nil {
		return err
	}
	if p.listed {
		if err := p.dropMoved(); err != nil {
			return err
		}
	}
	var remove, keep []Frontend
	for f := range p.todo {
		w, wanted := p.wanted[f]
		switch {
		case wanted && !p.waits(w.service):
			keep = append(keep, f)
		case !wanted && !p.passing && !p.waits(p.record.entries[f].Service):
			remove = append(remove, f)
		}
	}
	// First away with what has to go: what comes may need its place.
	slices.SortFunc(remove, compareFrontends)
	for _, f := range remove {
		if err := p.do(f, p.record.entries[f].Service, p.remove); err != nil {
			return err
		}
	}
	slices.SortFunc(keep, compareFrontends)
	p.announce(keep)
	for _, f := range keep {
		if err := p.do(f, p.wanted[f].service, p.ensure); err != nil {
			return err
		}
	}
	if p.wrong || p.passing {
		return nil // an endpoint that seems idle may not be, or soon will not
	}
	return p.dropIdle()
}

// waits reports whether a service has failed and is not to be tried now.
func (p *pass) waits(service types.NamespacedName) bool {
	return p.failing[service] && !p.told[service]
}

// do does a step for a frontend, and notes if it fails. An error that it returns
// ends the pass.
func (p *pass) do(f Frontend, service types.NamespacedName, step func(Frontend) error) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if err := step(f); ends(err) {
		return fmt.Errorf("service %s: frontend %s: %w", service, f, err)
	} else if err != nil {
		p.fail(service, fmt.Errorf("frontend %s: %w", f, err))
	}
	// One that failed comes again with its service.
	delete(p.todo, f)
	return nil
}

// ends reports whether a pass cannot go on after err.
func ends(err error) bool { return errors.Is(err, ErrNotRunning) || errors.Is(err, errAbort) }

func (p *pass) fail(service types.NamespacedName, err error) {
	if before := p.failed[service]; before != nil {
		err = fmt.Errorf("%w; %w", before, err)
	}
	p.failed.Add(service, err)
}

// remove deletes the own load balancer at a frontend, if there is one.
func (p *pass) remove(f Frontend) error {
	if id, ok := p.have.byFrontend[f]; ok && p.record.owns(f, id) {
		if err := p.deleteBalancer(id); err != nil {
			return err
		}
		p.record.delete(f)
	} else if !p.record.entries[f].deleted {
		p.record.forget(f)
	}
	return nil
}

// announce notes which load balancers are about to be made, so that they are
// known as own ones even if nothing can be noted after. It is one write for all.
func (p *pass) announce(frontends []Frontend) {
	for _, f := range frontends {
		w := p.wanted[f]
		id, found := p.have.byFrontend[f]
		if found && !p.record.owns(f, id) {
			continue // somebody else's, so far
		}
		p.record.set(f, entry{ID: id, Pending: !found || !p.mayStay(p.have.balancers[id], w.policy), Service: w.service})
	}
	p.saveRecord()
}

// mayStay reports whether a load balancer is or can be made what a policy asks
// for without being replaced.
func (p *pass) mayStay(lb LoadBalancer, policy *policy) bool {
	var ids []string
	for _, d := range policy.endpoints {
		id, ok := p.have.endpointAt(d.addr)
		if !ok && !p.terrain.features.ModifyLoadBalancer {
			return false
		}
		ids = append(ids, id)
	}
	want := policy.with(ids)
	return sameButEndpoints(lb, want) && (p.terrain.features.ModifyLoadBalancer || sameEndpoints(lb, want))
}

// ensure makes HNS have the load balancer that is wanted at a frontend, with as
// many of its endpoints as there are.
func (p *pass) ensure(f Frontend) error {
	w := p.wanted[f]
	ids, lacking := p.endpoints(w.policy)
	if ends(lacking) {
		return lacking
	}
	if len(ids) == 0 {
		if err := p.remove(f); err != nil {
			return err
		}
		return lacking
	}
	if err := p.balance(f, w, w.policy.with(ids)); err != nil {
		return err
	}
	return lacking
}

// balance makes HNS have the load balancer want at a frontend.
func (p *pass) balance(f Frontend, w want, want LoadBalancer) error {
	id, found := p.have.byFrontend[f]
	if !found {
		return p.create(f, w, want)
	}
	have := p.have.balancers[id]
	same := sameButEndpoints(have, want)
	if same && sameEndpoints(have, want) {
		p.record.set(f, entry{ID: id, Service: w.service})
		return nil
	}
	if err := p.mayReplace(f, have); err != nil {
		return err
	}
	if same && p.terrain.features.ModifyLoadBalancer {
		want.ID = id
		err := p.hns.UpdateLoadBalancer(want)
		if err == nil {
			p.log.V(3).Info("Updated load balancer", "service", w.service, "frontend", f.String(), "id", id, "endpoints", len(want.Endpoints))
			p.have.removeBalancer(id)
			p.have.addBalancer(want)
			p.record.set(f, entry{ID: id, Service: w.service})
			return nil
		}
		if !errors.Is(err, ErrNotSupported) {
			p.wrong = true
			return fmt.Errorf("update load balancer %s: %w", id, err)
		}
		p.terrain.features.ModifyLoadBalancer = false
		want.ID = ""
	}
	p.expect(f, w)
	if err := p.deleteBalancer(id); err != nil {
		return err
	}
	return p.create(f, w, want)
}

// mayReplace returns an error if a load balancer that is somebody else's has
// frontends besides those of services that are served here. Otherwise it is the
// leftover of another proxy: the frontend is the service's.
func (p *pass) mayReplace(f Frontend, lb LoadBalancer) error {
	if p.record.owns(f, lb.ID) {
		return nil
	}
	for _, other := range frontendsOf(lb) {
		if _, wanted := p.wanted[other]; !wanted {
			return fmt.Errorf("load balancer %s, which was made by somebody else, has this frontend, and %s besides", lb.ID, other)
		}
	}
	p.log.Info("Replacing a load balancer that somebody else made", "frontend", f.String(), "id", lb.ID)
	return nil
}

// expect notes that a load balancer is about to be made, unless that is noted.
func (p *pass) expect(f Frontend, w want) {
	if e := p.record.entries[f]; !e.Pending {
		p.record.set(f, entry{ID: e.ID, Pending: true, Service: w.service})
		p.saveRecord()
	}
}

// create creates a load balancer. If HNS knows one with this frontend after
// all, that one is looked up and replaced.
func (p *pass) create(f Frontend, w want, want LoadBalancer) error {
	p.expect(f, w)
	id, err := p.hns.CreateLoadBalancer(want)
	if errors.Is(err, ErrExists) && !p.listed {
		if err := p.relist(); err != nil {
			return err
		}
		if holder, ok := p.have.byFrontend[f]; ok {
			if err := p.mayReplace(f, p.have.balancers[holder]); err != nil {
				return err
			}
			if err := p.deleteBalancer(holder); err != nil {
				return err
			}
		}
		id, err = p.hns.CreateLoadBalancer(want)
	}
	if err != nil {
		p.wrong = true
		return fmt.Errorf("create load balancer: %w", err)
	}
	p.log.V(3).Info("Created load balancer", "service", w.service, "frontend", f.String(), "id", id, "endpoints", len(want.Endpoints))
	want.ID = id
	p.have.addBalancer(want)
	p.record.set(f, entry{ID: id, Service: w.service})
	return nil
}

// deleteBalancer deletes a load balancer. That it is gone already is no error.
func (p *pass) deleteBalancer(id string) error {
	if err := p.hns.DeleteLoadBalancer(id); err != nil && !errors.Is(err, ErrNotFound) {
		p.wrong = true
		return fmt.Errorf("delete load balancer %s: %w", id, err)
	}
	p.log.V(3).Info("Deleted load balancer", "id", id)
	p.have.removeBalancer(id)
	return nil
}

func (p *pass) saveRecord() {
	if err := p.record.save(); err != nil {
		p.log.Error(err, "If this process is killed now, load balancers may be left behind")
	}
}

// sortedKeys returns the keys of a map by the order of strings.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
