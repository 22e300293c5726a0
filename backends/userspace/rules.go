// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/nodeview"
)

// rules say how to treat the clients of a frontend. They are immutable.
type rules struct {
	port            *port
	elsewhere, node route
	// admission selects the admitted clients.
	admission admission
	// affinity is how long a client keeps its endpoint; 0 means no affinity.
	affinity time.Duration
}

// route says whether to forward the connections of a group of clients, and to which
// endpoints.
type route struct {
	verdict nodeview.Verdict
	pool    *pool
}

// refused reports whether the rules refuse all clients, so that no listener is needed.
func (r *rules) refused() bool {
	return r.elsewhere.verdict == nodeview.Reject && r.node.verdict == nodeview.Reject
}

// routeOf returns the route of client. Its verdict is Drop if the client is not admitted.
func (r *rules) routeOf(client netip.Addr, startsHere func(netip.Addr) bool) route {
	client = client.WithZone("") // a prefix never contains an address with a zone
	if !r.admission.admits(client) {
		return route{verdict: nodeview.Drop}
	}
	// Most frontends treat all clients alike, so that the location of the client does not
	// matter.
	if r.elsewhere == r.node || !startsHere(client) {
		return r.elsewhere
	}
	return r.node
}

// endpoint returns an endpoint for client. It returns false if unfit returns true for all
// endpoints.
func (r *rules) endpoint(rt route, client netip.Addr, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	if r.affinity == 0 {
		return rt.pool.pick(unfit)
	}
	return r.port.affinity.endpoint(client, r.affinity, rt.pool, unfit, now)
}

// admission selects clients by source address. The zero value admits all.
type admission struct {
	// restricted limits the clients to those in prefixes.
	restricted bool
	prefixes   []netip.Prefix
}

func (a *admission) admits(client netip.Addr) bool {
	return !a.restricted || slices.ContainsFunc(a.prefixes, func(p netip.Prefix) bool { return p.Contains(client) })
}

// screen describes the packets that a socket accepts. Other packets are dropped as if
// they were lost. The zero value accepts all packets.
type screen struct {
	// dropAll drops all packets.
	dropAll bool
	// hereOnly drops packets from other nodes. It accepts packets from the loopback
	// interface and from pods.
	hereOnly bool
	pods     []netip.Prefix
	admission
}

func (s *screen) equal(o *screen) bool {
	return s.dropAll == o.dropAll && s.hereOnly == o.hereOnly && slices.Equal(s.pods, o.pods) &&
		s.restricted == o.restricted && slices.Equal(s.prefixes, o.prefixes)
}

func (r *rules) screen(pods []netip.Prefix) screen {
	dropElsewhere, dropNode := r.elsewhere.verdict == nodeview.Drop, r.node.verdict == nodeview.Drop
	return screen{
		dropAll:   dropElsewhere && dropNode || r.admission.restricted && len(r.admission.prefixes) == 0,
		hereOnly:  dropElsewhere && !dropNode,
		pods:      pods,
		admission: r.admission,
	}
}
