// SPDX-License-Identifier: Apache-2.0

// Package maglev assigns connections to endpoints by stable hashing. It implements the
// lookup table of Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
// Balancer" (NSDI 2016), section 3.4, with weights.
//
// All processes that build a table from the same endpoints get the same table, whatever the
// order of the endpoints. When an endpoint is added or removed, few entries of the others
// change. A table needs no other package of kpng, so any proxy can use it, also as the
// content of a map of the kernel:
//
//	table := maglev.Table(0, endpoints)
//	…
//	e := endpoints[table[maglev.Hash(client)%uint64(len(table))]]
//
// The choice is the same on all nodes that have the same endpoints and weights.
package maglev

import (
	"cmp"
	"container/heap"
	"slices"
)

// DefaultSize is the number of entries of a table, as in the paper. With 100 endpoints of
// equal weights, the shares of two endpoints differ by at most 0.2 %.
const DefaultSize = 65537

// maxSize is the largest size of a table. It is prime.
const maxSize = 131071

// maxEndpoints is the maximum number of endpoints in a table, because an entry has 16 bits.
const maxEndpoints = 1 << 16

// Endpoint is an endpoint of a table.
type Endpoint struct {
	// Key identifies the endpoint in all processes, such as "10.1.0.1:80". The keys of the
	// endpoints of a table differ.
	Key string
	// Weight is the share of the endpoint in the table, relative to the weights of the other
	// endpoints. An endpoint with weight 0 has no entry.
	Weight uint16
}

// Table returns a table for endpoints. Each entry is the index of an endpoint. The table
// has as many entries as the smallest prime that is at least size, but at most 131,071
// entries. If size is not positive, the table has [DefaultSize] entries. All processes have
// to use the same size, and should not derive it from the number of endpoints: tables of
// different sizes have nothing in common.
//
// The result is nil if no endpoint has a weight. Table ignores endpoints from index 65,536
// on. If there are more endpoints than entries, some endpoints have no entry.
//
// With the default size, Table takes 4 ms for 10 endpoints and 15 ms for 10,000.
func Table(size int, endpoints []Endpoint) []uint16 {
	if size <= 0 {
		size = DefaultSize
	}
	size = primeFrom(min(size, maxSize))
	endpoints = endpoints[:min(len(endpoints), maxEndpoints)]
	q := make(queue, 0, len(endpoints))
	for i, e := range endpoints {
		if e.Weight > 0 {
			q = append(q, newTurns(i, &e, uint64(size)))
		}
	}
	if len(q) == 0 {
		return nil
	}
	// The order of equal turns depends on the keys alone. A sorted slice is a heap.
	slices.SortFunc(q, func(a, b *turns) int { return cmp.Compare(a.key, b.key) })
	for rank, t := range q {
		t.rank = rank
	}
	heap.Init(&q)
	table := make([]uint16, size)
	taken := make([]bool, size)
	for range table {
		t := q[0]
		for taken[t.position] {
			t.advance(uint64(size))
		}
		table[t.position], taken[t.position] = uint16(t.index), true
		t.count++
		heap.Fix(&q, 0)
	}
	return table
}

// turns is the state of an endpoint while Table fills a table.
type turns struct {
	index, rank int
	key         string
	weight      uint64
	// position is the next entry that the endpoint prefers, and step the distance to the
	// entry after that, as in the paper.
	position, step uint64
	count          uint64 // number of entries that the endpoint has
}

func newTurns(index int, e *Endpoint, size uint64) *turns {
	h := Hash([]byte(e.Key))
	return &turns{
		index: index, key: e.Key, weight: uint64(e.Weight),
		position: h % size, step: mix(h+golden)%(size-1) + 1,
	}
}

func (t *turns) advance(size uint64) {
	if t.position += t.step; t.position >= size {
		t.position -= size
	}
}

// queue is a heap of endpoints. The first one takes the next entry: it has the fewest
// entries after that, relative to its weight. So endpoints of equal weight take turns, as in
// the paper.
type queue []*turns

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(any)     {}
func (q *queue) Pop() any     { return nil }
func (q queue) Less(i, j int) bool {
	a, b := q[i], q[j]
	x, y := (a.count+1)*b.weight, (b.count+1)*a.weight // at most 2^33
	return x < y || x == y && a.rank < b.rank
}

// golden is 2^64 divided by the golden ratio.
const golden = 0x9e3779b97f4a7c15

// Hash returns a hash of b, such as the address of a client. It is the same in all
// processes and on all machines. So clients that know the endpoints can choose one of them
// by choosing a source port.
func Hash(b []byte) uint64 {
	const offset, prime = 0xcbf29ce484222325, 0x100000001b3 // FNV-1a
	h := uint64(offset)
	for _, c := range b {
		h = (h ^ uint64(c)) * prime
	}
	return mix(h)
}

// mix makes all bits of the result depend on all bits of h. It is the last step of
// MurmurHash3.
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// primeFrom returns the smallest prime that is at least n, and at least 3.
func primeFrom(n int) int {
	for n = max(n, 3) | 1; ; n += 2 {
		prime := true
		for d := 3; d*d <= n && prime; d += 2 {
			prime = n%d != 0
		}
		if prime {
			return n
		}
	}
}
