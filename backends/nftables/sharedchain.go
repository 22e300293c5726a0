// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// sharedChain is a chain that frontends share: those of one match and family whose
// packets are handled alike. The first of these frontends makes the chain. The number of
// chains depends on how many different numbers of endpoints there are, not on the number
// of services.
//
// The kernel validates all elements that lead to chains in each transaction that adds one
// of them. So the element of a frontend has the number of its chain, as data. A small
// map, whose elements seldom change, leads from the numbers to the chains.
type sharedChain struct {
	match  match
	family api.Family
	// fromNode: the chain is for packets that this node sends. They have passed the rules of
	// the frontend's other chain.
	fromNode bool
	// filtered: the frontend has source ranges.
	filtered   bool
	masquerade nodeview.Masquerade
	verdict    nodeview.Verdict
	// affinity: the services have session affinity, so each has chains of its own.
	affinity bool
	// endpoints is the number of endpoints if the verdict is Forward without affinity.
	endpoints int
}

// Numbers of chains and slots are in the packet's priority between one rule and the next,
// because nft has no syntax for a map that is looked up by the result of another lookup.
// They are between firstPriority and lastPriority. The chain postrouting resets the
// priority.
const (
	firstPriority = 0x7000_0001
	lastPriority  = 0x7fff_ffff
	// firstSlot is the number of slot 0. nft prints it as 7f00:1.
	firstSlot = 0x7f00_0001
)

// number returns the number of the chain. It is unique for each match, family and
// fromNode.
func (c sharedChain) number() uint32 {
	bits := uint32(c.masquerade) << 3
	switch {
	case c.verdict == nodeview.Drop:
		bits |= 1
	case c.verdict == nodeview.Reject:
		bits |= 2
	case c.affinity:
		bits |= 3
	}
	if c.filtered {
		bits |= 4
	}
	// nft does not load a number with 0 behind its colon.
	return 0x7000_0000 | bits<<20 | uint32(max(c.endpoints, 1))
}

// sharedChainOf returns the chain whose number an element has. It is not ok if the
// element has no such number, as in other maps than those of frontends and shared chains.
func sharedChainOf(id *elementID, v *value) (c sharedChain, ok bool) {
	var number uint32
	switch id.m.kind {
	case frontends, nodeFrontends:
		number = binary.NativeEndian.Uint32(v.data[:])
	case sharedChains, nodeSharedChains:
		number = binary.NativeEndian.Uint32(id.key[:])
	default:
		return c, false
	}
	fromNode := id.m.kind == nodeFrontends || id.m.kind == nodeSharedChains
	c = sharedChain{match: id.m.match, family: id.m.family, fromNode: fromNode}
	bits := number >> 20 & 0xff
	c.masquerade, c.filtered = nodeview.Masquerade(bits>>3), bits&4 != 0
	switch bits & 3 {
	case 0:
		c.endpoints = int(number & 0xfffff)
	case 1:
		c.verdict = nodeview.Drop
	case 2:
		c.verdict = nodeview.Reject
	case 3:
		c.affinity = true
	}
	return c, c.number() == number && c.masquerade <= nodeview.MasqueradeNode
}

// rejectChain is the chain of the skeleton that rejects packets.
const rejectChain = "reject-chain"

// name returns the name of the chain. If the verdict needs no other rules, that is drop
// or rejectChain.
func (c sharedChain) name() string {
	if !c.filtered && (c.fromNode || c.masquerade != nodeview.MasqueradeNode) {
		switch c.verdict {
		case nodeview.Drop:
			return drop
		case nodeview.Reject:
			return rejectChain
		}
	}
	var b strings.Builder
	if c.fromNode {
		b.WriteString("node-")
	}
	fmt.Fprint(&b, matchNames[c.match], int(c.family))
	switch {
	case c.fromNode:
	case c.masquerade == nodeview.MasqueradeAll:
		b.WriteString("-external")
	case c.masquerade == nodeview.MasqueradeNode:
		b.WriteString("-local")
	}
	if c.filtered {
		b.WriteString("-filtered")
	}
	switch {
	case c.verdict == nodeview.Drop:
		b.WriteString("-drop")
	case c.verdict == nodeview.Reject:
		b.WriteString("-reject")
	case c.affinity:
		b.WriteString("-affinity")
	default:
		fmt.Fprint(&b, "-", c.endpoints)
	}
	return b.String()
}

// hasRules reports whether the chain has rules of its own.
func (c sharedChain) hasRules() bool { return c.name() != drop && c.name() != rejectChain }

// mapOf returns the map of that kind, or of the kind for packets that this node sends,
// that the chain's frontends use.
func (c sharedChain) mapOf(kind mapKind) mapID {
	if c.fromNode {
		kind++
	}
	return mapID{kind, c.match, c.family}
}

// element returns the element that leads from the number of the chain to the chain.
func (c sharedChain) element() element {
	e := element{elementID: elementID{m: c.mapOf(sharedChains)}, value: value{chain: c.name()}}
	w := keyWriter{id: &e.elementID}
	w.priority(c.number())
	return e
}

// makeSharedChain adds messages that make a chain and its element.
func (w *wire) makeSharedChain(c sharedChain) {
	if c.hasRules() {
		w.makeChain(c.name(), c.encodedRules())
	}
	w.elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, []element{c.element()})
}

// deleteSharedChains adds messages that delete chains and their elements.
func (w *wire) deleteSharedChains(list []sharedChain) {
	var elements []element
	var names []string
	for _, c := range list {
		elements = append(elements, c.element())
		if c.hasRules() {
			names = append(names, c.name())
		}
	}
	w.elements(unix.NFT_MSG_DELSETELEM, 0, elements)
	w.deleteChains(names)
}

func (c sharedChain) encodedRules() []string { return encodeRules(c.rules()...) }

func (c sharedChain) rules() [][]expr.Any {
	var rules [][]expr.Any
	if c.filtered {
		rules = append(rules, jump(matchNames[c.match]+"-sources"))
	}
	if !c.fromNode {
		switch c.masquerade {
		case nodeview.MasqueradeIfAsked:
			rules = append(rules, jump("mark-outsiders"))
		case nodeview.MasqueradeAll:
			rules = append(rules, jump("mark-all"))
		case nodeview.MasqueradeNode:
			rules = append(rules, jump("mark-node"), jump("short-circuit"))
		}
	}
	switch {
	case c.verdict == nodeview.Drop:
		return append(rules, verdictDrop())
	case c.verdict == nodeview.Reject:
		return append(rules, goTo(rejectChain))
	case c.affinity:
		return append(rules, lookupVerdict(c.mapOf(affinityChains)), verdictDrop())
	}
	return append(rules, []expr.Any{
		&expr.Numgen{Register: reg(0), Modulus: uint32(c.endpoints), Type: unix.NFT_NG_RANDOM, Offset: firstSlot},
		setMeta(expr.MetaKeyPRIORITY),
		goTo(c.mapOf(endpoints).name())[0],
	})
}
