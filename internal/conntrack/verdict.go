// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"net/netip"

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

// flow is a connection-tracking entry that may be stale. The entry belongs to a UDP
// flow, to an untranslated TCP connection without a reply, or to a translated and
// established TCP connection.
type flow struct {
	protocol    uint8
	established bool
	client, to  netip.AddrPort // the source and the destination of the client's packets
	// The fields endpoint and back are the source and the destination of the replies. If
	// the flow is not translated, the fields endpoint and "to" are equal.
	endpoint, back netip.AddrPort
}

// verdict decides which flows to a destination are stale. A destination without a service
// has the zero verdict.
type verdict struct {
	existing nodeview.Existing // flows to these endpoints may continue
	forwards bool              // at least some clients get an endpoint for new flows
	resets   bool              // connections to lost endpoints are reset
}

// isStale reports whether a flow to the destination has to be deleted. An established
// connection has to be reset instead. isStale is true if the flow's endpoint was removed,
// or if the flow has no endpoint although new flows get one.
func (v verdict) isStale(f flow) bool {
	switch {
	case f.established:
		return v.existing.Resets(f.endpoint)
	case v.existing.Has(f.endpoint):
		return false
	case f.endpoint != f.to:
		return true
	default:
		return v.forwards
	}
}

// class identifies the frontends of a service that have one kind, family and port. These
// frontends share a verdict. The class is their key without the address.
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
	for f := range nodeview.Classes(view) {
		v := verdict{
			existing: f.Existing,
			forwards: f.Elsewhere.Verdict == nodeview.Forward || f.Node.Verdict == nodeview.Forward,
			resets:   view.Service.ResetConnections,
		}
		for _, number := range [...]uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			if !tracks(number, f.Protocol) {
				continue
			}
			if all[number] == nil {
				all[number] = map[class]verdict{}
			}
			all[number][f.FrontendKey] = v
		}
	}
	return all
}

// tracks reports whether the protocol of a frontend includes the protocol with this
// number. The frontends of an all-ports service have the protocol 0.
func tracks(number uint8, protocol api.Protocol) bool {
	return protocol == 0 || protocol.Number() == number
}

// comparison compares the verdicts of two views of a service. The classes of one port and
// family have the same endpoints. comparison looks at these endpoints only once.
type comparison struct {
	lost map[change]bool
	// checks counts the comparisons of endpoints.
	checks int
}

// change has the endpoints of two verdicts of a class, and whether connections to lost
// endpoints are reset.
type change struct {
	before, now nodeview.Existing
	resets      bool
}

// stale returns the classes with newly stale flows: flows that may be stale by the
// verdicts in the argument now, but were not stale by the verdicts in before.
func (c *comparison) stale(before, now map[class]verdict, protocol uint8) map[class]bool {
	var all map[class]bool
	for k, v := range now {
		if c.makesStale(before[k], v, protocol) {
			if all == nil {
				all = map[class]bool{}
			}
			all[k] = true
		}
	}
	return all
}

// makesStale reports whether a class has newly stale flows of a protocol, if its verdict
// changes from the argument before to the argument now.
func (c *comparison) makesStale(before, now verdict, protocol uint8) bool {
	resets := protocol == unix.IPPROTO_TCP
	switch {
	case now.forwards && !before.forwards:
		return true
	case resets && !now.resets:
		return false
	case before.existing == nodeview.Existing{} || resets && !before.resets:
		return true
	}
	between := change{before.existing, now.existing, resets}
	lost, known := c.lost[between]
	if !known {
		for e := range before.existing.All() {
			c.checks++
			at := e.AddrPort()
			if resets {
				lost = now.existing.Resets(at) && !before.existing.Resets(at)
			} else {
				lost = !now.existing.Has(at)
			}
			if lost {
				break
			}
		}
		if c.lost == nil {
			c.lost = map[change]bool{}
		}
		c.lost[between] = lost
	}
	return lost
}
