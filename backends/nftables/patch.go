// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// op is a change of one element.
type op struct {
	elementID
	hasOld, hasNew bool
	old, new       value
	// For an element of a shared map, wanted is the change in the number of services that
	// need the element. state.resolve uses this change to set hasOld and hasNew.
	wanted int32
	// checked is true if hasOld and old were read from the kernel after it refused the op.
	checked bool
	// claimed is true if the value old is from a snapshot of the pass, see pass.claim.
	claimed bool
	// applied is true if the kernel has applied the op.
	applied bool
	// part is the number of the part to which the op belongs.
	part int
}

// patch is the difference between the elements of the old views and of the new views. It
// has a part for each service. If an element moves from one service to another, the parts
// of these services are joined, so that both changes take effect together or not at all.
type patch struct {
	ops   []*op
	block []op // the next ops use the free capacity of this slice
	index map[elementID]*op
	// services lists the services of each part.
	services [][]types.NamespacedName
	// parent has, for each part, the part to which it was joined. A part that was not joined
	// is its own parent.
	parent []int
	// errors has the errors of parts that cannot be programmed.
	errors map[int]error
}

func newPatch() *patch { return &patch{index: map[elementID]*op{}, errors: map[int]error{}} }

// beginPart begins a part for a service. The following changes belong to that part.
func (p *patch) beginPart(key types.NamespacedName) {
	p.parent = append(p.parent, len(p.parent))
	p.services = append(p.services, []types.NamespacedName{key})
}

// root returns the part that contains the given part after all joins.
func (p *patch) root(part int) int {
	for p.parent[part] != part {
		p.parent[part] = p.parent[p.parent[part]]
		part = p.parent[part]
	}
	return part
}

// fail records that the current service cannot be programmed.
func (p *patch) fail(err error) { p.errors[len(p.parent)-1] = err }

// The method op returns the op of an element. If another part has the op, the current
// part joins that part.
func (p *patch) op(id elementID) *op {
	o, ok := p.index[id]
	if !ok {
		o = p.own(op{elementID: id})
		p.index[id] = o
		return o
	}
	current := p.root(len(p.parent) - 1)
	if other := p.root(o.part); other != current {
		p.parent[current] = other
		p.services[other] = append(p.services[other], p.services[current]...)
	}
	return o
}

// own adds an op to the current part. The element must have no other op.
func (p *patch) own(o op) *op {
	if len(p.block) == cap(p.block) {
		p.block = make([]op, 0, min(max(2*cap(p.block), 16), 1024))
	}
	o.part = p.root(len(p.parent) - 1)
	p.block = append(p.block, o)
	added := &p.block[len(p.block)-1]
	p.ops = append(p.ops, added)
	return added
}

// The method remove records that the current service had the element e.
func (p *patch) remove(e element) {
	o := p.op(e.elementID)
	if e.m.shared() {
		o.wanted--
		return
	}
	o.hasOld, o.old = true, e.value
}

// The method add records that the current service needs the element e.
func (p *patch) add(e element) {
	o := p.op(e.elementID)
	if e.m.shared() {
		o.wanted++
		return
	}
	o.hasNew, o.new = true, e.value
}

// part is a set of changes that take effect together.
type part struct {
	services []types.NamespacedName
	ops      []*op
}

// parts returns the parts of p that change something. If a part cannot be programmed, it
// adds the part's services to the argument failed.
func (p *patch) parts(failed *sink.Failed) []part {
	excluded := map[int]bool{}
	for i, err := range p.errors {
		root := p.root(i)
		excluded[root] = true
		for _, key := range p.services[root] {
			failed.Add(key, err)
		}
	}
	var parts []part
	index := map[int]int{} // maps the number of a part to its index in parts
	for _, o := range p.ops {
		root := p.root(o.part)
		if !o.mayChange() || excluded[root] {
			continue
		}
		i, ok := index[root]
		if !ok {
			i = len(parts)
			index[root] = i
			parts = append(parts, part{services: p.services[root]})
		}
		parts[i].ops = append(parts[i].ops, o)
	}
	return parts
}

// mayChange reports whether o may change the element.
func (o *op) mayChange() bool {
	if o.m.shared() {
		return o.wanted != 0
	}
	return o.hasOld != o.hasNew || o.old != o.new
}

// split divides a part into parts of at most n ops. If they are applied in order, packets
// find endpoints at all times: lists are complete before frontends lead to them, and are
// removed when no frontend leads to them. A frontend and its source ranges change together.
func (p *part) split(n int) (parts []part) {
	slices.SortStableFunc(p.ops, func(a, b *op) int {
		return cmp.Or(cmp.Compare(a.stage(), b.stage()), a.compareFrontends(b))
	})
	for rest := p.ops; len(rest) > 0; {
		end := min(n, len(rest))
		if end > 1 && end < len(rest) && rest[end].m.kind == kindRestricted && rest[end].key == rest[end-1].key {
			end--
		}
		parts = append(parts, part{p.services, rest[:end:end]})
		rest = rest[end:]
	}
	return parts
}

// stage returns the position of o in the order of the parts that split returns.
func (o *op) stage() int {
	switch {
	case o.m.kind == kindHairpins && o.wanted > 0:
		return 0
	case o.m.kind == kindHairpins:
		return 3
	case !o.m.belongsToList():
		return 2
	case o.hasOld && !o.hasNew:
		return 3
	case o.hasOld:
		return 1 // after the new endpoints of a list that grows, before the removed ones of a list that shrinks
	default:
		return 0
	}
}

// compareFrontends orders the frontends of each map, so that each frontend precedes its
// element of kindRestricted. It does not order other ops.
func (o *op) compareFrontends(other *op) int {
	isFrontend := func(o *op) bool { return o.m.kind <= kindRestricted }
	switch a, b := isFrontend(o), isFrontend(other); {
	case a && b:
		return cmp.Or(cmp.Compare(o.m.match, other.m.match), cmp.Compare(o.m.family, other.m.family),
			bytes.Compare(o.key[:], other.key[:]), cmp.Compare(o.m.kind, other.m.kind))
	case a:
		return -1
	case b:
		return 1
	default:
		return 0
	}
}

// undone returns a part that undoes the changes of p.
func (p *part) undone() part {
	undo := part{services: p.services}
	for _, o := range p.ops {
		undo.ops = append(undo.ops, &op{elementID: o.elementID, hasOld: o.hasNew, hasNew: o.hasOld, old: o.new, new: o.old, wanted: -o.wanted})
	}
	return undo
}
