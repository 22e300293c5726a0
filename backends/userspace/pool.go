// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/nodeview"
)

// content is the content of a pool.
type content struct {
	// sorted has the endpoints, sorted and without duplicates.
	sorted []netip.AddrPort
	// weights has the weights of the endpoints, or is nil if all are equal.
	weights   []uint16
	algorithm api.Algorithm
}

// contentOf returns the content of a pool of targets.
func contentOf(targets []nodeview.Target, algorithm api.Algorithm) content {
	targets = slices.Clone(targets)
	slices.SortStableFunc(targets, func(a, b nodeview.Target) int { return a.AddrPort().Compare(b.AddrPort()) })
	targets = slices.CompactFunc(targets, func(a, b nodeview.Target) bool { return a.AddrPort() == b.AddrPort() })
	c := content{algorithm: algorithm, sorted: make([]netip.AddrPort, len(targets)), weights: make([]uint16, len(targets))}
	equal := true
	for i, t := range targets {
		c.sorted[i], c.weights[i] = t.AddrPort(), uint16(cmp.Or(t.Weight, api.DefaultWeight))
		equal = equal && c.weights[i] == c.weights[0]
	}
	if equal {
		c.weights = nil
	}
	return c
}

func (c *content) weight(i int) uint16 {
	if c.weights == nil {
		return api.DefaultWeight
	}
	return c.weights[i]
}

// pool chooses the endpoints of clients from a list. All frontends of a service with the
// same list share a pool. A pool is safe for concurrent use.
type pool struct {
	mu sync.Mutex
	content
	// turns has the endpoints in the order of the current round, if all have the same weight.
	// A round uses each endpoint at most once, in random order. So different proxies start
	// with different endpoints, and a client that connects regularly does not always get the
	// same endpoint.
	turns []netip.AddrPort
	next  int
	// sums[i] is the sum of the weights up to endpoint i, if the weights differ. position
	// divided by 2^64 is the place of the last choice between 0 and the last sum.
	sums     []uint64
	position uint64
	// table is the table of stable hashing, or nil before the first client.
	table []uint16
}

func newPool(c content) *pool {
	p := &pool{position: rand.Uint64()}
	p.set(c)
	return p
}

// set replaces the content. If the content is the same as before, the present round
// continues.
func (p *pool) set(c content) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Equal(p.sorted, c.sorted) && slices.Equal(p.weights, c.weights) && p.algorithm == c.algorithm {
		return
	}
	p.content, p.table = c, nil
	p.turns, p.next = slices.Clone(c.sorted), len(c.sorted)
	p.sums = nil
	sum := uint64(0)
	for _, w := range c.weights {
		sum += uint64(w)
		p.sums = append(p.sums, sum)
	}
}

// endpoints returns the endpoints, sorted. The caller must not modify them.
func (p *pool) endpoints() []netip.AddrPort {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sorted
}

// pick returns an endpoint for a client. It skips endpoints for which unfit returns true.
// If no endpoint is left, the second result is false.
func (p *pool) pick(client netip.AddrPort, unfit func(netip.AddrPort) bool) (netip.AddrPort, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	choose := p.nextTurn
	attempts := 2 * len(p.sorted) // the rest of a round may lack endpoints, but the next round has all of them
	switch {
	case len(p.sorted) == 0:
		return netip.AddrPort{}, false
	case p.algorithm != api.Random:
		choose, attempts = p.byHash(client), min(attempts, 16)
	case p.sums != nil:
		choose, attempts = p.byWeight, min(attempts, 16)
	}
	for range attempts {
		if e := choose(); !unfit(e) {
			return e, true
		}
	}
	// Few endpoints are usable, or all usable ones have small weights.
	for _, e := range p.sorted {
		if !unfit(e) {
			return e, true
		}
	}
	return netip.AddrPort{}, false
}

// nextTurn returns the next endpoint of the round, and begins a new round if necessary.
func (p *pool) nextTurn() netip.AddrPort {
	if p.next == len(p.turns) {
		rand.Shuffle(len(p.turns), func(i, j int) { p.turns[i], p.turns[j] = p.turns[j], p.turns[i] })
		p.next = 0
	}
	p.next++
	return p.turns[p.next-1]
}

// byWeight returns an endpoint according to the weights. With steps of the golden ratio,
// any number of successive choices is distributed more evenly than at random.
func (p *pool) byWeight() netip.AddrPort {
	p.position += 0x9e3779b97f4a7c15
	place, _ := bits.Mul64(p.position, p.sums[len(p.sums)-1])
	i, found := slices.BinarySearch(p.sums, place)
	if found { // place is the end of endpoint i, and so the beginning of the next one
		i++
	}
	return p.sorted[i]
}

// byHash returns a function. Its first call returns the endpoint of a client, and further
// calls return alternatives. On all nodes with the same endpoints, the results are the
// same.
func (p *pool) byHash(client netip.AddrPort) func() netip.AddrPort {
	if p.table == nil {
		all := make([]maglev.Endpoint, len(p.sorted))
		for i, e := range p.sorted {
			all[i] = maglev.Endpoint{Key: e.String(), Weight: p.weight(i)}
		}
		p.table = maglev.Table(all)
	}
	addr := client.Addr().WithZone("").As16()
	key := addr[:]
	if p.algorithm == api.HashConnection {
		key = binary.BigEndian.AppendUint16(key, client.Port())
	}
	return func() netip.AddrPort {
		hash := maglev.Hash(key)
		key = binary.BigEndian.AppendUint64(key[:0:0], hash)
		return p.sorted[p.table[(hash>>32)*uint64(len(p.table))>>32]]
	}
}

func (p *pool) contains(e netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(p.endpoints(), e, netip.AddrPort.Compare)
	return found
}
