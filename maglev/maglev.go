// SPDX-License-Identifier: Apache-2.0

// Package maglev assigns connections to endpoints by stable hashing. It implements the
// lookup table of Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
// Balancer" (NSDI 2016), section 3.4, but supports weights, and uses fewer entries if there
// are few endpoints.
//
// All processes that build a table from the same endpoints get the same table, whatever the
// order of the endpoints. When one of n endpoints is added or removed, at most 1/n + 1 % of
// the other endpoints' entries change. This holds even if the size of the table changes. This
// package uses no other package of kpng. Any proxy can use a table, for example as the
// content of a map in the kernel:
//
//	table := maglev.Table(endpoints)
//	…
//	hash := maglev.Hash(client) >> 32
//	e := endpoints[table[hash*uint64(len(table))>>32]]
//
// The choice is the same on all nodes that have the same endpoints and weights. A proxy may
// use another hash of 32 bits that is the same on all nodes. It must choose the entry by the
// upper bits of the hash as above, because an entry of a small table corresponds to adjacent
// entries of a large table. In nftables, the expression jhash uses the upper bits.
package maglev

import (
	"cmp"
	"slices"
)

// The sizes of tables. The table of a single endpoint is an exception: it has one entry.
const (
	smallBits, largeBits = 11, 16
	smallSize, largeSize = 1 << smallBits, 1 << largeBits
)

// A table with up to maxSmall endpoints is small. A table with minFree or more endpoints has
// nothing in common with a small table: endpoints prefer its entries in an unrelated order.
const maxSmall, minFree = 16, 128

// maxEndpoints is the maximum number of endpoints in a table, because an entry has 16 bits.
const maxEndpoints = 1 << 16

// Endpoint is an endpoint of a table.
type Endpoint struct {
	// Key identifies the endpoint in all processes, such as "10.1.0.1:80". Keys are unique
	// within a table.
	Key string
	// Weight is the share of the endpoint in the table, relative to the weights of the other
	// endpoints. An endpoint with weight 0 has no entry.
	Weight uint16
}

// Table returns a table for endpoints. Each entry is the index of an endpoint. Endpoints
// with weight 0 do not count for the size of the table:
//
//	endpoints   entries
//	1                 1
//	2 to 16       2,048
//	more         65,536
//
// If n endpoints have equal weights, each has 1/n of the entries, and at most one entry more
// or less. The result is nil if no endpoint has a weight. Table ignores endpoints from index
// 65,536 on. An endpoint may have no entry if its weight is much less than the average
// weight per entry, which is the sum of all weights divided by the number of entries.
//
// Table takes 0.1 ms for 10 endpoints, 4 ms for 100, and 10 ms for 10,000.
func Table(endpoints []Endpoint) []uint16 {
	endpoints = endpoints[:min(len(endpoints), maxEndpoints)]
	var q queue
	weights := uint64(0)
	for i, e := range endpoints {
		if e.Weight > 0 {
			q = append(q, newTurns(i, &e))
			weights += uint64(e.Weight)
		}
	}
	size := uint64(largeSize)
	switch n := len(q); {
	case n == 0:
		return nil
	case n == 1:
		return []uint16{uint16(q[0].index)}
	case n <= maxSmall:
		size = smallSize
	}
	// The order of equal turns depends on the keys alone. A sorted slice is a heap, because
	// the first turn of an endpoint is 1/weight.
	slices.SortFunc(q, func(a, b *turns) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.key, b.key))
	})
	inBlocks, all := blocksShare(len(q))
	for rank, t := range q {
		t.rank = rank
		t.inBlocks = inBlocks * size * t.weight / (all * weights)
		if size == smallSize {
			t.inBlocks = size
		}
	}
	table := make([]uint16, size)
	taken := make([]bool, size)
	for range table {
		t := q[0]
		entry := t.next(size)
		for taken[entry] {
			entry = t.next(size)
		}
		table[entry], taken[entry] = uint16(t.index), true
		t.count++
		q.sink()
	}
	return table
}

// blocksShare returns the share of its entries that an endpoint takes block by block, in a
// table with n endpoints. A block of a large table has the entries of one entry of a small
// table. Therefore a large table of few endpoints is similar to a small table, and few
// clients move when the size changes. With each additional endpoint, the share shrinks by at
// most half the share of an endpoint.
func blocksShare(n int) (inBlocks, all uint64) {
	const unit = 1 << 20
	for i := maxSmall; i < minFree; i++ {
		all += unit / uint64(i)
		if i >= n {
			inBlocks += unit / uint64(i)
		}
	}
	return inBlocks, all
}

// turns is the state of an endpoint while Table fills a table.
type turns struct {
	index, rank int
	key         string
	hash        uint64
	weight      uint64
	count       uint64 // number of entries that the endpoint has
	inBlocks    uint64 // number of entries that the endpoint takes block by block
	// The endpoint first takes blocks of the table, in the order blocks. Later it takes single
	// entries, in the order free.
	blocks, free permutation
	tried        uint64 // number of entries that the endpoint has tried block by block
	block        uint64 // the block of the last such entry
}

func newTurns(index int, e *Endpoint) *turns {
	h := Hash([]byte(e.Key))
	random := func() uint64 {
		h = mix(h + golden)
		return h
	}
	return &turns{
		index: index, key: e.Key, hash: h, weight: uint64(e.Weight),
		blocks: permutation{random(), random()}, free: permutation{random(), random()},
	}
}

// next returns the next entry that the endpoint prefers in a table of this size. The size
// is a power of two.
func (t *turns) next(size uint64) uint64 {
	if t.count >= t.inBlocks {
		return t.free.next(largeBits)
	}
	perBlock := size / smallSize
	within := t.tried & (perBlock - 1)
	if within == 0 {
		t.block = t.blocks.next(smallBits)
	}
	t.tried++
	return t.block*perBlock + (mix(t.hash+t.block)+within)&(perBlock-1)
}

// permutation is an order of all numbers with a given number of bits. In the paper, the
// distance between consecutive numbers is a constant of the endpoint. There are many possible
// distances, because the size is a prime. With a power of two, some endpoints would have
// equal or related distances. A change of one such endpoint would move many entries of the
// other. So one-to-one functions mix the numbers here.
type permutation struct{ position, factors uint64 }

func (p *permutation) next(bits int) uint64 {
	mask := uint64(1)<<bits - 1
	p.position++
	n := p.position * (p.factors | 1) & mask
	n ^= n >> (bits / 2)
	n = n * (p.factors>>32 | 1) & mask
	return n ^ n>>(bits/2)
}

// queue is a heap of endpoints. The first endpoint takes the next entry, because it will
// then have the fewest entries relative to its weight. So endpoints of equal weight take
// turns, as in the paper.
type queue []*turns

// sink moves the first endpoint down to its place in the heap.
func (q queue) sink() {
	for i := 0; ; {
		child := 2*i + 1
		if child+1 < len(q) && q[child+1].before(q[child]) {
			child++
		}
		if child >= len(q) || q[i].before(q[child]) {
			return
		}
		q[i], q[child] = q[child], q[i]
		i = child
	}
}

func (t *turns) before(o *turns) bool {
	x, y := (t.count+1)*o.weight, (o.count+1)*t.weight // at most 2^32
	return x < y || x == y && t.rank < o.rank
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
