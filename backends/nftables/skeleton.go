// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/backends/internal/nftrule"
	"golang.org/x/sys/unix"
)

// The skeleton is the part of the table that does not depend on services. It consists of
// the maps and sets without their elements, and of the chains that use them.

// hook attaches a base chain to the path of packets. A regular chain has the zero hook.
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

	// The chain postrouting masquerades packets that have this bit in their mark.
	bit := o.MasqueradeMark
	add("mark-all", regular, append(nftrule.Mark(^bit, bit), nftrule.SetMeta(expr.MetaKeyMARK)))
	add("mark-node", regular, append(nftrule.StartsHere(), nftrule.Jump("mark-all")...))
	add("mark-outsiders", regular, o.markOutsiders()...)

	for _, s := range []match{matchService, matchAddress} {
		var rules [][]expr.Any
		for _, family := range families {
			rules = append(rules, fromSources(mapID{kindSources, s, family}))
		}
		add(matchNames[s]+"-sources", regular, append(rules, nftrule.Drop())...)
	}

	add(rejectChain, regular,
		[]expr.Any{nftrule.LoadMeta(expr.MetaKeyL4PROTO), nftrule.Equal(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})

	for _, m := range allMaps() {
		// A transaction may remove the slot of an endpoint after a rule has selected the slot's
		// number, and before another rule looks up the slot. Without the drop, the whole
		// connection would pass untranslated.
		switch m.kind {
		case kindSlots, kindNodeSlots:
			add(m.name(), regular, toNumber(m))
		case kindEndpoints, kindNodeEndpoints:
			add(m.name(), regular, translate(m), nftrule.Drop())
		}
	}

	// If a service has the external traffic policy Local, the rules look up packets that
	// start on this node in separate maps.
	add("node-services", regular, lookupSharedChains(kindNodeFrontends)...)
	short := [][]expr.Any{append(nftrule.StartsHere(), nftrule.GoTo("node-services")...)}
	for _, match := range o.pods().Matches() {
		short = append(short, append(match, nftrule.GoTo("node-services")...))
	}
	add("short-circuit", regular, short...)

	// A transaction may also remove a chain after a rule has selected the chain's number.
	// Without the drop, the connection would pass untranslated.
	resetPriority := append(hasPriority(), &expr.Immediate{Register: nftrule.Reg(0), Data: nftrule.Native(0)}, nftrule.SetMeta(expr.MetaKeyPRIORITY))
	rules := [][]expr.Any{resetPriority} // a program may have set the priority of its socket
	rules = append(rules, lookupSharedChains(kindFrontends)...)
	rules = append(rules, append(hasPriority(), nftrule.Drop()...))
	if !o.AcceptUnknownPorts {
		for _, family := range families {
			rule := nftrule.NewKey(family).Destination().FollowedBy(inSet(mapID{kind: kindClusterIPs, family: family}))
			rules = append(rules, append(rule, nftrule.GoTo(rejectChain)...))
		}
	}
	add("services", regular, rules...)

	// Only the first packet of a connection reaches these chains.
	add("prerouting", nat(unix.NF_INET_PRE_ROUTING, o.DNATPriority), nftrule.Jump("services"))
	add("output", nat(unix.NF_INET_LOCAL_OUT, o.DNATPriority), nftrule.Jump("services"))
	rules = [][]expr.Any{
		resetPriority,
		slices.Concat(nftrule.Mark(bit, 0), []expr.Any{nftrule.Equal(nftrule.Native(bit)...)}, nftrule.Mark(^uint32(0), bit),
			[]expr.Any{nftrule.SetMeta(expr.MetaKeyMARK), &expr.Masq{FullyRandom: true}}),
	}
	for _, s := range []match{matchService, matchAddress} {
		for _, family := range families {
			rules = append(rules, hairpin(s, family))
		}
	}
	// Before the hook postrouting, this or another proxy has translated packets to services.
	// If a packet's destination is still in a service CIDR, no service has this destination.
	// This does not apply to packets from this node to itself, which leave through lo.
	for _, cidr := range o.ServiceCIDRs {
		rules = append(rules, slices.Concat([]expr.Any{nftrule.LoadMeta(expr.MetaKeyOIFNAME), notLoopback}, nftrule.ToPrefix(cidr), nftrule.Drop()))
	}
	add("postrouting", nat(unix.NF_INET_POST_ROUTING, o.SNATPriority), rules...)
	return chains
}

// notLoopback matches if register 0 has the name of an interface other than lo.
var notLoopback = &expr.Cmp{Op: expr.CmpOpNeq, Register: nftrule.Reg(0), Data: append([]byte("lo"), make([]byte, unix.IFNAMSIZ-len("lo"))...)}

// lookupSharedChains returns one rule for each map of a kind, see lookupSharedChain.
func lookupSharedChains(kind mapKind) (rules [][]expr.Any) {
	for _, family := range families {
		for _, s := range allMatches {
			rules = append(rules, lookupSharedChain(mapID{kind, s, family}))
		}
	}
	return rules
}

func (o *Options) pods() nftrule.Pods {
	return nftrule.Pods{CIDRs: o.ClusterCIDRs, Interfaces: o.PodInterfaces}
}

// markOutsiders returns the rules that mark connections from outside the pod network to
// cluster IPs. If the options define no pods of a family, the rules mark no packets of
// that family.
func (o *Options) markOutsiders() [][]expr.Any {
	switch {
	case o.MasqueradeAll:
		return [][]expr.Any{nftrule.Jump("mark-all")}
	case !o.MasqueradeOutsiders:
		return nil
	}
	return o.pods().Outsiders(nftrule.Jump("mark-all"))
}

// fromSources returns the rule that admits packets from the source ranges in m.
func fromSources(m mapID) []expr.Any {
	return loadFrontend(nftrule.NewKey(m.family), m.match).Source().FollowedBy(inSet(m), &expr.Verdict{Kind: expr.VerdictReturn})
}

// hasPriority returns expressions that match a packet if a rule has stored the number of
// a chain, slot or endpoint as its priority.
func hasPriority() []expr.Any {
	number := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	return []expr.Any{
		nftrule.LoadMeta(expr.MetaKeyPRIORITY),
		&expr.Byteorder{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpGte, Register: nftrule.Reg(0), Data: number(firstPriority)},
		&expr.Cmp{Op: expr.CmpOpLte, Register: nftrule.Reg(0), Data: number(lastPriority)},
	}
}
