// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nft

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"golang.org/x/sys/unix"
)

// Families are the families of addresses. The chains of tables have the same order.
var Families = []api.Family{api.IPv4, api.IPv6}

// Hook is the place of a base chain in the path of packets. A regular chain has the zero
// Hook.
type Hook struct {
	number   uint32
	priority int32
	kind     string
	policy   uint32
}

const (
	nfDrop   = 0
	nfAccept = 1
)

// NAT returns the hook of a chain of type nat, and Filter returns the hook of a chain of
// type filter. An example of the argument number is NF_INET_PRE_ROUTING.
func NAT(number uint32, priority int32) Hook { return Hook{number, priority, "nat", nfAccept} }

// Filter is described at NAT.
func Filter(number uint32, priority int32) Hook { return Hook{number, priority, "filter", nfAccept} }

// Chain is a chain with its rules.
type Chain struct {
	Name  string
	Hook  Hook
	Rules []Rule
}

// Chains are the chains of a table. A chain comes after the chains to which it jumps.
type Chains []Chain

// Add adds a regular chain.
func (c *Chains) Add(name string, rules ...Rule) { c.AddBase(name, Hook{}, rules...) }

// AddBase adds a base chain.
func (c *Chains) AddBase(name string, h Hook, rules ...Rule) {
	*c = append(*c, Chain{name, h, rules})
}

// The names of chains that tables of several backends have.
const (
	MarkAll       = "mark-all"       // marks packets that will be masqueraded
	MarkOutsiders = "mark-outsiders" // marks packets to cluster IPs, if the options say so
	RejectChain   = "reject-chain"   // rejects packets
)

// DropLater and RejectLater are priorities of packets. A table of the backend nftables
// will drop or reject these packets after all translations. No list and no endpoint of
// that backend has such a number. The program nft prints them as 6fff:1 and 6fff:2.
const (
	DropLater   = 0x6fff_0001
	RejectLater = 0x6fff_0002
)

// AddCommon adds the chains MarkAll, MarkOutsiders and RejectChain.
func (c *Chains) AddCommon(o *backends.Options) {
	bit := o.MasqueradeMark
	c.Add(MarkAll, Mark(^bit, bit)+SetMeta(unix.NFT_META_MARK))
	c.Add(MarkOutsiders, markOutsiders(o)...)
	c.Add(RejectChain, LoadMeta(unix.NFT_META_L4PROTO)+Equal(unix.IPPROTO_TCP)+reset, Reject)
}

// MasqueradeMarked returns the rule that masquerades the packets of the chain MarkAll.
func MasqueradeMarked(o *backends.Options) Rule {
	bit := o.MasqueradeMark
	return Mark(bit, 0) + Equal(Native(bit)...) + Mark(^uint32(0), bit) + SetMeta(unix.NFT_META_MARK) + Masquerade
}

// FromPods returns parts of rules. If any of them matches a packet, the packet is from a pod
// of this node.
func FromPods(o *backends.Options) (matches []Rule) {
	for _, name := range o.PodInterfaces {
		matches = append(matches, FromInterface(name))
	}
	for _, cidr := range o.ClusterCIDRs {
		matches = append(matches, FromPrefix(cidr))
	}
	return matches
}

// markOutsiders returns the rules that mark connections from outside the pod network to
// cluster IPs. If the options define no pods of a family, the rules mark no packets of
// that family.
func markOutsiders(o *backends.Options) (rules []Rule) {
	switch {
	case o.MasqueradeAll:
		return []Rule{Jump(MarkAll)}
	case !o.MasqueradeOutsiders:
		return nil
	}
	for _, match := range FromPods(o) {
		rules = append(rules, match+Return)
	}
	if len(o.PodInterfaces) > 0 {
		return append(rules, Jump(MarkAll))
	}
	for _, family := range Families {
		if slices.ContainsFunc(o.ClusterCIDRs, func(cidr netip.Prefix) bool { return api.FamilyOf(cidr.Addr()) == family }) {
			rules = append(rules, MatchFamily(family)+Jump(MarkAll))
		}
	}
	return rules
}
