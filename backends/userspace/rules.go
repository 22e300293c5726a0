// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/nodeview"
)

// rules says how to treat the clients of a frontend. It is never modified. Frontends with
// equal rules share one value. A change of endpoints changes only pools, so it does not
// touch the listeners.
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

// routeOf returns the route for client. For a client that is not admitted, the verdict is
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
func (r *rules) endpoint(rt route, client netip.AddrPort, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	if r.affinity == 0 {
		return rt.pool.pick(client, unfit)
	}
	return r.port.affinity.pickEndpoint(portClient{r.port, client.Addr()}, client.Port(), r.affinity, rt.pool, unfit, now)
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

// maxAttached limits how many clients a service remembers, so that forged addresses
// cannot use all memory. A client counts once for each port.
const maxAttached = 65_535

// affinity maps the clients of one service to endpoints. It is safe for concurrent use.
type affinity struct {
	mu      sync.Mutex
	clients map[portClient]attachment // nil if there are no clients
	timeout time.Duration
}

// portClient is a client of a port. Each port has its own affinity.
type portClient struct {
	*port
	addr netip.Addr
}

type attachment struct {
	endpoint netip.AddrPort
	used     time.Time
}

// pickEndpoint returns an endpoint for client. If client used an endpoint less than
// timeout ago, and pool still has that endpoint, the result is that endpoint. Otherwise
// the result is an endpoint that pool picks, and affinity remembers it for client.
// pickEndpoint skips endpoints for which unfit returns true. If no endpoint is left, the
// second result is false.
func (a *affinity) pickEndpoint(client portClient, from uint16, timeout time.Duration, pool *pool, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, ok := a.clients[client]
	if !ok || now.Sub(c.used) >= timeout || !pool.contains(c.endpoint) || unfit(c.endpoint) {
		if c.endpoint, ok = pool.pick(netip.AddrPortFrom(client.addr, from), unfit); !ok {
			return c.endpoint, false
		}
	}
	if a.clients == nil {
		a.clients = map[portClient]attachment{}
	}
	if _, known := a.clients[client]; !known && len(a.clients) >= maxAttached {
		a.evictOne()
	}
	a.clients[client] = attachment{c.endpoint, now}
	return c.endpoint, true
}

// evictOne looks at a few clients and forgets the least recently used one.
func (a *affinity) evictOne() {
	var oldest portClient
	var used time.Time
	few := 0
	for client, c := range a.clients { // iteration over a map begins at a random client
		if few == 0 || c.used.Before(used) {
			oldest, used = client, c.used
		}
		if few++; few == 8 {
			break
		}
	}
	delete(a.clients, oldest)
}

// setTimeout sets the time after which idle clients are forgotten.
func (a *affinity) setTimeout(timeout time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timeout = timeout; timeout == 0 {
		a.clients = nil
	}
}

// expire forgets clients that have been idle for too long.
func (a *affinity) expire(now time.Time) {
	a.detachIf(func(_ portClient, c attachment) bool { return now.Sub(c.used) >= a.timeout })
}

// detachClient forgets client if it still uses endpoint.
func (a *affinity) detachClient(client portClient, endpoint netip.AddrPort) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.clients[client].endpoint == endpoint {
		delete(a.clients, client)
	}
}

// detachIf forgets the clients for which gone returns true.
func (a *affinity) detachIf(gone func(portClient, attachment) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for client, c := range a.clients {
		if gone(client, c) {
			delete(a.clients, client)
		}
	}
	if len(a.clients) == 0 {
		a.clients = nil // frees memory, because a map never shrinks
	}
}

// admission is a list of source addresses that are admitted. It is never modified. The
// frontends of a service share one value for equal lists. The nil *admission admits all
// addresses.
type admission struct {
	// prefixes is sorted by address, and no prefix contains another one.
	prefixes []netip.Prefix
}

func newAdmission(prefixes []netip.Prefix) *admission {
	sorted := make([]netip.Prefix, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, func(a, b netip.Prefix) int { // a prefix comes before the prefixes that it contains
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	a := &admission{}
	for _, p := range sorted {
		if n := len(a.prefixes); n == 0 || !a.prefixes[n-1].Contains(p.Addr()) {
			a.prefixes = append(a.prefixes, p)
		}
	}
	return a
}

func (a *admission) admits(client netip.Addr) bool {
	if a == nil {
		return true
	}
	after, _ := slices.BinarySearchFunc(a.prefixes, client, func(p netip.Prefix, client netip.Addr) int {
		if p.Addr().Compare(client) <= 0 {
			return -1
		}
		return 1
	})
	return after > 0 && a.prefixes[after-1].Contains(client)
}

// admissions has the admissions of one service by their prefixes, so that frontends with
// equal source ranges share one admission.
type admissions map[string]*admission

// of returns the admission of the sources at a node with these addresses. If the map a or
// the argument earlier has an admission with the same prefixes, the result is that
// admission.
func (a admissions) of(sources *nodeview.Sources, node []netip.Addr, earlier admissions) *admission {
	if !sources.Restricted {
		return nil
	}
	prefixes := sources.Prefixes(node)
	var key []byte
	if len(prefixes) > 0 {
		key = append(key, byte(prefixes[0].Addr().BitLen()))
	}
	for _, p := range prefixes {
		key, _ = p.AppendBinary(key)
	}
	found := a[string(key)]
	if found == nil {
		if found = earlier[string(key)]; found == nil {
			found = newAdmission(prefixes)
		}
		a[string(key)] = found
	}
	return found
}
