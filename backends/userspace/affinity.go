// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"sync"
	"time"
)

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
// the result is the next endpoint of pool, and affinity remembers it for client.
// pickEndpoint skips endpoints for which unfit returns true. If no endpoint is left, the
// second result is false.
func (a *affinity) pickEndpoint(client portClient, timeout time.Duration, pool *pool, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, ok := a.clients[client]
	if !ok || now.Sub(c.used) >= timeout || !pool.contains(c.endpoint) || unfit(c.endpoint) {
		if c.endpoint, ok = pool.pick(unfit); !ok {
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
