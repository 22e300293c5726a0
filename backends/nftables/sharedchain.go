// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/nftrule"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// sharedChain is a chain for all frontends with the same match, family and treatment of
// packets. The chain is created together with the first of these frontends. Frontends
// with the same number of endpoints can share a chain, so the number of chains does not
// grow with the number of services.
//
// When a transaction adds an element that jumps to a chain, the kernel validates all
// elements that jump to chains. So the element of a frontend contains only the number of
// its chain. A second map, which is small and seldom changes, maps the numbers to the
// chains.
type sharedChain struct {
	match  match
	family api.Family
	// fromNode reports that the chain is only for packets that start on this node. Another
	// shared chain of the frontend gets all packets first, and sends these packets on.
	fromNode   bool
	masquerade nodeview.Masquerade
	verdict    nodeview.Verdict
	// endpoints is the number of endpoints if the verdict is Forward. Otherwise it is 0.
	endpoints int
	// timeout is how long the kernel remembers the endpoint of a client, or 0 if the services
	// have no session affinity.
	timeout time.Duration
}

// The result of one lookup is the key of the next lookup. Because nft has no syntax for
// that, a rule stores the result as the packet's priority and then loads it from there.
// Such a priority is the number of a chain, slot or endpoint, between firstPriority and
// lastPriority. The chain postrouting resets the priority.
const (
	firstPriority = 0x7000_0001
	lastPriority  = 0x7fff_ffff
	// firstSlot is the number of the first slot. nft prints it as 7f00:1.
	firstSlot = 0x7f00_0001
)

// number returns the number of the chain. It is unique among the chains with the same
// match, family and fromNode.
func (c sharedChain) number() uint32 {
	bits := uint32(c.masquerade) << 2
	// nft cannot load a number that it prints with ":0" at the end.
	low := uint32(max(c.endpoints, 1))
	switch {
	case c.verdict == nodeview.Drop:
		bits |= 1
	case c.verdict == nodeview.Reject:
		bits |= 2
	case c.timeout > 0:
		bits |= 3
		low |= timeoutBits(c.timeout) << 12
	}
	return 0x7000_0000 | bits<<23 | low
}

// sharedChainOf returns the chain whose number is in an element. Only elements of
// frontends and of shared chains contain a number. For other elements, ok is false.
func sharedChainOf(id *elementID, v *value) (c sharedChain, ok bool) {
	var number uint32
	switch id.m.kind {
	case kindFrontends, kindNodeFrontends:
		number = binary.NativeEndian.Uint32(v.data[:])
	case kindSharedChains, kindNodeSharedChains:
		number = binary.NativeEndian.Uint32(id.key[:])
	default:
		return c, false
	}
	fromNode := id.m.kind == kindNodeFrontends || id.m.kind == kindNodeSharedChains
	c = sharedChain{match: id.m.match, family: id.m.family, fromNode: fromNode}
	bits := number >> 23 & 0xf
	c.masquerade = nodeview.Masquerade(bits >> 2)
	switch bits & 3 {
	case 0:
		c.endpoints = int(number & 0xfffff)
	case 1:
		c.verdict = nodeview.Drop
	case 2:
		c.verdict = nodeview.Reject
	case 3:
		c.endpoints = int(number & maxAffineEndpoints)
		c.timeout = timeoutOf(number >> 12 & 0x7ff)
	}
	return c, c.number() == number && c.masquerade <= nodeview.MasqueradeNode
}

// The chains of the skeleton that refuse packets.
const (
	dropLater   = "drop-later"   // makes the chain refusals drop the packet
	rejectLater = "reject-later" // makes the chain refusals reject the packet
	rejectChain = "reject-chain" // rejects the packet
)

// The priorities with which the chains dropLater and rejectLater mark packets. They are not
// between firstPriority and lastPriority, so the chains of other instances, which come
// between services and refusals, do not reset them. nft prints them as 6fff:1 and 6fff:2.
const (
	dropLaterPriority   = 0x6fff_0001
	rejectLaterPriority = 0x6fff_0002
)

// name returns the name of the chain. If the chain would only drop or reject packets, the
// name is dropLater or rejectLater.
func (c sharedChain) name() string {
	if c.fromNode || c.masquerade != nodeview.MasqueradeNode {
		switch c.verdict {
		case nodeview.Drop:
			return dropLater
		case nodeview.Reject:
			return rejectLater
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
	switch {
	case c.verdict == nodeview.Drop:
		b.WriteString("-drop")
	case c.verdict == nodeview.Reject:
		b.WriteString("-reject")
	case c.timeout > 0:
		fmt.Fprintf(&b, "-%d-affinity-%.0fs", c.endpoints, c.timeout.Seconds())
	default:
		fmt.Fprint(&b, "-", c.endpoints)
	}
	return b.String()
}

// hasRules reports whether the name of c is neither dropLater nor rejectLater.
func (c sharedChain) hasRules() bool { return c.name() != dropLater && c.name() != rejectLater }

// mapOf returns the map of the given kind with the chain's match and family. If fromNode
// is true, it returns the map of kind+1, which is for packets that start on this node.
func (c sharedChain) mapOf(kind mapKind) mapID {
	if c.fromNode {
		kind++
	}
	return mapID{kind, c.match, c.family}
}

// element returns the element that maps the chain's number to the chain.
func (c sharedChain) element() element {
	e := element{elementID: elementID{m: c.mapOf(kindSharedChains)}, value: value{chain: c.name()}}
	w := keyWriter{id: &e.elementID}
	w.priority(c.number())
	return e
}

// makeSharedChain adds messages that create a chain and its element.
func (w *wire) makeSharedChain(c sharedChain) {
	if c.hasRules() {
		w.makeChain(c.name(), c.encodedRules())
	}
	w.elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, []element{c.element()})
}

// deleteSharedChains adds messages that delete these chains and their elements.
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
	w.deleteChainsAndSets(names, nil)
}

func (c sharedChain) encodedRules() []string { return encodeRules(c.rules()...) }

func (c sharedChain) rules() [][]expr.Any {
	var rules [][]expr.Any
	if !c.fromNode {
		switch c.masquerade {
		case nodeview.MasqueradeIfConfigured:
			rules = append(rules, nftrule.Jump("mark-outsiders"))
		case nodeview.MasqueradeAll:
			rules = append(rules, nftrule.Jump("mark-all"))
		case nodeview.MasqueradeNode:
			rules = append(rules, nftrule.Jump("mark-node"), nftrule.Jump("short-circuit"))
		}
	}
	switch {
	case c.verdict == nodeview.Drop:
		return append(rules, nftrule.GoTo(dropLater))
	case c.verdict == nodeview.Reject:
		return append(rules, nftrule.GoTo(rejectLater))
	case c.timeout > 0:
		return append(rules, c.affinityRules()...)
	}
	return append(rules, append(c.randomSlot(), nftrule.GoTo(c.mapOf(kindEndpoints).name())...))
}

// randomSlot returns expressions that select a slot at random.
func (c sharedChain) randomSlot() []expr.Any {
	return []expr.Any{
		&expr.Numgen{Register: nftrule.Reg(0), Modulus: uint32(c.endpoints), Type: unix.NFT_NG_RANDOM, Offset: firstSlot},
		nftrule.SetMeta(expr.MetaKeyPRIORITY),
	}
}
