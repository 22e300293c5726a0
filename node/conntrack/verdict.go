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
	view     *api.View        // nil if the destination has no service any more
	port     *api.PortMapping // nil for an all-ports service
	forwards bool             // at least some clients get an endpoint for new flows
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

// class identifies the frontends of a service that share their verdict: those of one
// kind, family and port. It is their key without the address.
type class = nodeview.FrontendKey

func classOf(f nodeview.FrontendKey) class {
	f.Addr = netip.Addr{}
	return f
}

// verdicts has the verdicts of the classes of a service, by protocol number.
type verdicts map[uint8]map[class]verdict

// verdictsOf returns the verdict of each class of a service. Its cost does not depend on
// the number of addresses. If view is nil, it returns no verdicts.
func verdictsOf(view *api.View) verdicts {
	all := verdicts{}
	for t := range nodeview.PortTraffics(view) {
		addrs := view.Service.FrontendIPs(t.Family) // of the kinds from ClusterIP on
		for kind := nodeview.ClusterIP; kind <= nodeview.NodePort; kind++ {
			c := class{Kind: kind, Family: t.Family}
			if t.ServicePort != nil {
				c.Protocol, c.Port = t.ServicePort.Protocol, t.ServicePort.Port
			}
			v := verdict{view: view, port: t.ServicePort}
			v.forwards = t.External.Verdict == nodeview.Forward || t.ShortCircuit.Verdict == nodeview.Forward
			switch {
			case kind == nodeview.NodePort:
				if t.ServicePort == nil || t.ServicePort.NodePort == 0 {
					continue
				}
				c.Port = t.ServicePort.NodePort
			case len(addrs[kind-nodeview.ClusterIP]) == 0:
				continue
			case kind == nodeview.ClusterIP:
				v.forwards = t.Internal.Verdict == nodeview.Forward
			}
			for _, number := range [...]uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
				if !tracks(number, c.Protocol) {
					continue
				}
				if all[number] == nil {
					all[number] = map[class]verdict{}
				}
				if _, taken := all[number][c]; !taken { // of two equal node ports, the first one counts
					all[number][c] = v
				}
			}
		}
	}
	return all
}

// tracks reports whether the frontends of a protocol have destinations of the protocol
// with that number. The frontends of an all-ports service have the protocol 0.
func tracks(number uint8, protocol api.Protocol) bool {
	switch protocol {
	case 0:
		return true
	case api.UDP:
		return number == unix.IPPROTO_UDP
	case api.TCP:
		return number == unix.IPPROTO_TCP
	default:
		return false
	}
}

// comparison compares the verdicts of two views of a service. The classes of one port and
// family have the same endpoints. comparison looks at these endpoints only once.
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

// stale returns the classes with flows that may be stale according to the verdicts now
// although they were not stale according to the earlier verdicts.
func (c *comparison) stale(before, now map[class]verdict, protocol uint8) map[class]bool {
	var all map[class]bool
	for k, v := range now {
		if c.makesStale(before[k], v, kind{k.Family, protocol}) {
			if all == nil {
				all = map[class]bool{}
			}
			all[k] = true
		}
	}
	return all
}

// makesStale reports whether a class of kind k has flows that may be stale according to
// the verdict now, although they were not stale according to the verdict before.
func (c *comparison) makesStale(before, now verdict, k kind) bool {
	switch {
	case now.forwards && !before.forwards:
		return true
	case k.protocol == unix.IPPROTO_TCP:
		return false
	case before.view == nil:
		return true
	}
	pair := portPair{before.port, now.port, k.family}
	lost, known := c.lost[pair]
	if !known {
		for e := range before.allowedEndpoints(k.family) {
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
