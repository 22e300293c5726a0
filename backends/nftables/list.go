// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// listKey identifies a list of endpoints within its service. Frontends of several service
// ports may share a list; then it has the protocol and port of the first of them. The Local
// list and the Cluster list of a port are always two lists, even if their endpoints are
// equal for a time.
type listKey struct {
	family   api.Family
	local    bool
	protocol api.Protocol
	port     int32 // 0 for all-ports services
}

// list is a list of endpoints in the table.
type list struct {
	listKey
	number uint32
	class  class
	// shortcut is the number of the list for packets of this node, or 0 if it is the same.
	shortcut uint32
	// lastNumber is the number of the last endpoint that was added, if the list has session
	// affinity. It has only the bits of endpointMask.
	lastNumber uint16
	// slots has a record for each endpoint, in the order of the slots. Because there may be
	// a million endpoints, records are in one string.
	slots string
}

// A record has the address and port of an endpoint, and two octets with the number of the
// endpoint, which is 0 without session affinity, and a bit that is set if the endpoint is on
// this node.
type record string

const localBit = 1 << 15

func recordLen(family api.Family) int { return addrLen(family) + 4 }

func appendRecord(b []byte, t *nodeview.Target) []byte {
	b = append(b, t.Addr.Unmap().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, uint16(t.Port))
	var flags uint16
	if t.Local {
		flags = localBit
	}
	return binary.NativeEndian.AppendUint16(b, flags)
}

// id returns the part of a record that identifies the endpoint within its list.
func (r record) id() record { return r[:len(r)-2] }

func (r record) addr() netip.Addr { return addrOf([]byte(r[:len(r)-4])) }

func (r record) port() int32 { return int32(binary.BigEndian.Uint16([]byte(r[len(r)-4:]))) }

func (r record) flags() uint16 { return binary.NativeEndian.Uint16([]byte(r[len(r)-2:])) }

func (r record) isLocal() bool { return r.flags()&localBit != 0 }

func (r record) number() uint32 { return uint32(r.flags() &^ localBit) }

// value returns the data of an element that leads to the endpoint, or zeros for the empty
// record.
func (r record) value() value {
	if r == "" {
		return value{}
	}
	return endpointValue(r.addr(), r.port())
}

func (l *list) len() int { return len(l.slots) / recordLen(l.family) }

// record returns the record of a slot, counted from 0, or "" if there is none.
func (l *list) record(slot int) record {
	n := recordLen(l.family)
	if (slot+1)*n > len(l.slots) {
		return ""
	}
	return record(l.slots[slot*n : (slot+1)*n])
}

// arrange sets the slots of l so that it has the endpoints targets. Endpoints of before keep
// their slots if possible, and always their numbers. If endpoints were removed, their slots
// get endpoints of slots that are removed, and then new endpoints.
func (l *list) arrange(before *list, targets []nodeview.Target) {
	affine := isAffine(l.number)
	n := recordLen(l.family)
	out := make([]byte, 0, n*len(targets))
	for i := range targets {
		out = appendRecord(out, &targets[i])
	}
	recordOf := func(target int) []byte { return out[target*n : (target+1)*n] }
	setNumber := func(target int, number uint32) {
		flags := recordOf(target)[n-2:]
		binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)&localBit|uint16(number))
	}
	l.lastNumber = before.lastNumber
	if before.len() == 0 {
		for i := range targets {
			if affine {
				setNumber(i, l.nextNumber(nil))
			}
		}
		l.slots = string(out)
		return
	}

	index := make(map[record]int, len(targets))
	for i := range targets {
		index[record(recordOf(i)).id()] = i
	}
	kept := make([]bool, len(targets))
	slots := make([]byte, n*len(targets))
	free := make([]bool, len(targets))
	used := map[uint32]bool{}
	var moved []int // targets that need a slot
	for slot := range max(before.len(), len(targets)) {
		r := before.record(slot)
		i, isKept := -1, false
		if r != "" {
			i, isKept = index[r.id()]
			isKept = isKept && !kept[i] // another program may have repeated an endpoint
		}
		if slot < len(targets) {
			free[slot] = !isKept
		}
		if !isKept {
			continue
		}
		kept[i] = true
		setNumber(i, r.number())
		used[r.number()] = affine
		if slot < len(targets) {
			copy(slots[slot*n:], recordOf(i))
		} else {
			moved = append(moved, i)
		}
	}
	for i := range targets {
		if kept[i] {
			continue
		}
		if affine {
			setNumber(i, l.nextNumber(used))
		}
		moved = append(moved, i)
	}
	for slot, isFree := range free {
		if isFree {
			copy(slots[slot*n:], recordOf(moved[0]))
			moved = moved[1:]
		}
	}
	l.slots = string(slots)
}

// nextNumber returns a number for a new endpoint. It reuses a number only after all others.
// The list must have fewer than maxAffineEndpoints endpoints.
func (l *list) nextNumber(used map[uint32]bool) uint32 {
	for {
		l.lastNumber = l.lastNumber%maxAffineEndpoints + 1
		if number := uint32(l.lastNumber); !used[number] {
			return number
		}
	}
}

// The IDs of the elements of a list.

func (l *list) id() elementID {
	e := elementID{m: mapID{kind: kindLists, family: l.family}}
	w := keyWriter{id: &e}
	w.number(l.number)
	return e
}

// classValue returns the value of the element of the list, or zeros for the zero list.
func (l *list) classValue() value {
	if l.number == 0 {
		return value{}
	}
	return numberValue(l.class.number())
}

func (l *list) shortcutID() elementID {
	e := l.id()
	e.m.kind = kindShortcuts
	return e
}

// slotID returns the ID of the element for a slot, which is counted from 0.
func (l *list) slotID(slot int) elementID {
	e := elementID{m: mapID{kind: kindSlots, family: l.family}}
	w := keyWriter{id: &e}
	w.number(l.number)
	if !isAffine(l.number) {
		e.m = mapID{kindEndpoints, l.match(), l.family}
		w.protocolUnless(l.port == 0, l.protocol)
	}
	w.number(uint32(slot) + 1)
	return e
}

// slotValue returns the value of the element for a slot with this record, or zeros for the
// empty record.
func (l *list) slotValue(r record) value {
	switch {
	case r == "":
		return value{}
	case isAffine(l.number):
		return numberValue(l.number | r.number())
	default:
		return r.value()
	}
}

// numberID returns the ID of the element for the number of an endpoint.
func (l *list) numberID(number uint32) elementID {
	e := elementID{m: mapID{kindNumbers, l.match(), l.family}}
	w := keyWriter{id: &e}
	w.number(l.number | number)
	w.protocolUnless(l.port == 0, l.protocol)
	return e
}

func (l *list) match() match {
	if l.port == 0 {
		return matchAddress
	}
	return matchService
}

// hairpin returns the element that masquerades connections from an endpoint of this node to
// itself.
func (l *list) hairpin(r record) element {
	e := element{elementID: elementID{m: mapID{kindHairpins, l.match(), l.family}}}
	w := keyWriter{id: &e.elementID}
	w.addr(r.addr())
	w.addr(r.addr())
	if l.port != 0 {
		w.protocol(l.protocol)
		w.port(r.port())
	}
	return e
}
