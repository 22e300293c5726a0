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

// destination is the address, port and protocol (UDP or TCP) to which clients of a
// service send packets. For a node port, addr is the zero Addr. For an all-ports service,
// the port is 0.
type destination struct {
	family   api.Family
	addr     netip.Addr
	port     uint16
	protocol uint8
}

// flow is a connection-tracking entry that may be stale. It is an entry of a UDP flow, or
// of a TCP connection that is not translated and has no reply yet.
type flow struct {
	protocol uint8
	to       netip.AddrPort // the destination of the client's packets
	endpoint netip.AddrPort // the source of the replies; equals the destination if the flow is not translated
}

// verdict decides which flows to a destination are stale. A destination without a service
// has the zero verdict.
type verdict struct {
	view     *api.ServiceEndpoints // nil if the destination has no service any more
	port     *api.PortMapping      // nil for an all-ports service
	forwards bool                  // at least some clients get an endpoint for new flows
}

// isStale reports whether a flow to the destination has to be deleted. This is true if
// the flow's endpoint was removed, or if the flow has no endpoint although new flows get
// an endpoint.
func (v verdict) isStale(f flow) bool {
	switch {
	case v.allows(f.endpoint):
		return false
	case f.endpoint != f.to:
		return true
	default:
		return v.forwards
	}
}

// The method allows reports whether flows to endpoint may continue. They may continue if
// endpoint belongs to the destination, even while the endpoint drains.
func (v verdict) allows(endpoint netip.AddrPort) bool {
	return v.view != nil && (v.contains(v.view.Endpoints, endpoint) || v.contains(v.view.Draining, endpoint))
}

func (v verdict) contains(list []api.Endpoint, endpoint netip.AddrPort) bool {
	i := sort.Search(len(list), func(i int) bool { return list[i].Addr.Compare(endpoint.Addr()) >= 0 })
	for ; i < len(list) && list[i].Addr == endpoint.Addr(); i++ {
		if v.port == nil || list[i].TargetPort(v.port) == int32(endpoint.Port()) {
			return true
		}
	}
	return false
}

// allowedEndpoints yields the endpoints to which flows of one family may continue. For an
// all-ports service, the port of these endpoints is 0.
func (v verdict) allowedEndpoints(family api.Family) iter.Seq[netip.AddrPort] {
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

// comparison compares the verdicts of two views of a service. Many destinations of a
// service have the same port and family. comparison looks at their endpoints only once.
type comparison struct {
	lost map[portPair]bool
	// checks counts the comparisons of endpoints.
	checks int
}

// portPair is a port in both views, and a family.
type portPair struct {
	before, now *api.PortMapping
	family      api.Family
}

// makesStale reports whether a flow to d may be stale according to the verdict now
// although it was not stale according to the earlier verdict.
func (c *comparison) makesStale(before, now verdict, d destination) bool {
	if now.forwards && !before.forwards {
		return true
	}
	if before.view == nil || d.protocol == unix.IPPROTO_TCP {
		return false
	}
	pair := portPair{before.port, now.port, d.family}
	lost, known := c.lost[pair]
	if !known {
		for e := range before.allowedEndpoints(d.family) {
			c.checks++
			if lost = !now.allows(e); lost {
				break
			}
		}
		if c.lost == nil {
			c.lost = map[portPair]bool{}
		}
		c.lost[pair] = lost
	}
	return lost
}

// maxDestinations limits the destinations of a service. Flows to further destinations are
// kept until they expire. So a service with many ports and external IPs cannot use all
// memory.
const maxDestinations = 1 << 17

// verdictsOf returns the verdict for each destination of a service. If view is nil, it
// returns no verdicts.
func verdictsOf(view *api.ServiceEndpoints) map[destination]verdict {
	verdicts := map[destination]verdict{}
	for f := range nodeview.Frontends(view) {
		if len(verdicts) >= maxDestinations {
			break
		}
		d := destination{family: f.Family, addr: f.Addr, port: uint16(f.Port)}
		v := verdict{
			view: view, port: f.ServicePort,
			forwards: f.Elsewhere.Verdict == nodeview.Forward || f.Node.Verdict == nodeview.Forward,
		}
		if f.ServicePort == nil || f.Protocol == api.UDP {
			d.protocol = unix.IPPROTO_UDP
			verdicts[d] = v
		}
		if f.ServicePort == nil || f.Protocol == api.TCP {
			d.protocol = unix.IPPROTO_TCP
			verdicts[d] = v
		}
	}
	return verdicts
}
