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

// class is all that a frontend's chain has to know. Frontends of one class share
// a chain, which is made with the first of them. How many there are depends on how
// many numbers of endpoints occur, not on how many services there are.
//
// The kernel validates all elements that lead to chains in each transaction that adds one
// of them. So a frontend has the number of its class, as data, and the numbers lead to
// chains: few elements, which seldom change.
type sharedChain struct {
	match  match
	family api.Family
	// here says that it is for packets that start on this node, which have
	// been through the rules of the frontend's other chain.
	fromNode bool
	// filtered: only from some sources.
	filtered   bool
	masquerade nodeview.Masquerade
	verdict    nodeview.Verdict
	// affinity: clients keep their endpoints, so the service has chains of its own.
	affinity bool
	// endpoints is their number, if the verdict is Forward and there is no affinity.
	endpoints int
}

// Numbers of classes and slots are carried in the packet's priority, from one rule to the
// next: nft has no words for a map looked up by the result of another. These are between
// firstPriority and lastPriority. The postrouting chain takes them off.
const (
	firstPriority = 0x7000_0001
	lastPriority  = 0x7fff_ffff
	// firstSlot is the number of slot 0. nft prints it as 7f00:1.
	firstSlot = 0x7f00_0001
)

// number returns the number of the class, which is unique among those that the same map
// leads to.
func (c sharedChain) number() uint32 {
	kind := uint32(c.masquerade) << 3
	switch {
	case c.verdict == nodeview.Drop:
		kind |= 1
	case c.verdict == nodeview.Reject:
		kind |= 2
	case c.affinity:
		kind |= 3
	}
	if c.filtered {
		kind |= 4
	}
	// nft does not load a number with 0 behind its colon.
	return 0x7000_0000 | kind<<20 | uint32(max(c.endpoints, 1))
}

// sharedChainOf returns the class whose number an element has, and false if there is none, as in
// maps other than those of frontends and classes.
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
	c = sharedChain{match: id.m.match, family: id.m.family, fromNode: id.m.kind == nodeFrontends || id.m.kind == nodeSharedChains}
	kind := number >> 20 & 0xff
	c.masquerade, c.filtered = nodeview.Masquerade(kind>>3), kind&4 != 0
	switch kind & 3 {
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

// chain returns what a frontend of the class leads to: a chain of this name, or
// a verdict that needs no chain of its own.
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

// rejectChain is the chain of the skeleton that rejects.
const rejectChain = "reject-chain"

// hasRules reports whether the class has a chain of its own.
func (c sharedChain) hasRules() bool { return c.name() != drop && c.name() != rejectChain }

// mapOf returns the map of the class's match and family with that role, or with the role
// behind it if the class is one of packets that start on this node.
func (c sharedChain) mapOf(r mapKind) mapID {
	if c.fromNode {
		r++
	}
	return mapID{r, c.match, c.family}
}

// element returns the element that leads from the number of the class to its chain.
func (c sharedChain) element() element {
	e := element{elementID: elementID{m: c.mapOf(sharedChains)}, value: value{chain: c.name()}}
	w := keyWriter{id: &e.elementID}
	w.priority(c.number())
	return e
}

// makeSharedChain adds messages that make a class, and deleteSharedChains those that delete some.
func (w *wire) makeSharedChain(c sharedChain) {
	if c.hasRules() {
		w.makeChain(c.name(), c.rules())
	}
	w.allElements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, []element{c.element()})
}

func (w *wire) deleteSharedChains(list []sharedChain) {
	var elements []element
	var chains []string
	for _, c := range list {
		elements = append(elements, c.element())
		if c.hasRules() {
			chains = append(chains, c.name())
		}
	}
	w.allElements(unix.NFT_MSG_DELSETELEM, 0, elements)
	w.deleteChains(chains)
}

// rules returns the rules of the class's chain, encoded.
func (c sharedChain) rules() []string { return encodeRules(c.expressions()...) }

func (c sharedChain) expressions() [][]expr.Any {
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
