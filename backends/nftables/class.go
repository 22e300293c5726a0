// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
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
type class struct {
	scope  scope
	family api.Family
	// here says that it is for packets that start on this node, which have
	// been through the rules of the frontend's other chain.
	here bool
	// filtered: only from some sources.
	filtered   bool
	masquerade nodeview.Masquerade
	verdict    nodeview.Verdict
	// endpoints is their number, if the verdict is Forward.
	endpoints int
	// list is the chain that chooses among the endpoints, where clients keep
	// theirs (session affinity); otherwise it is empty.
	list string
}

// chain returns what a frontend of the class leads to: a chain of this name, or
// a verdict that needs no chain of its own.
func (c class) chain() string {
	if !c.filtered && (c.here || c.masquerade != nodeview.MasqueradeNode) {
		switch c.verdict {
		case nodeview.Drop:
			return drop
		case nodeview.Reject:
			return rejectChain
		}
	}
	var b strings.Builder
	if c.here {
		b.WriteString("here-")
	}
	fmt.Fprint(&b, scopeNames[c.scope], int(c.family))
	switch {
	case c.here:
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
	case c.list != "":
		b.WriteString("/" + c.list)
	default:
		fmt.Fprint(&b, "-", c.endpoints)
	}
	return b.String()
}

// rejectChain is the chain of the skeleton that rejects.
const rejectChain = "refuse"

// rules returns the rules of the class's chain, encoded.
func (c class) rules() []string { return encodeRules(c.expressions()...) }

func (c class) expressions() [][]expr.Any {
	var rules [][]expr.Any
	if c.filtered {
		rules = append(rules, jump(map[scope]string{service: "service-sources", address: "address-sources"}[c.scope]))
	}
	if !c.here {
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
	case c.list != "":
		return append(rules, goTo(c.list))
	}
	// A slot may be missing when its number was drawn before a transaction and is looked up
	// after it. Such a packet must not pass as it is: the whole connection would.
	return append(rules, c.balance(), verdictDrop())
}

// balance returns the rule that sends a new connection to one of the endpoints,
// each as likely as the others. In nft's words, of a service with ten:
//
//	dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 10 map @service-endpoints4
func (c class) balance() []expr.Any {
	m := mapID{endpoints, c.scope, c.family}
	if c.here {
		m.role = hereEndpoints
	}
	offset := uint32(16)
	if c.family == api.IPv6 {
		offset = 24
	}
	rule := matchFamily(c.family)
	// The key is put together in registers of four octets each.
	register := uint32(unix.NFT_REG32_00)
	if c.scope != nodePort {
		rule = append(rule, &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(m.addrLen())})
		register += uint32(m.addrLen() / 4)
	}
	if c.scope != address {
		rule = append(rule,
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register},
			&expr.Payload{DestRegister: register + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
		register += 2
	}
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(c.family)), RegAddrMin: 1}
	if c.scope != address {
		nat.RegProtoMin = uint32(unix.NFT_REG32_00 + m.addrLen()/4)
	}
	return append(rule,
		&expr.Numgen{Register: register, Modulus: uint32(c.endpoints), Type: unix.NFT_NG_RANDOM},
		&expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: m.name()},
		nat)
}

func nfproto(family api.Family) byte {
	if family == api.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

func matchFamily(family api.Family) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{nfproto(family)}},
	}
}

func verdictDrop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}
