// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// plan has the addresses and sockets that a service needs according to its view.
type plan struct {
	// addresses has those addresses of the service that must be local.
	addresses []netip.Addr
	// sockets has the sockets to listen on, in the order of the frontends of the view.
	sockets []listenSpec
	// refused has the socket addresses that need no listener, because all clients are
	// refused.
	refused map[socketAddr]struct{}
	ports   map[portKey]planned
	// dependsOnNode reports whether the plan changes if the addresses of the node change.
	dependsOnNode bool
	// unsupported describes the frontends that sockets cannot handle. They do not make Sync
	// fail, because a retry would not help.
	unsupported error
}

type listenSpec struct {
	socketAddr
	rules *rules
}

type planned struct {
	*port
	allEndpoints []netip.AddrPort
	pools        []*pool
	// affinity is how long a client keeps its endpoint, or 0 without affinity.
	affinity time.Duration
}

// planFor returns the plan for view on a node with these addresses. The plan may share
// ports and pools with s, but planFor does not modify s. The plan for a nil view is
// empty.
func (s *service) planFor(view *api.ServiceEndpoints, node []netip.Addr) *plan {
	p := &plan{refused: map[socketAddr]struct{}{}, ports: map[portKey]planned{}}
	if view == nil {
		return p
	}
	var errs []error
	for f := range nodeview.Frontends(view) {
		if err := unsupported(&f); err != nil {
			errs = append(errs, err)
			continue
		}
		r := p.rules(s, view, &f, node)
		addrs := []netip.Addr{f.Addr}
		switch {
		case f.Kind == nodeview.NodePort:
			p.dependsOnNode = true
			addrs = ofFamily(node, f.Family)
		case !slices.Contains(p.addresses, f.Addr):
			p.addresses = append(p.addresses, f.Addr)
		}
		p.dependsOnNode = p.dependsOnNode || f.Sources.Restricted
		for _, a := range addrs {
			at := socketAddr{f.Protocol, netip.AddrPortFrom(a, uint16(f.Port))}
			if r.refused() {
				p.refused[at] = struct{}{} // the host refuses clients where nothing listens
			} else {
				p.sockets = append(p.sockets, listenSpec{at, r})
			}
		}
	}
	p.unsupported = errors.Join(errs...)
	return p
}

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

// rules returns the rules of a frontend. Frontends of the same port share pools of
// endpoints.
func (p *plan) rules(s *service, view *api.ServiceEndpoints, f *nodeview.Frontend, node []netip.Addr) *rules {
	key := portKey{f.Protocol, f.ServicePort.Port}
	of, ok := p.ports[key]
	if !ok {
		of.port = s.ports[key]
		if of.port == nil || of.port.name != portName(s.key, f.ServicePort) {
			of.port = newPort(s, f.ServicePort)
		}
		of.allEndpoints = servingOf(view, f.ServicePort)
	}
	routeOf := func(t nodeview.Traffic) route {
		pool := of.port.pool(t.Endpoints, of.pools)
		if !slices.Contains(of.pools, pool) {
			of.pools = append(of.pools, pool)
		}
		return route{t.Verdict, pool}
	}
	r := &rules{port: of.port, elsewhere: routeOf(f.Elsewhere), node: routeOf(f.Node), affinity: f.Affinity}
	if f.Sources.Restricted {
		r.admission = admission{restricted: true, prefixes: f.Sources.Prefixes(node)}
	}
	of.affinity = max(of.affinity, f.Affinity)
	p.ports[key] = of
	return r
}

func ofFamily(addrs []netip.Addr, family api.Family) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return api.FamilyOf(a) != family })
}
