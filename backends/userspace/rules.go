// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/nodeview"
)

// rules says how to treat the clients of a frontend. It is never modified. Frontends with
// equal rules share one value, so a change of endpoints, which changes only pools, does
// not touch the listeners.
type rules struct {
	port            *port
	elsewhere, node route
	// admission says which clients are admitted, or is nil if all are.
	admission *admission
	// affinity is how long a client keeps its endpoint, or 0 without affinity.
	affinity time.Duration
}

// route says whether connections are forwarded, and to which endpoints.
type route struct {
	verdict nodeview.Verdict
	pool    *pool // nil unless connections are forwarded
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
	return r.port.affinity.pickEndpoint(portClient{r.port, client}, r.affinity, rt.pool, unfit, now)
}

// screen describes which packets a socket accepts. The kernel drops other packets without
// an answer. The zero value accepts all packets.
type screen struct {
	// If dropAll is true, the socket accepts no packets.
	dropAll bool
	// If hereOnly is true, only packets from the loopback interface and pods are accepted.
	hereOnly bool
	// If admission is not nil, only packets of clients that it admits are accepted.
	admission *admission
}

func (r *rules) screen() screen {
	dropElsewhere, dropNode := r.elsewhere.verdict == nodeview.Drop, r.node.verdict == nodeview.Drop
	if dropElsewhere && dropNode || r.admission != nil && len(r.admission.prefixes) == 0 {
		return screen{dropAll: true}
	}
	return screen{hereOnly: dropElsewhere && !dropNode, admission: r.admission}
}
