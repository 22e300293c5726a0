// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// name identifies an object that has a number: a list of endpoints, a part of such a list,
// a service with session affinity, or a list of source ranges of a service.
type name struct {
	service types.NamespacedName
	list    nodeview.ListID
	// port distinguishes service ports with the same list, see [servicePlan.listName].
	port uint32
	// part is 0 for a whole list, wholeService for a service, and firstRanges or a lower
	// number for a list of source ranges.
	part int
}

const (
	wholeService = -1
	firstRanges  = -2
)

// seed returns the seed of the group with the number of the name. A backend finds the
// numbers of its predecessor by their seeds.
func (n name) seed() uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d/%d/%d", n.service, n.list, n.port, n.part))
	return binary.BigEndian.Uint64(sum[:])
}

// numbers allocates numbers, which are IDs of groups. So two names never have the same
// number. A name that has a number in the switch keeps it. While a group in the switch
// has a number, no other name gets this number, because flows may still use the group.
type numbers struct {
	of    map[name]uint32
	names map[uint32]named
	// recorded has the IDs, by seed, of the groups that have been in the switch since the
	// pass began.
	recorded map[uint64]uint32
	// The numbers in free are unused, and below next. end is the first number that does not
	// belong to this instance.
	free      []uint32
	next, end uint32
	// allocated has the numbers that the last plan allocated. exhausted is true if a name got
	// no number.
	allocated []uint32
	exhausted bool
}

type named struct {
	name
	seed uint64
}

// maxGroups is the share of the numbers that one service may have.
const maxGroups = groupCount / 8

var errNumbers = errors.New("the instance has no more IDs for groups")

// newNumbers returns the numbers that are recorded by groups in the switch.
func (d *dataplane) newNumbers() numbers {
	n := numbers{
		of: map[name]uint32{}, names: map[uint32]named{}, recorded: make(map[uint64]uint32, len(d.groups)),
		next: d.opts.firstGroup(), end: d.opts.firstGroup() + d.opts.groupCount,
	}
	for id, g := range d.groups {
		if id < n.end {
			n.recorded[g.seed] = id
			n.next = max(n.next, id+1)
		}
	}
	// The last free number is used first. It is the lowest one. So next becomes low again
	// after a time with many groups, or with groups of a version that hashed their IDs.
	for id := n.next; id > d.opts.firstGroup(); {
		id--
		if _, exists := d.groups[id]; !exists {
			n.free = append(n.free, id)
		}
	}
	return n
}

// numberOf returns the number of a name.
func (d *dataplane) numberOf(of name) uint32 {
	n := &d.numbers
	if id, ok := n.of[of]; ok {
		return id
	}
	seed := of.seed()
	id, ok := n.recorded[seed]
	if _, taken := n.names[id]; !ok || taken {
		switch last := len(n.free) - 1; {
		case last >= 0:
			id, n.free = n.free[last], n.free[:last]
		case n.next < n.end:
			id = n.next
			n.next++
		default:
			n.exhausted = true
			return 0
		}
	}
	n.of[of], n.names[id] = id, named{of, seed}
	n.allocated = append(n.allocated, id)
	return id
}

// seed returns the seed of a number.
func (n *numbers) seed(id uint32) uint64 { return n.names[id].seed }

// release ends the use of a number by its name. The number stays in use while a group has
// it.
func (n *numbers) release(id uint32, exists bool) {
	delete(n.of, n.names[id].name)
	delete(n.names, id)
	if !exists {
		n.free = append(n.free, id)
	}
}

// deleted records that the group with a number and a seed was deleted.
func (n *numbers) deleted(id uint32, seed uint64) {
	if n.recorded[seed] == id {
		delete(n.recorded, seed)
	}
	n.release(id, id >= n.end) // earlier versions hashed their IDs
}
