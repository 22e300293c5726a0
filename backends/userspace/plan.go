// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/nodeview"
)

// plan has the addresses and sockets that a service needs according to its view.
type plan struct {
	// addresses has those addresses of the service that must be local, each once.
	addresses []netip.Addr
	// The map "at" has the sockets at each of these addresses.
	at map[netip.Addr][]listenSpec
	// sockets has the sockets to listen on, in the order of the frontends of the view.
	sockets []listenSpec
	// refused has the socket addresses that need no listener, because all clients are
	// refused.
	refused map[socketAddr]struct{}
	ports   map[portKey]planned
	// rules, pools and admissions have the values that frontends share.
	rules      map[rules]*rules
	pools      map[nodeview.ListID]plannedPool
	admissions admissions
	// affinity is how long a client keeps its endpoint, or 0 without affinity.
	affinity time.Duration
	// resets reports whether connections to lost endpoints are reset.
	resets bool
	// dependsOnNode reports whether the plan changes if the addresses of the node change.
	dependsOnNode bool
	// unsupported describes the frontends that sockets cannot handle. They do not make Sync
	// fail, because a retry would not help.
	unsupported errorList
}

type listenSpec struct {
	socketAddr
	rules *rules
}

type planned struct {
	*port
	existing existing
}

type plannedPool struct {
	*pool
	next content
}

// planFor returns the plan for view on a node with these addresses. The plan may share
// ports, rules and pools with s, but planFor does not modify s. The plan for a nil view is
// empty. If the plan would have more than Options.MaxListeners listeners, the error says
// so.
func (s *service) planFor(view *api.View, node []netip.Addr) (*plan, error) {
	p := &plan{
		at: map[netip.Addr][]listenSpec{}, refused: map[socketAddr]struct{}{}, ports: map[portKey]planned{},
		rules: map[rules]*rules{}, pools: map[nodeview.ListID]plannedPool{}, admissions: admissions{},
	}
	if view == nil {
		return p, nil
	}
	p.resets = view.Service.ResetConnections
	byID := map[frontends.SourcesID]*admission{}
	count := 0
	for f := range nodeview.Frontends(view) {
		if s.opts.OnlyNodePorts && f.Kind != nodeview.NodePort {
			continue
		}
		// Frontends without a listener count, too. So this loop always ends soon.
		if count++; max(count, p.size()) > s.opts.MaxListeners {
			return nil, s.tooMany()
		}
		if err := unsupported(&f); err != nil {
			p.unsupported.add(err)
			continue
		}
		id := frontends.SourcesOf(&f)
		admission, known := byID[id]
		if !known {
			admission = p.admissions.of(&f.Sources, node, s.admissions)
			byID[id] = admission
		}
		r := p.rulesOf(s, &f, admission)
		if f.Kind == nodeview.NodePort {
			p.dependsOnNode = true
		} else if _, known := p.at[f.Addr]; !known {
			p.addresses = append(p.addresses, f.Addr)
			p.at[f.Addr] = nil
		}
		p.dependsOnNode = p.dependsOnNode || f.Sources.Restricted
		for addr := range f.At(node) {
			at := socketAddr{f.Protocol, addr}
			if r.refused() {
				p.refused[at] = struct{}{} // the host refuses clients where nothing listens
				continue
			}
			want := listenSpec{at, r}
			p.sockets = append(p.sockets, want)
			if f.Kind != nodeview.NodePort {
				p.at[f.Addr] = append(p.at[f.Addr], want)
			}
		}
	}
	if p.size() > s.opts.MaxListeners { // the last frontend was a node port at many addresses
		return nil, s.tooMany()
	}
	return p, nil
}

func (s *service) tooMany() error {
	return fmt.Errorf("open more than %d listeners (addresses × ports) for one service: raise Options.MaxListeners", s.opts.MaxListeners)
}

// size returns the number of listeners that the service needs if it has endpoints.
func (p *plan) size() int { return len(p.sockets) + len(p.refused) }

// unsupported returns why sockets cannot handle a frontend, or nil if they can.
func unsupported(f *nodeview.Frontend) error {
	switch {
	case f.ServicePort == nil:
		return fmt.Errorf("%s: a userspace proxy cannot serve all ports of an address", f.FrontendKey)
	case f.Protocol != api.TCP && f.Protocol != api.UDP:
		return fmt.Errorf("%s: a userspace proxy serves TCP and UDP only", f.FrontendKey)
	default:
		return nil
	}
}

// rulesOf returns the rules of a frontend.
func (p *plan) rulesOf(s *service, f *nodeview.Frontend, admission *admission) *rules {
	p.affinity = max(p.affinity, f.Affinity)
	r := rules{
		port: p.portOf(s, f), elsewhere: p.routeOf(s, &f.Elsewhere, f.Algorithm), node: p.routeOf(s, &f.Node, f.Algorithm),
		admission: admission, affinity: f.Affinity,
	}
	shared := p.rules[r]
	if shared == nil {
		if shared = s.rules[r]; shared == nil {
			shared = &r
		}
		p.rules[r] = shared
	}
	return shared
}

func (p *plan) portOf(s *service, f *nodeview.Frontend) *port {
	mapping := f.ServicePort
	key := portKey{mapping.Protocol, mapping.Port}
	of, ok := p.ports[key]
	if !ok {
		of = planned{s.ports[key], existing{}}
		if of.port == nil || of.port.name != portName(s.service, mapping) {
			of.port = newPort(s.common, mapping)
		}
		p.ports[key] = of
	}
	of.existing[f.Family] = f.Existing
	return of.port
}

// routeOf returns the route of a frontend. A list keeps its pool when its endpoints
// change. The pool of a new list immediately has the endpoints of the list.
func (p *plan) routeOf(s *service, t *nodeview.Traffic, algorithm api.Algorithm) route {
	if t.Verdict != nodeview.Forward {
		return route{verdict: t.Verdict}
	}
	of, ok := p.pools[t.List]
	if !ok {
		of = plannedPool{s.pools[t.List].pool, contentOf(t.Endpoints, algorithm)}
		if of.pool == nil {
			of.pool = newPool(of.next)
		}
		p.pools[t.List] = of
	}
	return route{t.Verdict, of.pool}
}
