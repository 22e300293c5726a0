// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"hash/maphash"
	"slices"
	"strings"
)

// state is what is known of a table without reading it: not the elements, but enough to
// tell whether they are all there.
type state struct {
	seed maphash.Seed
	// digests are of each map's elements.
	digests map[mapID]digest
	// classes are the classes that are there or that frontends have.
	shared map[sharedChain]classUse
	// rules are the digests of the rules that each chain should have.
	rules map[string]digest
	// wanted is how many want each element of a shared map, and hold on top of that if
	// a service that was not delivered in the pass may want it.
	wanted map[elementID]int
	// holding says that some are held on.
	holding bool
}

// classUse says of a class whether its chain and element are there, and how many frontends
// have it.
type classUse struct {
	made      bool
	frontends int
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
		shared:  map[sharedChain]classUse{},
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
	if v.chain != "" || v.comment != "" {
		h = (h*31+maphash.String(s.seed, v.chain))*31 + maphash.String(s.seed, v.comment)
	}
	return h
}

// has notes that the kernel has an element.
func (s *state) has(id *elementID, v *value) {
	d := s.digests[id.m]
	d.n++
	d.sum += s.hash(id, v)
	s.digests[id.m] = d
	s.uses(id, v, 1)
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
	s.uses(id, v, -1)
}

// uses notes that a frontend has, or no longer has, a class.
func (s *state) uses(id *elementID, v *value, n int) {
	if id.m.kind != frontends && id.m.kind != nodeFrontends {
		return
	}
	if c, ok := sharedChainOf(id, v); ok {
		use := s.shared[c]
		use.frontends += n
		s.setUse(c, use)
	}
}

func (s *state) setUse(c sharedChain, use classUse) {
	if use == (classUse{}) {
		delete(s.shared, c)
	} else {
		s.shared[c] = use
	}
}

// sharedChainMade notes that the kernel has a class, and sharedChainDeleted that it no longer has it.
func (s *state) sharedChainMade(c sharedChain) {
	e := c.element()
	s.has(&e.elementID, &e.value)
	use := s.shared[c]
	use.made = true
	s.setUse(c, use)
	if c.hasRules() {
		s.rules[c.name()] = digestOf(s.seed, hook{}, c.rules())
	}
}

func (s *state) sharedChainDeleted(c sharedChain) {
	e := c.element()
	s.lost(&e.elementID, &e.value)
	use := s.shared[c]
	use.made = false
	s.setUse(c, use)
	if c.hasRules() {
		delete(s.rules, c.name())
	}
}

// unusedChains returns the classes that no frontend has.
func (s *state) unusedChains() (unused []sharedChain) {
	for c, use := range s.shared {
		if use.made && use.frontends == 0 {
			unused = append(unused, c)
		}
	}
	slices.SortFunc(unused, func(a, b sharedChain) int { return strings.Compare(a.name(), b.name()) })
	return unused
}

// resolve decides whether an element that several services may want comes or goes.
func (s *state) resolve(o *op) {
	if !o.m.shared() {
		return
	}
	before := s.wanted[o.elementID]
	o.hasOld = o.hasOld || before > 0 && !o.looked
	o.hasNew = before+o.wanted > 0
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
		delete(s.rules, o.old.name)
	case o.new != nil && !o.new.isSet():
		s.rules[o.new.name] = digestOf(s.seed, hook{}, o.new.rules)
	}
}
