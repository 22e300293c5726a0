// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"sync"
	"time"
)

// maxAttached limits the client addresses that a port remembers, to the number of
// kube-proxy's nftables mode. It protects the memory from forged addresses.
const maxAttached = 65_535

// affinity maps client addresses to their endpoints. It is safe for concurrent use.
type affinity struct {
	mu      sync.Mutex
	clients map[netip.Addr]attachment // nil if there are none
	timeout time.Duration
}

type attachment struct {
	endpoint netip.AddrPort
	used     time.Time
}

// endpoint returns the endpoint of client. It is the one that client used within timeout,
// if pool still has it. Otherwise it is another one of pool, to which it attaches the
// client. It never returns an unfit endpoint, and returns false if all are.
func (a *affinity) endpoint(client netip.Addr, timeout time.Duration, pool *pool, unfit func(netip.AddrPort) bool, now time.Time) (netip.AddrPort, bool) {
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

// evictOne samples a few clients and drops the least recently used.
func (a *affinity) evictOne() {
	var oldest netip.Addr
	var used time.Time
	few := 0
	for client, c := range a.clients { // in random order
		if few == 0 || c.used.Before(used) {
			oldest, used = client, c.used
		}
		if few++; few == 8 {
			break
		}
	}
	delete(a.clients, oldest)
}

// setTimeout sets the time after which idle clients are dropped.
func (a *affinity) setTimeout(timeout time.Duration) {
	a.mu.Lock()
	a.timeout = timeout
	a.mu.Unlock()
	if timeout == 0 {
		a.detach(func(attachment) bool { return true })
	}
}

// expire drops clients that have been idle for too long.
func (a *affinity) expire(now time.Time) {
	a.mu.Lock()
	timeout := a.timeout
	a.mu.Unlock()
	a.detach(func(c attachment) bool { return now.Sub(c.used) >= timeout })
}

// leave detaches a client from endpoint.
func (a *affinity) leave(client netip.Addr, endpoint netip.AddrPort) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.clients[client].endpoint == endpoint {
		delete(a.clients, client)
	}
}

// detach detaches each client for which gone returns true.
func (a *affinity) detach(gone func(attachment) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for client, c := range a.clients {
		if gone(c) {
			delete(a.clients, client)
		}
	}
	if len(a.clients) == 0 {
		a.clients = nil // a map never shrinks
	}
}
