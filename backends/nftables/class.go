// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"fmt"
	"math/bits"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// class is a class of lists that share a chain. All lists that agree in these fields are in
// one class, so the number of chains does not grow with the number of services.
//
// When a transaction adds an element that jumps to a chain, the kernel validates all
// elements that jump to chains. So the element of a list contains only the number of its
// class. The map of classes is small and seldom changes.
type class struct {
	family api.Family
	// isAddress is true for lists of all-ports services, which keep the port of packets.
	isAddress bool
	verdict   nodeview.Verdict
	// size is the binary logarithm of the maximum number of slots of a list. A list of the
	// class has more than half of these slots. With stable hashing, it has all of them. If
	// the verdict is not Forward, the size is 0.
	size uint8
	// numbered is true if the endpoints of the lists have numbers. Then algorithm says how a
	// slot is chosen.
	numbered  bool
	algorithm api.Algorithm
	// timeout is how long the kernel remembers the endpoint of a client, see timeoutOf, or 0
	// if the lists have no session affinity.
	timeout uint16
	// choosesSlot is true for a chain that several classes with numbers use to choose a
	// slot. These classes have the same family, size and algorithm. The shared chain has no
	// number.
	choosesSlot bool
}

// sizeOf returns the size of the class for lists with n endpoints.
func sizeOf(n int) uint8 { return uint8(bits.Len(uint(max(n, 1) - 1))) }

// maxEndpoints limits the number of endpoints with traffic in a list.
const maxEndpoints = 1 << 20

// The bits of the number of a class.
const (
	verdictClass  = 0x7d00_0000
	addressClass  = 0x7e00_0000
	serviceClass  = 0x7f00_0000
	numberedClass = 0x7800_0000
	addressBit    = 0x0100_0000
	algorithmBit  = 0x0001_0000 // the first of two bits
	sizeBits      = 5
	sizeMask      = 1<<sizeBits - 1
)

// number returns the number of the class. It is unique in the family.
func (c class) number() uint32 {
	low := uint32(c.size) + 1
	switch {
	case c.verdict != nodeview.Forward:
		return verdictClass | uint32(c.verdict)
	case c.numbered:
		number := numberedClass | uint32(c.algorithm)*algorithmBit | uint32(c.timeout)<<sizeBits | low
		if c.isAddress {
			number |= addressBit
		}
		return number
	case c.isAddress:
		return addressClass | low
	default:
		return serviceClass | low
	}
}

// classOf returns the class with this number. If there is no such class, ok is false.
func classOf(family api.Family, number uint32) (c class, ok bool) {
	c = class{family: family, size: uint8(number&sizeMask) - 1}
	switch number &^ 0xffff {
	case verdictClass:
		c.verdict, c.size = nodeview.Verdict(number&0xff), 0
	case addressClass:
		c.isAddress = true
	case serviceClass:
	default:
		c.numbered, c.isAddress = true, number&addressBit != 0
		c.algorithm, c.timeout = api.Algorithm(number/algorithmBit&3), uint16(number&0xffff>>sizeBits)
	}
	return c, c.number() == number && c.verdict <= nodeview.Drop && 1<<c.size <= maxEndpoints && c.algorithm <= api.HashConnection
}

// classOfElement returns the class that an element contains. The class is the value of an
// element of kindLists, and the key of an element of kindClasses.
func classOfElement(id *elementID, v *value) (c class, ok bool) {
	switch id.m.kind {
	case kindLists:
		return classOf(id.m.family, v.number())
	case kindClasses:
		return classOf(id.m.family, id.number())
	}
	return c, false
}

// The chains of the skeleton that refuse packets.
const (
	dropLater   = "drop-later"   // makes the chain refusals drop the packet
	rejectLater = "reject-later" // makes the chain refusals reject the packet
)

// name returns the name of the chain.
func (c class) name() string {
	switch c.verdict {
	case nodeview.Drop:
		return dropLater
	case nodeview.Reject:
		return rejectLater
	}
	kind, prefix, suffix := "list", "", ""
	switch {
	case c.choosesSlot:
		kind = "slot"
	case c.timeout == 0 && c.numbered:
		kind = "weighted"
		if c.algorithm != api.Random {
			kind = "hash"
		}
	case c.timeout > 0:
		kind, suffix = "affinity", fmt.Sprintf("-%.0fs", timeoutOf(uint32(c.timeout)).Seconds())
	}
	switch c.algorithm {
	case api.HashClient:
		kind += "-client"
	case api.HashConnection:
		kind += "-connection"
	}
	if c.isAddress {
		prefix = "address-"
	}
	return fmt.Sprintf("%s%s%d-%d%s", prefix, kind, c.family, 1<<c.size, suffix)
}

// compare orders classes by name.
func (c class) compare(o class) int { return cmp.Compare(c.name(), o.name()) }

// isSkeletonChain reports whether the chain is part of the skeleton.
func (c class) isSkeletonChain() bool { return c.verdict != nodeview.Forward }

// needs returns the class whose chain must exist before the chain of c.
func (c class) needs() (slot class, ok bool) {
	return class{family: c.family, size: c.size, algorithm: c.algorithm, choosesSlot: true}, c.numbered
}

// element returns the element that maps the number of the class to the chain.
func (c class) element() element {
	e := element{elementID: elementID{m: mapID{kind: kindClasses, family: c.family}}, value: value{text: c.name()}}
	w := keyWriter{id: &e.elementID}
	w.number(c.number())
	return e
}

// makeClass adds messages that create a chain and its element.
func makeClass(w *nft.Writer, c class, seed uint32) {
	if !c.isSkeletonChain() {
		w.MakeChain(c.chain(seed))
	}
	if !c.choosesSlot {
		e := c.element()
		writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, e.ref())
	}
}

// deleteClasses adds messages that delete these chains and their elements.
func deleteClasses(w *nft.Writer, list []class) {
	var elements []elementRef
	var names []string
	for _, c := range list {
		if !c.choosesSlot {
			e := c.element()
			elements = append(elements, e.ref())
		}
		if !c.isSkeletonChain() {
			names = append(names, c.name())
		}
	}
	writeElements(w, unix.NFT_MSG_DELSETELEM, 0, elements...)
	w.DeleteChainsAndSets(names, nil)
}

// chain returns the chain of the class. The argument seed is the seed of the hash of clients.
func (c class) chain(seed uint32) nft.Chain {
	switch {
	case c.choosesSlot && c.algorithm != api.Random:
		return nft.Chain{Name: c.name(), Rules: []nft.Rule{c.hashSlot()}}
	case c.choosesSlot:
		return nft.Chain{Name: c.name(), Rules: c.choose(c.chooseSlot)}
	case c.timeout == 0 && c.numbered:
		slot, _ := c.needs()
		return nft.Chain{Name: c.name(), Rules: []nft.Rule{
			nft.Jump(findChain(c.family)), nft.Jump(slot.name()), nft.Jump(numberChain(c.isAddress, c.family)), nft.Drop,
		}}
	case c.timeout > 0:
		return nft.Chain{Name: c.name(), Rules: c.affinityRules(seed)}
	}
	rules := append([]nft.Rule{nft.Jump(findChain(c.family))}, c.choose(c.translate)...)
	return nft.Chain{Name: c.name(), Rules: append(rules, nft.Drop)}
}

// maxChoices limits the attempts to choose a slot at random. Each attempt fails with a
// probability of less than one half.
const maxChoices = 8

// choose returns rules that choose a slot of a list with equal probability. The function
// rule returns a rule that chooses one of the first n slots. This rule does nothing if the
// list does not have the chosen slot. A list has more than half of the slots that its
// class allows. So after maxChoices rules, the last rule chooses one of the slots in the
// first half, which exist. The last rule is needed for fewer than one in 256 connections.
func (c class) choose(rule func(n uint32) nft.Rule) (rules []nft.Rule) {
	choices := maxChoices
	if c.size < 2 {
		choices = 1 // the first choice cannot fail
	}
	for range choices {
		rules = append(rules, rule(1<<c.size))
	}
	if c.size > 0 {
		rules = append(rules, rule(1<<c.size/2))
	}
	return rules
}

// translate returns a rule that translates the destination of a packet to the endpoint in
// a random slot.
func (c class) translate(n uint32) nft.Rule {
	m, key := mapID{kindEndpoints, matchService, c.family}, number(c.family)
	if c.isAddress {
		m.match = matchAddress
	} else {
		key.Meta(unix.NFT_META_L4PROTO)
	}
	return key.Random(n).Then(translate(m))
}

// chooseSlot returns a rule that replaces the list by the number of the endpoint in a random
// slot.
func (c class) chooseSlot(n uint32) nft.Rule {
	return number(c.family).Random(n).Then(toPriority(mapID{kind: kindSlots, family: c.family}.name()) + nft.Return)
}

// hashSlot returns a rule that replaces the list by the number of the endpoint in the slot
// of the client.
func (c class) hashSlot() nft.Rule {
	key := number(c.family).StableHash(c.algorithm == api.HashConnection, 1<<c.size, stableSeed)
	return key.Then(toPriority(mapID{kind: kindSlots, family: c.family}.name()) + nft.Return)
}
