// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// A pass compares the plans with the state of HNS and makes the necessary changes.
type pass struct {
	*backend
	ctx context.Context
	log klog.Logger
	// delivered contains services that this pass retries even if they failed before.
	delivered map[types.NamespacedName]bool

	failed sink.Failed
	// listed is true if this pass has listed the objects of HNS. A pass lists them at most
	// once.
	listed bool
	// The field wrong is true if a call failed, so that holdings may differ from HNS.
	wrong bool
	// mac is this node's hardware address, and root the ID of its endpoint, if known.
	mac, root string
}

// errAbort marks errors that end the pass and request a new pass from the driver.
var errAbort = errors.New("start again")

// The method run processes all frontends in todo.
func (p *pass) run() error {
	if p.holdings == nil {
		if err := p.list(); err != nil {
			return err
		}
	}
	if !p.planned {
		p.replanAll(p.ctx)
	}
	err := p.steps()
	p.record.dropUnrequested()
	p.logJournalError(p.record.journal.Write())
	if p.holdings != nil {
		p.opts.Observer.Holds("endpoints", p.holdings.own)
		p.opts.Observer.Holds("load_balancers", p.record.len())
	}
	p.doubtful = p.doubtful || p.wrong
	if err != nil && p.ctx.Err() == nil {
		p.holdings = nil
	}
	if err != nil {
		return err
	}
	for key := range p.delivered {
		delete(p.failing, key)
	}
	for key := range p.failed {
		p.failing[key] = true
	}
	for key := range p.delivered {
		if err := p.refused[key]; err != nil {
			p.fail(key, err)
		}
	}
	err = p.failed.Err()
	if err == nil && !p.passing {
		p.opts.Observer.Drifted(false)
	}
	return err
}

// The method list reads the state of HNS.
func (p *pass) list() error {
	p.listed, p.root = true, ""
	return p.survey(p.ctx)
}

// relist reads the state of HNS again, unless this pass has already done so.
func (p *pass) relist() error {
	if p.listed {
		return nil
	}
	before := p.environment.network
	if err := p.list(); err != nil {
		return fmt.Errorf("%w: %w", err, errAbort)
	}
	if !reflect.DeepEqual(before, p.environment.network) {
		return fmt.Errorf("HNS network %q has changed: %w", p.opts.Network, errAbort)
	}
	return nil
}

// The method steps makes all changes in HNS. An error ends the pass.
func (p *pass) steps() error {
	if err := p.ensureSourceVIPs(); err != nil {
		return err
	}
	if p.listed {
		if err := p.dropEmpty(); err != nil {
			return err
		}
		if err := p.dropMoved(); err != nil {
			return err
		}
	}
	if !p.passing {
		maps.Copy(p.todo, p.afterPass)
		clear(p.afterPass)
	}
	var remove, keep []frontend
	for f := range p.todo {
		w, wanted := p.wanted[f]
		switch {
		case !wanted && p.passing: // so that the next batches do not look at it again
			delete(p.todo, f)
			p.afterPass[f] = true
		case wanted && !p.isWaiting(w.service):
			keep = append(keep, f)
		case !wanted && !p.keepsLast(p.holder(f)):
			remove = append(remove, f)
		}
	}
	// First remove load balancers, because new load balancers may need the same frontends.
	slices.SortFunc(remove, compareFrontends)
	for _, f := range remove {
		if err := p.do(f, p.holder(f), p.remove); err != nil {
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
	if p.wrong || p.doubtful || p.passing {
		return nil // delete no endpoints, because it is unknown which endpoints are idle
	}
	return p.dropIdle()
}

// isWaiting reports whether a service failed earlier and this pass must not retry it.
func (p *pass) isWaiting(service types.NamespacedName) bool {
	return p.failing[service] && !p.delivered[service]
}

// keepsLast reports whether the load balancers of a service must stay as they are.
func (p *pass) keepsLast(service types.NamespacedName) bool {
	return p.isWaiting(service) || p.refused[service] != nil
}

// The method do calls the function step for a frontend. If step fails, the method records
// the error, or returns the error if the pass must end.
func (p *pass) do(f frontend, service types.NamespacedName, step func(frontend) error) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if err := step(f); isFatal(err) {
		return fmt.Errorf("service %s: frontend %s: %w", service, f, err)
	} else if err != nil {
		p.fail(service, fmt.Errorf("frontend %s: %w", f, err))
	}
	// Delete f even if step failed: the driver then delivers the service again, which adds f
	// to todo again.
	delete(p.todo, f)
	return nil
}

// isFatal reports whether err ends the pass.
func isFatal(err error) bool { return errors.Is(err, hns.ErrNotRunning) || errors.Is(err, errAbort) }

func (p *pass) fail(service types.NamespacedName, err error) {
	if before := p.failed[service]; before != nil {
		err = fmt.Errorf("%w; %w", before, err)
	}
	p.failed.Add(service, err)
}

// sortedKeys returns the sorted keys of a map.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
