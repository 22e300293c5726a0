// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// The skeleton is the part of the table that does not depend on services. It consists of
// the maps and sets without their elements, and of the chains that use them.

// hook attaches a base chain to the path of packets. Other chains have the zero value.
type hook struct {
	number   uint32
	priority int32
	kind     string
	policy   uint32
}

func nat(number uint32, priority int32) hook { return hook{number, priority, "nat", nfAccept} }

type chain struct {
	name string
	hook
	rules []string
}

// skeletonChains returns the chains of the skeleton. A chain comes after the chains to
// which it jumps.
func (o *Options) skeletonChains() []chain {
	var chains []chain
	add := func(name string, h hook, rules ...[]expr.Any) {
		chains = append(chains, chain{name, h, encodeRules(rules...)})
	}
	regular := hook{}

	// Packets with the mark are masqueraded at hook postrouting.
	bit := o.MasqueradeMark
	add("mark-all", regular, append(mark(^bit, bit), setMeta(expr.MetaKeyMARK)))
	add("mark-node", regular, append(startsHere(), jump("mark-all")...))
	add("mark-outsiders", regular, o.markOutsiders()...)

	for _, s := range []match{matchService, matchAddress} {
		var rules [][]expr.Any
		for _, family := range families {
			rules = append(rules, fromSources(mapID{sources, s, family}))
		}
		add(matchNames[s]+"-sources", regular, append(rules, verdictDrop())...)
	}

	add(rejectChain, regular,
		[]expr.Any{loadMeta(expr.MetaKeyL4PROTO), equal(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})

	for _, m := range allMaps() {
		if m.kind == endpoints || m.kind == nodeEndpoints {
			// Between the selection and the lookup of a slot, a transaction may remove the slot.
			// Without this drop, the whole connection would then stay untranslated.
			add(m.name(), regular, translate(m), verdictDrop())
		}
	}

	// With external traffic policy Local, packets that this node sends use maps of their
	// own.
	add("node-services", regular, lookupSharedChains(nodeFrontends)...)
	short := [][]expr.Any{append(startsHere(), goTo("node-services")...)}
	for _, match := range o.podMatches() {
		short = append(short, append(match, goTo("node-services")...))
	}
	add("short-circuit", regular, short...)

	// If a packet still has the number of a chain as priority here, a transaction has just
	// removed that chain.
	rules := append(lookupSharedChains(frontends), append(hasPriority(), verdictDrop()...))
	if !o.AcceptUnknownPorts {
		for _, family := range families {
			rule := newKeyRule(family).destination().followedBy(inSet(mapID{kind: clusterIPs, family: family}))
			rules = append(rules, append(rule, goTo(rejectChain)...))
		}
	}
	add("services", regular, rules...)

	// Chains of type nat get only the first packet of each connection.
	add("prerouting", nat(unix.NF_INET_PRE_ROUTING, o.DNATPriority), jump("services"))
	add("output", nat(unix.NF_INET_LOCAL_OUT, o.DNATPriority), jump("services"))
	rules = [][]expr.Any{
		append(hasPriority(), &expr.Immediate{Register: reg(0), Data: native(0)}, setMeta(expr.MetaKeyPRIORITY)),
		slices.Concat(mark(bit, 0), []expr.Any{equal(native(bit)...)}, mark(^uint32(0), bit),
			[]expr.Any{setMeta(expr.MetaKeyMARK), &expr.Masq{FullyRandom: true}}),
	}
	for _, s := range []match{matchService, matchAddress} {
		for _, family := range families {
			rules = append(rules, hairpin(s, family))
		}
	}
	// Before this hook, this proxy or another one has translated cluster IPs of services. So
	// only packets to other cluster IPs match. Packets to this node do not pass the hook.
	for _, cidr := range o.ServiceCIDRs {
		rules = append(rules, append(toPrefix(cidr), verdictDrop()...))
	}
	add("postrouting", nat(unix.NF_INET_POST_ROUTING, o.SNATPriority), rules...)
	return chains
}

// lookupSharedChains returns rules that look up packets in all maps of a kind.
func lookupSharedChains(kind mapKind) (rules [][]expr.Any) {
	for _, family := range families {
		for _, s := range allMatches {
			rules = append(rules, lookupSharedChain(mapID{kind, s, family}))
		}
	}
	return rules
}

// startsHere returns expressions that match packets that this node sends.
func startsHere() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagSADDR: true},
		equal(native(unix.RTN_LOCAL)...),
	}
}

// podMatches returns lists of expressions. A packet is from a pod of this node if it
// matches at least one of the lists.
func (o *Options) podMatches() (matches [][]expr.Any) {
	for _, name := range o.PodInterfaces {
		matches = append(matches, fromInterface(name))
	}
	for _, cidr := range o.ClusterCIDRs {
		matches = append(matches, fromPrefix(cidr))
	}
	return matches
}

// markOutsiders returns the rules that mark connections to cluster IPs from outside the
// pod network. If the options define no pods for an IP family, the rules mark no packets
// of that family.
func (o *Options) markOutsiders() (rules [][]expr.Any) {
	switch {
	case o.MasqueradeAll:
		return [][]expr.Any{jump("mark-all")}
	case !o.MasqueradeOutsiders:
		return nil
	}
	for _, match := range o.podMatches() {
		rules = append(rules, append(match, &expr.Verdict{Kind: expr.VerdictReturn}))
	}
	if len(o.PodInterfaces) > 0 {
		return append(rules, jump("mark-all"))
	}
	for _, family := range families {
		if slices.ContainsFunc(o.ClusterCIDRs, func(cidr netip.Prefix) bool { return api.FamilyOf(cidr.Addr()) == family }) {
			rules = append(rules, append(matchFamily(family), jump("mark-all")...))
		}
	}
	return rules
}

// fromSources returns the rule that admits packets from the source ranges in m.
func fromSources(m mapID) []expr.Any {
	return newKeyRule(m.family).frontend(m.match).source().followedBy(inSet(m), &expr.Verdict{Kind: expr.VerdictReturn})
}

// hasPriority returns expressions that match packets whose priority is the number of a
// chain or slot.
func hasPriority() []expr.Any {
	number := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	return []expr.Any{
		loadMeta(expr.MetaKeyPRIORITY),
		&expr.Byteorder{SourceRegister: reg(0), DestRegister: reg(0), Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpGte, Register: reg(0), Data: number(firstPriority)},
		&expr.Cmp{Op: expr.CmpOpLte, Register: reg(0), Data: number(lastPriority)},
	}
}
