// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"sync"
	"time"
)

// maxAttached limits how many client addresses a port remembers, so that forged addresses
// cannot use all memory. kube-proxy's mode nftables has the same limit.
const maxAttached = 65_535

// affinity maps client addresses to endpoints. It is safe for concurrent use.
type affinity struct {
	mu      sync.Mutex
	clients map[netip.Addr]attachment // nil if there are no clients
	timeout time.Duration
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
func (a *affinity) pickEndpoint(client netip.Addr, timeout time.Duration, pool *pool, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, ok := a.clients[client]
	if !ok || now.Sub(c.used) >= timeout || !pool.contains(c.endpoint) || unfit(c.endpoint) {
		if c.endpoint, ok = pool.pick(unfit); !ok {
			return c.endpoint, false
		}
	}
	if a.clients == nil {
		a.clients = map[netip.Addr]attachment{}
	}
	if _, known := a.clients[client]; !known && len(a.clients) >= maxAttached {
		a.evictOne()
	}
	a.clients[client] = attachment{c.endpoint, now}
	return c.endpoint, true
}

// evictOne looks at a few clients and forgets the least recently used one.
func (a *affinity) evictOne() {
	var oldest netip.Addr
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
	a.timeout = timeout
	a.mu.Unlock()
	if timeout == 0 {
		a.detachIf(func(attachment) bool { return true })
	}
}

// expire forgets clients that have been idle for too long.
func (a *affinity) expire(now time.Time) {
	a.mu.Lock()
	timeout := a.timeout
	a.mu.Unlock()
	a.detachIf(func(c attachment) bool { return now.Sub(c.used) >= timeout })
}

// detachClient forgets client if it still uses endpoint.
func (a *affinity) detachClient(client netip.Addr, endpoint netip.AddrPort) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.clients[client].endpoint == endpoint {
		delete(a.clients, client)
	}
}

// detachIf forgets the clients for which gone returns true.
func (a *affinity) detachIf(gone func(attachment) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for client, c := range a.clients {
		if gone(c) {
			delete(a.clients, client)
		}
	}
	if len(a.clients) == 0 {
		a.clients = nil // frees memory, because a map never shrinks
	}
}
