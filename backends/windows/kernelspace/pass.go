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
	// mac is this node's hardware address, once it is known.
	mac string
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
	p.record.dropUnrequested()
	p.note(p.record.journal.Write())
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
		case !wanted && !p.passing && !p.waits(p.holder(f)):
			remove = append(remove, f)
		}
	}
	// First away with what has to go: what comes may need its place.
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

// sortedKeys returns the keys of a map by the order of strings.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
