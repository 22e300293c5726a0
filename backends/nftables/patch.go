// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// op is the change of one element.
type op struct {
	elementID
	hasOld, hasNew bool
	old, new       value
	// wanted is the change of the number of services that want the element, if its map is
	// shared. hasOld and hasNew follow from it when the op is applied.
	wanted int
	// checked: hasOld and old were read from the kernel when it refused the op.
	checked bool
	// claimed: old is the value that the pass read, see pass.claim.
	claimed bool
	// part is the number of the part of the patch that the op belongs to.
	part int
}

// patch is the difference that a change of services makes, element by element. It has a
// part for each service. If an element moves between services, it joins their parts, so
// that their changes take effect together or not at all.
type patch struct {
	ops   []*op
	block []op // memory for the next ops
	index map[elementID]*op
	// objects are by name, which says what service has the object.
	objects map[string]*objectOp
	// services are the services of each part.
	services [][]types.NamespacedName
	// parent is the part that a part was joined to, itself if it was not joined.
	parent []int
}

func newPatch() *patch { return &patch{index: map[elementID]*op{}, objects: map[string]*objectOp{}} }

// begin begins the part of a service. The changes that follow belong to it.
func (p *patch) begin(key types.NamespacedName) {
	p.parent = append(p.parent, len(p.parent))
	p.services = append(p.services, []types.NamespacedName{key})
}

// root returns the part that a part was joined to.
func (p *patch) root(part int) int {
	for p.parent[part] != part {
		p.parent[part] = p.parent[p.parent[part]]
		part = p.parent[part]
	}
	return part
}

// op returns the op of an element. If the op belongs to another part, it joins the
// current part to that one.
func (p *patch) op(id elementID) *op {
	current := p.root(len(p.parent) - 1)
	o, ok := p.index[id]
	if !ok {
		if len(p.block) == cap(p.block) {
			p.block = make([]op, 0, min(max(2*cap(p.block), 16), 1024))
		}
		p.block = append(p.block, op{elementID: id, part: current})
		o = &p.block[len(p.block)-1]
		p.index[id] = o
		p.ops = append(p.ops, o)
		return o
	}
	if other := p.root(o.part); other != current {
		p.parent[current] = other
		p.services[other] = append(p.services[other], p.services[current]...)
	}
	return o
}

// remove notes that the service had e.
func (p *patch) remove(e element) {
	o := p.op(e.elementID)
	if e.m.shared() {
		o.wanted--
		return
	}
	o.hasOld, o.old = true, e.value
}

// add notes that the service wants e.
func (p *patch) add(e element) {
	o := p.op(e.elementID)
	if e.m.shared() {
		o.wanted++
		return
	}
	o.hasNew, o.new = true, e.value
}

// removeObject notes that the service had o, and addObject that it wants o.
func (p *patch) removeObject(o object) { p.objectOp(o.name).old = &o }
func (p *patch) addObject(o object)    { p.objectOp(o.name).new = &o }

func (p *patch) objectOp(name string) *objectOp {
	o, ok := p.objects[name]
	if !ok {
		o = &objectOp{part: len(p.parent) - 1}
		p.objects[name] = o
	}
	return o
}

// part is a set of changes that take effect together.
type part struct {
	services []types.NamespacedName
	ops      []*op
	objects  []objectOp
}

// size returns the largest number of elements and rules that p changes.
func (p *part) size() int {
	n := len(p.ops)
	for _, o := range p.objects {
		if o.new != nil {
			n += len(o.new.rules)
		}
	}
	return n
}

// parts returns the parts of p that change anything. Objects are sorted by name.
func (p *patch) parts() []part {
	var parts []part
	index := map[int]int{} // from the number of a part to its place in parts
	partOf := func(number int) *part {
		root := p.root(number)
		i, ok := index[root]
		if !ok {
			i = len(parts)
			index[root] = i
			parts = append(parts, part{services: p.services[root]})
		}
		return &parts[i]
	}
	for _, o := range p.ops {
		if o.changes() {
			part := partOf(o.part)
			part.ops = append(part.ops, o)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.objects)) {
		if o := p.objects[name]; o.old == nil || o.new == nil || !slices.Equal(o.old.rules, o.new.rules) {
			part := partOf(o.part)
			part.objects = append(part.objects, *o)
		}
	}
	return parts
}

// changes reports whether o may change anything.
func (o *op) changes() bool {
	if o.m.shared() {
		return o.wanted != 0
	}
	return o.hasOld != o.hasNew || o.old != o.new
}
