// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import "hash/maphash"

// state is what the backend knows of the kernel's table without reading it: not the
// elements, but enough to tell whether they are all there.
type state struct {
	seed maphash.Seed
	// digests are of each map's elements.
	digests map[mapID]digest
	// chains are the chains made on demand, and how many elements lead to each.
	chains map[string]int
	// own is the number of rules of each chain that is a service's own.
	own map[string]int
	// rules are of the chains, those of the skeleton included, when they were read
	// last: how many rules there are, and a hash of them.
	rules map[string]digest
	// wanted is how many want each element of a shared map, and hold on top of that if
	// a service that was not delivered in the pass may want it.
	wanted map[elementID]int
	// holding says that some are held on.
	holding bool
}

// hold keeps an element of a shared map, however many services let go of it.
const hold = 1 << 30

// digest is the number and the sum of the hashes of some elements: two sets of
// elements with the same digest are the same.
type digest struct {
	n   int
	sum uint64
}

func newState(seed maphash.Seed) *state {
	return &state{
		seed:    seed,
		digests: map[mapID]digest{},
		chains:  map[string]int{},
		own:     map[string]int{},
		rules:   map[string]digest{},
		wanted:  map[elementID]int{},
	}
}

// elements is how many elements the table has.
func (s *state) elements() (n int) {
	for _, d := range s.digests {
		n += d.n
	}
	return n
}

func (s *state) hash(id *elementID, v *value) uint64 {
	var b [maxKey + len(v.data)]byte
	copy(b[:], id.key[:])
	copy(b[maxKey:], v.data[:])
	h := maphash.Bytes(s.seed, b[:])
	if v.chain != "" {
		h = h*31 + maphash.String(s.seed, v.chain)
	}
	return h
}

// has notes that the kernel has an element.
func (s *state) has(id *elementID, v *value) {
	d := s.digests[id.m]
	d.n++
	d.sum += s.hash(id, v)
	s.digests[id.m] = d
	if _, ok := s.chains[v.chain]; ok {
		s.chains[v.chain]++
	}
}

// isLeft reports whether o let go of an element that stays because it is held.
func (s *state) isLeft(o *op) bool {
	return s.holding && o.wanted < 0 && s.wanted[o.elementID] == hold
}

// lost notes that the kernel no longer has an element.
func (s *state) lost(id *elementID, v *value) {
	d := s.digests[id.m]
	d.n--
	d.sum -= s.hash(id, v)
	s.digests[id.m] = d
	if _, ok := s.chains[v.chain]; ok {
		s.chains[v.chain]--
	}
}

// applied notes that the kernel did o.
func (s *state) applied(o *op) {
	if o.hasOld {
		s.lost(&o.elementID, &o.old)
	}
	if o.hasNew {
		s.has(&o.elementID, &o.new)
	}
	if o.wanted != 0 {
		s.wanted[o.elementID] += o.wanted
		if s.wanted[o.elementID] == 0 {
			delete(s.wanted, o.elementID)
		}
	}
}

// appliedObject notes that the kernel did o.
func (s *state) appliedObject(o *objectOp) {
	switch {
	case o.new == nil && !o.old.isSet():
		delete(s.own, o.old.name)
		delete(s.rules, o.old.name)
	case o.new != nil && !o.new.isSet():
		s.own[o.new.name] = len(o.new.rules)
		delete(s.rules, o.new.name) // until it is read
	}
}
