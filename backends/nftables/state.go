// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"hash/maphash"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/shrink"
	"github.com/kpng-project/kpng/internal/sourcelists"
)

// state is the expected content of the table. It has digests instead of the elements,
// because digests are enough to detect changed elements.
type state struct {
	seed maphash.Seed
	// digests has a digest of the elements of each map.
	digests map[mapID]digest
	// clientSeed is the seed of the hash of clients.
	clientSeed uint32
	// made has the classes whose chains and elements exist in the kernel.
	made map[class]bool
	// lists counts the lists of each class. It contains no zero counts.
	lists map[class]int
	// ranges counts the source ranges in the table.
	ranges sourcelists.Counts
	// rules has the expected digest of each chain, by the name of the chain.
	rules map[string]nft.Digest
	// wanted has the use count of each element of a shared map: the number of services
	// that need the element.
	wanted map[sharedID]int32
	most   shrink.Size // the size of the map wanted, see shrink.Map
	// held has the elements of shared maps that stay although no service needs them.
	// During a pass, these are the elements that the table had when the pass began,
	// because services later in the pass may need them. After a pass in which services
	// failed, they are the elements that these services may need.
	held map[mapID]*snapshot
	// journals record the changes of elements.
	journals []*journal
}

func newState(clientSeed uint32) *state {
	return &state{
		seed:       maphash.MakeSeed(),
		clientSeed: clientSeed,
		digests:    map[mapID]digest{},
		made:       map[class]bool{},
		lists:      map[class]int{},
		ranges:     sourcelists.Counts{},
		rules:      map[string]nft.Digest{},
		wanted:     map[sharedID]int32{},
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
	if v.counted {
		h = ^h
	}
	if v.text != "" {
		h = h*31 + maphash.String(s.seed, v.text)
	}
	return h
}

// count records that the kernel has an element (n is 1), or no longer has it (n is -1).
func (s *state) count(id *elementID, v *value, n int) {
	for _, j := range s.journals {
		j.add(id, v, n > 0)
	}
	d := s.digests[id.m]
	s.digests[id.m] = digest{d.n + n, d.sum + uint64(n)*s.hash(id, v)}
	if id.m.kind == kindLists {
		if c, ok := classOfElement(id, v); ok {
			increment(s.lists, c, n)
		}
	}
	if id.m.kind == kindSources {
		s.ranges.Add(id.m.family, id.key[:id.m.keyLen()], n)
	}
}

// increment adds n to the count of key, and deletes the count if the sum is 0.
func increment[K comparable, N int | int32](counts map[K]N, key K, n N) {
	if counts[key] += n; counts[key] == 0 {
		delete(counts, key)
	}
}

// classesMade records that the kernel has these classes. classesDeleted records that the
// kernel no longer has them.
func (s *state) classesMade(list []class) {
	for _, c := range list {
		if s.made[c] {
			continue // the chain existed, and only its rules were repaired
		}
		s.made[c] = true
		if !c.choosesSlot {
			e := c.element()
			s.count(&e.elementID, &e.value, 1)
		}
		if !c.isSkeletonChain() {
			s.rules[c.name()] = c.chain(s.clientSeed).Digest()
		}
	}
}

func (s *state) classesDeleted(list []class) {
	for _, c := range list {
		delete(s.made, c)
		if !c.choosesSlot {
			e := c.element()
			s.count(&e.elementID, &e.value, -1)
		}
		if !c.isSkeletonChain() {
			delete(s.rules, c.name())
		}
	}
}

// slotChainsMade records that the kernel has the slot-choosing chains of the present
// classes.
func (s *state) slotChainsMade() {
	for c := range s.made {
		if slot, ok := c.needs(); ok {
			s.classesMade([]class{slot})
		}
	}
}

// missing returns the classes that the kernel lacks. It considers the needed classes and
// the classes on which these depend. The order is always the same. A class comes after the
// class that it needs.
func (s *state) missing(needed map[class]bool) (missing []class) {
	seen := map[class]bool{}
	add := func(c class) {
		if !s.made[c] && !seen[c] {
			seen[c] = true
			missing = append(missing, c)
		}
	}
	for _, c := range slices.SortedFunc(maps.Keys(needed), class.compare) {
		if slot, ok := c.needs(); ok {
			add(slot)
		}
		add(c)
	}
	return missing
}

// unusedClasses returns the classes that no list uses.
func (s *state) unusedClasses() (unused []class) {
	needed := map[class]bool{}
	for c := range s.made {
		if s.lists[c] > 0 {
			if slot, ok := c.needs(); ok {
				needed[slot] = true
			}
		} else if !c.choosesSlot {
			unused = append(unused, c)
		}
	}
	for c := range s.made {
		if c.choosesSlot && !needed[c] {
			unused = append(unused, c)
		}
	}
	slices.SortFunc(unused, class.compare)
	return unused
}

// resolve sets o.hasOld and o.hasNew by the element's use count, if its map is shared.
func (s *state) resolve(o *op) {
	if !o.m.shared() {
		return
	}
	before, held := s.wanted[o.sharedID()], s.holds(o)
	o.hasOld = o.hasOld || (before > 0 || held) && !o.checked
	o.hasNew = before+o.wanted > 0 || held
}

func (s *state) holds(o *op) bool {
	held := s.held[o.m]
	return held != nil && held.has(&o.elementID)
}

// recordOp updates s after the kernel has applied o.
func (s *state) recordOp(o *op) {
	if o.hasOld {
		s.count(&o.elementID, &o.old, -1)
	}
	if o.hasNew {
		s.count(&o.elementID, &o.new, 1)
	}
	if o.wanted != 0 {
		increment(s.wanted, o.sharedID(), o.wanted)
	}
}

// digest summarizes the elements of a map: their number, and the sum of their hashes. Equal
// digests mean equal elements.
type digest struct {
	n   int
	sum uint64
}
