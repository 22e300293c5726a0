// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"encoding/binary"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/nodeview"
)

// In a list with numbers, a slot has the number of an endpoint. An endpoint may have
// several slots, according to its weight or to the table of stable hashing.

// maxHashSlots limits the slots of all lists with stable hashing. A service may use a
// quarter of the slots that other services leave free.
const maxHashSlots = 1 << 23

// hashSlots returns the number of slots of the list if it has stable hashing.
func (l *list) hashSlots() int {
	if l.class.algorithm == api.Random {
		return 0
	}
	return len(l.table) / 2
}

func hashSlotsOf(lists []list) (n int) {
	for i := range lists {
		n += lists[i].hashSlots()
	}
	return n
}

// stableSeed is the seed of the hash of clients for stable hashing. It is the same on all
// nodes.
const stableSeed = 0x6b706e67

func weightOf(t *nodeview.Target) uint32 { return uint32(cmp.Or(t.Weight, api.DefaultWeight)) }

// hasWeights reports whether endpoints have different weights.
func hasWeights(targets []nodeview.Target) bool {
	return slices.ContainsFunc(targets, func(t nodeview.Target) bool { return weightOf(&t) != weightOf(&targets[0]) })
}

// minWeightedSlots is the smallest limit of the slots of a list with weights.
const minWeightedSlots = 4096

// weightedSlots returns the number of slots of each endpoint. It divides the weights by
// their greatest common divisor. If the list would then have more than minWeightedSlots
// slots and more than 16 slots per endpoint, weightedSlots rounds the weights to multiples
// of a power of two. Each endpoint has at least one slot.
func weightedSlots(targets []nodeview.Target) []int {
	var unit uint32
	for i := range targets {
		a, b := unit, weightOf(&targets[i])
		for b > 0 {
			a, b = b, a%b
		}
		unit = a
	}
	slots := make([]int, len(targets))
	for power := uint32(1); ; power *= 2 {
		sum := 0
		for i := range targets {
			slots[i] = int(max(1, (weightOf(&targets[i])+unit/2)/unit))
			sum += slots[i]
		}
		if sum <= max(minWeightedSlots, 16*len(targets)) {
			return slots
		}
		unit = 2 * power
	}
}

// arrangeSlots sets l.table so that the endpoints have slots by their weights or by stable
// hashing. The field slots of l has the records of targets, possibly in another order.
// The argument before is the previous list. Its endpoints keep their slots if possible.
func (l *list) arrangeSlots(before *list, targets []nodeview.Target) {
	l.table = ""
	if len(targets) == 0 || l.class.algorithm == api.Random && !hasWeights(targets) {
		return
	}
	byRecord := make(map[record]*nodeview.Target, len(targets))
	for i := range targets {
		byRecord[record(appendRecord(nil, &targets[i])).id()] = &targets[i]
	}
	sorted := make([]nodeview.Target, l.len()) // in the order of the records
	for i := range sorted {
		sorted[i] = *byRecord[l.record(i).id()]
	}
	if l.class.algorithm != api.Random {
		all := make([]maglev.Endpoint, len(sorted))
		for i := range sorted {
			all[i] = maglev.Endpoint{Key: sorted[i].AddrPort().String(), Weight: uint16(weightOf(&sorted[i]))}
		}
		var table []byte
		for _, i := range maglev.Table(all) {
			table = appendNumber(table, l.record(int(i)).number())
		}
		l.table = string(table)
		return
	}
	rest, n := make(map[uint32]int, len(sorted)), 0
	for i, count := range weightedSlots(sorted) {
		rest[l.record(i).number()] = count
		n += count
	}
	l.table = string(l.fillSlots(before, n, rest))
}

// fillSlots returns a table with n slots. The argument rest maps the number of each
// endpoint to its number of slots.
func (l *list) fillSlots(before *list, n int, rest map[uint32]int) []byte {
	table := make([]byte, 2*n)
	var free []int
	for slot := range n {
		number := before.slotNumber(slot)
		if rest[number] == 0 {
			free = append(free, slot)
			continue
		}
		rest[number]--
		binary.NativeEndian.PutUint16(table[2*slot:], uint16(number))
	}
	// Endpoints take turns, so that their shares of the first half of the slots are about
	// their shares of all slots.
	for len(free) > 0 {
		for i := range l.len() {
			if number := l.record(i).number(); rest[number] > 0 {
				rest[number]--
				binary.NativeEndian.PutUint16(table[2*free[0]:], uint16(number))
				free = free[1:]
			}
		}
	}
	return table
}

func appendNumber(b []byte, number uint32) []byte {
	return binary.NativeEndian.AppendUint16(b, uint16(number))
}

// slotNumber returns the number of the endpoint in a slot of a list with numbers, or 0 if
// the list has no such slot.
func (l *list) slotNumber(slot int) uint32 {
	switch {
	case l.table == "":
		if r := l.record(slot); r != "" {
			return r.number()
		}
	case 2*slot < len(l.table):
		return uint32(binary.NativeEndian.Uint16([]byte(l.table[2*slot : 2*slot+2])))
	}
	return 0
}

// slotCount returns the number of slots of a list with numbers.
func (l *list) slotCount() int {
	if l.table == "" {
		return l.len()
	}
	return len(l.table) / 2
}
