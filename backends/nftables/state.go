// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"hash/maphash"
	"slices"
	"strings"
)

// state is what the table contains, as far as it is known without reading. It has digests
// in place of elements, which are enough to detect that elements changed.
type state struct {
	seed maphash.Seed
	// digests has the digest of each map's elements.
	digests map[mapID]digest
	// made has the shared chains that the kernel has.
	made map[sharedChain]bool
	// frontends counts the frontends of each shared chain that has any.
	frontends map[sharedChain]int
	// rules has the digest that each chain should have.
	rules map[string]digest
	// wanted counts the services that want an element of a shared map. It includes hold if
	// a service may want the element that the pass has not delivered yet.
	wanted map[elementID]int
}

// hold is larger than the number of services. It keeps an element of a shared map when no
// service wants it.
const hold = 1 << 30

func newState(seed maphash.Seed) *state {
	return &state{
		seed:      seed,
		digests:   map[mapID]digest{},
		made:      map[sharedChain]bool{},
		frontends: map[sharedChain]int{},
		rules:     map[string]digest{},
		wanted:    map[elementID]int{},
	}
}

// elements returns the number of elements in the table.
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

// elementAdded notes that the kernel has an element, and elementRemoved that it no longer
// has it.
func (s *state) elementAdded(id *elementID, v *value) {
	s.count(id, v, 1, s.hash(id, v))
}

func (s *state) elementRemoved(id *elementID, v *value) {
	s.count(id, v, -1, -s.hash(id, v))
}

func (s *state) count(id *elementID, v *value, n int, hash uint64) {
	d := s.digests[id.m]
	s.digests[id.m] = digest{d.n + n, d.sum + hash}
	if id.m.kind == frontends || id.m.kind == nodeFrontends {
		if c, ok := sharedChainOf(id, v); ok {
			increment(s.frontends, c, n)
		}
	}
}

// increment adds n to the count of key. It deletes a count of 0.
func increment[K comparable](counts map[K]int, key K, n int) {
	if counts[key] += n; counts[key] == 0 {
		delete(counts, key)
	}
}

// chainsMade notes that the kernel has these shared chains, and chainsDeleted that it no
// longer has them.
func (s *state) chainsMade(list []sharedChain) {
	for _, c := range list {
		if s.made[c] {
			continue // its rules were repaired
		}
		s.made[c] = true
		e := c.element()
		s.elementAdded(&e.elementID, &e.value)
		if c.hasRules() {
			s.rules[c.name()] = digestOf(s.seed, hook{}, c.encodedRules())
		}
	}
}

func (s *state) chainsDeleted(list []sharedChain) {
	for _, c := range list {
		delete(s.made, c)
		e := c.element()
		s.elementRemoved(&e.elementID, &e.value)
		if c.hasRules() {
			delete(s.rules, c.name())
		}
	}
}

// unusedChains returns the shared chains that no frontend has.
func (s *state) unusedChains() (unused []sharedChain) {
	for c := range s.made {
		if s.frontends[c] == 0 {
			unused = append(unused, c)
		}
	}
	slices.SortFunc(unused, func(a, b sharedChain) int { return strings.Compare(a.name(), b.name()) })
	return unused
}

// resolve decides whether o adds or removes an element of a shared map.
func (s *state) resolve(o *op) {
	if !o.m.shared() {
		return
	}
	before := s.wanted[o.elementID]
	o.hasOld = o.hasOld || before > 0 && !o.checked
	o.hasNew = before+o.wanted > 0
}

// applied notes that the kernel has applied o.
func (s *state) applied(o *op) {
	if o.hasOld {
		s.elementRemoved(&o.elementID, &o.old)
	}
	if o.hasNew {
		s.elementAdded(&o.elementID, &o.new)
	}
	if o.wanted != 0 {
		increment(s.wanted, o.elementID, o.wanted)
	}
}

// isLeft reports whether the element of o stays although no service wants it any more.
func (s *state) isLeft(o *op) bool {
	return o.wanted < 0 && s.wanted[o.elementID] == hold
}

// objectApplied notes that the kernel has applied o.
func (s *state) objectApplied(o *objectOp) {
	switch {
	case o.new == nil && !o.old.isSet():
		delete(s.rules, o.old.name)
	case o.new != nil && !o.new.isSet():
		s.rules[o.new.name] = digestOf(s.seed, hook{}, o.new.rules)
	}
}
