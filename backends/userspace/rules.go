// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/nodeview"
)

// rules say what becomes of the clients of a frontend. They are immutable.
type rules struct {
	port            *port
	elsewhere, node route
	// admission are the clients that get in.
	admission admission
	// affinity is how long a client keeps its endpoint; 0 means it does not.
	affinity time.Duration
}

// route is what becomes of some of a frontend's clients.
type route struct {
	verdict nodeview.Verdict
	pool    *pool
}

// refused reports whether all clients are refused, so that nobody has to listen.
func (r *rules) refused() bool {
	return r.elsewhere.verdict == nodeview.Reject && r.node.verdict == nodeview.Reject
}

// routeOf returns the route of client. Its verdict is Drop for one that does not
// get in.
func (r *rules) routeOf(client netip.Addr, startsHere func(netip.Addr) bool) route {
	client = client.WithZone("") // a prefix contains no address with a zone
	if !r.admission.admits(client) {
		return route{verdict: nodeview.Drop}
	}
	// Most frontends have one list for everybody, and need not know where the
	// client is.
	if r.elsewhere == r.node || !startsHere(client) {
		return r.elsewhere
	}
	return r.node
}

// endpoint returns the endpoint that client is to use, which is not unfit. It returns
// false if there is none.
func (r *rules) endpoint(rt route, client netip.Addr, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	if r.affinity == 0 {
		return rt.pool.pick(unfit)
	}
	return r.port.affinity.endpoint(client, r.affinity, rt.pool, unfit, now)
}

// admission says who gets in. Its zero value lets everybody in.
type admission struct {
	// restricted says that nobody gets in but who is in prefixes.
	restricted bool
	prefixes   []netip.Prefix
}

func (a *admission) admits(client netip.Addr) bool {
	return !a.restricted || slices.ContainsFunc(a.prefixes, func(p netip.Prefix) bool { return p.Contains(client) })
}

// screen says whose packets a socket takes at all: the others, it is as if they
// had been lost. It is what rules come to when nothing is left to decide but
// whether to drop. Its zero value takes everybody's.
type screen struct {
	// nobody says that nobody's are taken.
	nobody bool
	// hereOnly says that only those that start on this node are taken: what comes
	// over the loopback interface, and what comes from pods.
	hereOnly bool
	pods     []netip.Prefix
	admission
}

func (s *screen) equal(o *screen) bool {
	return s.nobody == o.nobody && s.hereOnly == o.hereOnly && slices.Equal(s.pods, o.pods) &&
		s.restricted == o.restricted && slices.Equal(s.prefixes, o.prefixes)
}

func (r *rules) screen(pods []netip.Prefix) screen {
	dropElsewhere, dropNode := r.elsewhere.verdict == nodeview.Drop, r.node.verdict == nodeview.Drop
	return screen{
		nobody:    dropElsewhere && dropNode || r.admission.restricted && len(r.admission.prefixes) == 0,
		hereOnly:  dropElsewhere && !dropNode,
		pods:      pods,
		admission: r.admission,
	}
}
