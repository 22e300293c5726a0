// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net/netip"
	"sync"
	"time"
)

// maxAttached is how many client addresses a port remembers, as many as
// kube-proxy's nftables mode. Somebody who makes addresses up must not fill
// the memory.
const maxAttached = 65_535

// affinity remembers which endpoint a client address uses. It is safe for
// concurrent use.
type affinity struct {
	mu      sync.Mutex
	clients map[netip.Addr]attachment // nil while there are none
	timeout time.Duration
}

type attachment struct {
	endpoint netip.AddrPort
	used     time.Time
}

// endpoint returns the endpoint of client: that which it has used within timeout
// if pool has it, else one of pool which it is attached to from now on. It is not
// unfit, and there is none if all are.
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
		a.forgetOne()
	}
	a.clients[client] = attachment{c.endpoint, now}
	return c.endpoint, true
}

// forgetOne forgets one of the clients, which are many: that of a few that has not
// come for the longest time.
func (a *affinity) forgetOne() {
	var oldest netip.Addr
	var used time.Time
	few := 0
	for client, c := range a.clients { // in a random order
		if few == 0 || c.used.Before(used) {
			oldest, used = client, c.used
		}
		if few++; few == 8 {
			break
		}
	}
	delete(a.clients, oldest)
}

// setTimeout says after what time clients are forgotten, at the latest.
func (a *affinity) setTimeout(timeout time.Duration) {
	a.mu.Lock()
	a.timeout = timeout
	a.mu.Unlock()
	if timeout == 0 {
		a.detach(func(attachment) bool { return true })
	}
}

// expire forgets clients that have not come for too long.
func (a *affinity) expire(now time.Time) {
	a.mu.Lock()
	timeout := a.timeout
	a.mu.Unlock()
	a.detach(func(c attachment) bool { return now.Sub(c.used) >= timeout })
}

// leave takes its endpoint away from a client that is attached to it.
func (a *affinity) leave(client netip.Addr, endpoint netip.AddrPort) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.clients[client].endpoint == endpoint {
		delete(a.clients, client)
	}
}

// detach takes its endpoint away from each client for which gone is true.
func (a *affinity) detach(gone func(attachment) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for client, c := range a.clients {
		if gone(c) {
			delete(a.clients, client)
		}
	}
	if len(a.clients) == 0 {
		a.clients = nil // a map keeps the memory of its largest size
	}
}
