// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/nodeview"
)

// rules says how to treat the clients of a frontend. It is never modified.
type rules struct {
	port            *port
	elsewhere, node route
	// admission says which clients are admitted.
	admission admission
	// affinity is how long a client keeps its endpoint, or 0 without affinity.
	affinity time.Duration
}

// route says whether connections are forwarded, and to which endpoints.
type route struct {
	verdict nodeview.Verdict
	pool    *pool
}

// refused reports whether all connections are rejected, so that no listener is needed.
func (r *rules) refused() bool {
	return r.elsewhere.verdict == nodeview.Reject && r.node.verdict == nodeview.Reject
}

// routeOf returns the route for client. The verdict for a client that is not admitted is
// Drop.
func (r *rules) routeOf(client netip.Addr, startsHere func(netip.Addr) bool) route {
	client = client.WithZone("") // prefixes never contain addresses with a zone
	if !r.admission.admits(client) {
		return route{verdict: nodeview.Drop}
	}
	// Most frontends treat all clients alike. Then there is no need to call startsHere.
	if r.elsewhere == r.node || !startsHere(client) {
		return r.elsewhere
	}
	return r.node
}

// endpoint returns an endpoint for client. It ignores endpoints for which unfit returns
// true. If it ignores all endpoints, the second result is false.
func (r *rules) endpoint(rt route, client netip.Addr, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	if r.affinity == 0 {
		return rt.pool.pick(unfit)
	}
	return r.port.affinity.pickEndpoint(client, r.affinity, rt.pool, unfit, now)
}

// admission says which source addresses are admitted. The zero value admits all.
type admission struct {
	// If restricted is true, only source addresses in prefixes are admitted.
	restricted bool
	prefixes   []netip.Prefix
}

func (a *admission) admits(client netip.Addr) bool {
	return !a.restricted || slices.ContainsFunc(a.prefixes, func(p netip.Prefix) bool { return p.Contains(client) })
}

// screen describes which packets a socket accepts. The kernel drops other packets without
// an answer. The zero value accepts all packets.
type screen struct {
	// If dropAll is true, the socket accepts no packets.
	dropAll bool
	// If hereOnly is true, only packets from the loopback interface and pods are accepted.
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
