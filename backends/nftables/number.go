// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/shrink"
	"github.com/kpng-project/kpng/nodeview"
)

// The result of one lookup is the key of the next lookup. Because nft has no syntax for
// that, a rule stores the result as the packet's priority and then loads it from there.
// Such a priority is one of these numbers, in the notation of nft:
//
//	7000:10    a list of endpoints. The last digit is 0.
//	5000:1000  a list whose endpoints have numbers, for session affinity, weights or stable
//	           hashing. The last three digits are 0.
//	5000:1001  an endpoint of the list 5000:1000
//	7f00:4     a class of lists
//
// The chain postrouting resets the priority. No number ends in ":0", because nft cannot load
// such a number.
const (
	firstNumber = 0x4000_0001
	lastNumber  = 0x7fff_ffff

	handlingMask = 0xf   // the bits of a frontend's value that are its handling
	endpointMask = 0xfff // the bits of a number that identify an endpoint of a list
)

// handling says how packets to a frontend are treated before the choice of an endpoint.
type handling uint32

const (
	// handleClusterIP masquerades packets according to the options.
	handleClusterIP handling = iota + 1
	// handleExternal masquerades all packets.
	handleExternal
	// handleLocal masquerades packets of this node, and sends packets of this node and its
	// pods to another list.
	handleLocal
)

func handlingOf(m nodeview.Masquerade) handling {
	switch m {
	case nodeview.MasqueradeAll:
		return handleExternal
	case nodeview.MasqueradeNode:
		return handleLocal
	default:
		return handleClusterIP
	}
}

// listNumber identifies a list in the table.
type listNumber struct {
	family api.Family
	number uint32
}

// numberRange has the numbers of one kind of lists.
type numberRange struct{ first, last, step uint32 }

var (
	plainLists    = numberRange{0x7000_0010, 0x77ff_fff0, 0x10}
	numberedLists = numberRange{0x5000_1000, 0x6fff_f000, 0x1000}
)

func (r *numberRange) contains(number uint32) bool {
	return r.first <= number && number <= r.last && number%r.step == 0 && number&0xffff != 0
}

func isNumbered(number uint32) bool { return number <= numberedLists.last|endpointMask }

// rangeOf returns the range of the numbers of lists. Lists whose endpoints have numbers use
// another range than the other lists.
func rangeOf(numbered bool) *numberRange {
	if numbered {
		return &numberedLists
	}
	return &plainLists
}

// use is a set of bits. Each bit is a reason why a number is in use.
type use uint8

const (
	// inTable means that the table had the list when the pass began.
	inTable use = 1 << iota
	// byService means that a service has the list, or is about to get it.
	byService
)

// numbers assigns numbers to lists. It reuses a number as late as possible, because packets
// and clients may still have it.
type numbers struct {
	// used has the numbers that cannot be assigned.
	used map[listNumber]use
	most shrink.Size // the size of the map used, see shrink.Map
	// last has the number that was assigned last, by family and range.
	last map[api.Family]map[*numberRange]uint32
}

func newNumbers() *numbers {
	n := &numbers{used: map[listNumber]use{}, last: map[api.Family]map[*numberRange]uint32{}}
	for _, family := range nft.Families {
		n.last[family] = map[*numberRange]uint32{&plainLists: plainLists.first - plainLists.step, &numberedLists: numberedLists.first - numberedLists.step}
	}
	return n
}

// found records that the table has a list with this number.
func (n *numbers) found(l listNumber) {
	n.used[l] = inTable
	r := rangeOf(isNumbered(l.number))
	n.last[l.family][r] = max(n.last[l.family][r], l.number)
}

var errNoNumber = errors.New("the table has no number left for another list of endpoints")

// assign returns a number that is not used.
func (n *numbers) assign(family api.Family, numbered bool) (uint32, error) {
	r := rangeOf(numbered)
	number := n.last[family][r]
	for range (r.last-r.first)/r.step + 1 {
		if number += r.step; number > r.last {
			number = r.first
		}
		if _, isUsed := n.used[listNumber{family, number}]; r.contains(number) && !isUsed {
			n.used[listNumber{family, number}] = byService
			n.last[family][r] = number
			return number, nil
		}
	}
	return 0, errNoNumber
}

// release records that no service has the list.
func (n *numbers) release(l listNumber) { n.clear(l, byService) }

// endPass records that the table has no lists without a service.
func (n *numbers) endPass() {
	for l := range n.used {
		n.clear(l, inTable)
	}
}

func (n *numbers) clear(l listNumber, u use) {
	if n.used[l] &^= u; n.used[l] == 0 {
		delete(n.used, l)
	}
}
