// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"iter"
	"net/netip"
	"sort"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// place is where clients of UDP or TCP find a service: an address and port. The address
// is the unspecified one of its family for a node port, and the port is 0 where the
// service has all.
type place struct {
	netip.AddrPort
	protocol uint8
}

// flow is a connection as connection tracking knows it: one of UDP, or one of TCP that
// is not translated and has no answer yet.
type flow struct {
	protocol uint8
	to       netip.AddrPort // where the client sends to
	endpoint netip.AddrPort // who answers; the same as to if nobody translates it
}

// verdict says which flows to a place are right.
type verdict struct {
	view     *api.ServiceEndpoints // nil if no service is there any more
	port     *api.PortMapping      // nil for all ports
	forwards bool                  // new flows of some clients get an endpoint
}

// stale reports whether a flow to the place has to end: as its endpoint has gone,
// or as it has none although the service has.
func (v verdict) stale(f flow) bool {
	switch {
	case v.serves(f.endpoint):
		return false
	case f.endpoint != f.to:
		return true
	default:
		return v.forwards
	}
}

// serves reports whether an endpoint serves the place or did so and is still
// there: draining ones have not gone.
func (v verdict) serves(endpoint netip.AddrPort) bool {
	return v.view != nil && (v.among(v.view.Endpoints, endpoint) || v.among(v.view.Draining, endpoint))
}

func (v verdict) among(list []api.Endpoint, endpoint netip.AddrPort) bool {
	i := sort.Search(len(list), func(i int) bool { return list[i].Addr.Compare(endpoint.Addr()) >= 0 })
	for ; i < len(list) && list[i].Addr == endpoint.Addr(); i++ {
		if v.port == nil || list[i].TargetPort(v.port) == int32(endpoint.Port()) {
			return true
		}
	}
	return false
}

// endpoints yields all that serves is true of.
func (v verdict) endpoints(family api.Family) iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		if v.view == nil {
			return
		}
		for _, list := range [...][]api.Endpoint{v.view.Endpoints, v.view.Draining} {
			for i := range list {
				e := &list[i]
				var port int32
				if v.port != nil {
					port = e.TargetPort(v.port)
				}
				if api.FamilyOf(e.Addr) == family && (port != 0 || v.port == nil) && !yield(netip.AddrPortFrom(e.Addr, uint16(port))) {
					return
				}
			}
		}
	}
}

// outdates reports whether flows to p that were right by the verdict before may be
// stale by v. The zero verdict is that of a place without a service.
func (v verdict) outdates(before verdict, p place) bool {
	if v.forwards && !before.forwards {
		return true
	}
	if p.protocol == unix.IPPROTO_TCP {
		return false
	}
	for e := range before.endpoints(api.FamilyOf(p.Addr())) {
		if !v.serves(e) {
			return true
		}
	}
	return false
}

// verdictsOf returns the verdict on every place of a service. A nil view has none.
func verdictsOf(view *api.ServiceEndpoints) map[place]verdict {
	verdicts := map[place]verdict{}
	for f := range nodeview.Frontends(view) {
		c := f.Claim()
		at := netip.AddrPortFrom(c.IP, uint16(c.Port))
		v := verdict{
			view: view, port: f.ServicePort,
			forwards: f.Elsewhere.Verdict == nodeview.Forward || f.Node.Verdict == nodeview.Forward,
		}
		if f.ServicePort == nil || f.Protocol == api.UDP {
			verdicts[place{at, unix.IPPROTO_UDP}] = v
		}
		if f.ServicePort == nil || f.Protocol == api.TCP {
			verdicts[place{at, unix.IPPROTO_TCP}] = v
		}
	}
	return verdicts
}
