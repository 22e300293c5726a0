// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/nodeview"
)

// pool is a list of endpoints that are used in turn. All frontends of a service with the
// same list share a pool. It is safe for concurrent use.
type pool struct {
	mu     sync.Mutex
	sorted []netip.AddrPort
	// turns has the endpoints in the order of the current round. A round uses each endpoint
	// at most once, in random order. So different proxies start with different endpoints,
	// and a client that connects regularly does not always get the same endpoint.
	turns []netip.AddrPort
	next  int
}

func newPool(sorted []netip.AddrPort) *pool {
	p := &pool{}
	p.set(sorted)
	return p
}

// The method set replaces the endpoints. If they are the same as before, the present
// round continues.
func (p *pool) set(sorted []netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Equal(p.sorted, sorted) {
		p.sorted, p.turns, p.next = sorted, slices.Clone(sorted), len(sorted)
	}
}

// endpoints returns the endpoints, sorted. The caller must not modify them.
func (p *pool) endpoints() []netip.AddrPort {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sorted
}

// pick returns the next endpoint for which unfit returns false. If there is no such
// endpoint, the second result is false.
func (p *pool) pick(unfit func(netip.AddrPort) bool) (netip.AddrPort, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range 2 * len(p.turns) { // the rest of the current round may lack endpoints, but the next round has all of them
		if p.next == len(p.turns) {
			rand.Shuffle(len(p.turns), func(i, j int) { p.turns[i], p.turns[j] = p.turns[j], p.turns[i] })
			p.next = 0
		}
		e := p.turns[p.next]
		p.next++
		if !unfit(e) {
			return e, true
		}
	}
	return netip.AddrPort{}, false
}

func (p *pool) contains(e netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(p.endpoints(), e, netip.AddrPort.Compare)
	return found
}

// addrPorts returns the addresses of targets, sorted and without duplicates.
func addrPorts(targets []nodeview.Target) []netip.AddrPort {
	out := make([]netip.AddrPort, len(targets))
	for i, t := range targets {
		out[i] = t.AddrPort()
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}
