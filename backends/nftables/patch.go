// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// op is what becomes of one element.
type op struct {
	elementID
	hasOld, hasNew bool
	old, new       value
	// wanted is by how much the number of those who want the element changes, if
	// its map is shared. hasOld and hasNew follow from it when the op is applied.
	wanted int
	// looked says that hasOld and old were read from the kernel, and taken that they are
	// those that the table had when the pass began.
	looked, taken bool
	// part is the part of the patch that the op belongs to.
	part int
}

// patch is the difference that a change of services makes, element by element.
// Services between which an element goes over are one part of it: their changes
// take effect together or not at all.
type patch struct {
	ops   []op
	index map[elementID]int
	// objects are by name, which says what service they are of.
	objects map[string]*objectOp
	// services are the services of each part, and parent is where a part was
	// joined to, itself if it was not.
	services [][]types.NamespacedName
	parent   []int
}

func newPatch() *patch { return &patch{index: map[elementID]int{}, objects: map[string]*objectOp{}} }

// begin begins the part of a service: what is added and removed from now on is
// for it.
func (p *patch) begin(key types.NamespacedName) {
	p.parent = append(p.parent, len(p.parent))
	p.services = append(p.services, []types.NamespacedName{key})
}

func (p *patch) root(part int) int {
	for p.parent[part] != part {
		p.parent[part] = p.parent[p.parent[part]]
		part = p.parent[part]
	}
	return part
}

// op returns the op of an element, and makes its part one with the current one.
func (p *patch) op(id elementID) *op {
	current := p.root(len(p.parent) - 1)
	i, ok := p.index[id]
	if !ok {
		i = len(p.ops)
		p.index[id] = i
		p.ops = append(p.ops, op{elementID: id, part: current})
		return &p.ops[i]
	}
	if other := p.root(p.ops[i].part); other != current {
		p.parent[current] = other
		p.services[other] = append(p.services[other], p.services[current]...)
	}
	return &p.ops[i]
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

// add notes that the service gets e.
func (p *patch) add(e element) {
	o := p.op(e.elementID)
	if e.m.shared() {
		o.wanted++
		return
	}
	o.hasNew, o.new = true, e.value
}

// disown and own note that the service had, and gets, an object.
func (p *patch) disown(o object) { p.object(o).old = &o }
func (p *patch) own(o object)    { p.object(o).new = &o }

func (p *patch) object(o object) *objectOp {
	op, ok := p.objects[o.name]
	if !ok {
		op = &objectOp{part: len(p.parent) - 1}
		p.objects[o.name] = op
	}
	return op
}

// part is what takes effect together.
type part struct {
	services []types.NamespacedName
	ops      []op
	objects  []objectOp
}

// size is how many elements and rules p changes at most.
func (p *part) size() int {
	n := len(p.ops)
	for _, o := range p.objects {
		if o.new != nil {
			n += len(o.new.rules)
		}
	}
	return n
}

// parts returns the parts of p that change something.
func (p *patch) parts() []part {
	var parts []part
	at := map[int]int{} // where in parts a part is
	partOf := func(number int) *part {
		root := p.root(number)
		i, ok := at[root]
		if !ok {
			i = len(parts)
			at[root] = i
			parts = append(parts, part{services: p.services[root]})
		}
		return &parts[i]
	}
	for i := range p.ops {
		if o := &p.ops[i]; o.changes() {
			part := partOf(o.part)
			part.ops = append(part.ops, *o)
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

// changes reports whether o may change something.
func (o *op) changes() bool {
	if o.m.shared() {
		return o.wanted != 0
	}
	return o.hasOld != o.hasNew || o.old != o.new
}
