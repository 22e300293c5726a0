// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/internal/nftrule"
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

func filter(number uint32, priority int32) hook { return hook{number, priority, "filter", nfAccept} }

// The hook priorities of base chains. The kernel calls all chains of type nat one after
// another, in the order of their priorities, when it has called the other chains with
// priorities below -100. It stops when a chain has translated the packet.
const (
	// sourcesPriority is before all chains of type nat, as in kube-proxy.
	sourcesPriority = -110
	// latePriority is after the nat chains of other programs.
	latePriority = math.MaxInt32
	// filterPriority is after all translations of destinations, also those of IPVS.
	filterPriority = 0
)

type chain struct {
	name string
	hook
	rules []string
}

// skeletonChains returns the chains of the skeleton. A chain comes after the chains to
// which it jumps. The argument seed is the seed of the hash of clients.
func (o *Options) skeletonChains(seed uint32) []chain {
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

	// Source ranges must not depend on the nat chains of other programs. If one of them
	// translates a packet, the kernel skips the later ones. So chains of type filter apply
	// source ranges, before any translation. A program may have set a priority that means a
	// refusal for its socket. The same chains remove it, because they are before the chains of
	// type nat of all instances.
	restricted := [][]expr.Any{append(priorityFrom(dropLaterPriority, rejectLaterPriority), setPriority(0)...)}
	for _, family := range families {
		sources, rules := fromSources(family)
		add(sources, regular, rules...)
		for _, s := range []match{matchService, matchAddress} {
			restricted = append(restricted, loadFrontend(nftrule.NewKey(family), s).FollowedBy(
				lookup(mapID{kindRestricted, s, family}), nftrule.SetMeta(expr.MetaKeyPRIORITY), nftrule.GoTo(sources)[0]))
		}
	}
	add("restricted", regular, restricted...)
	isNew := append(nftrule.InState(nftrule.StateNew), nftrule.Jump("restricted")...)
	add("sources-prerouting", filter(unix.NF_INET_PRE_ROUTING, sourcesPriority), isNew)
	add("sources-output", filter(unix.NF_INET_LOCAL_OUT, sourcesPriority), isNew)

	add(rejectChain, regular,
		[]expr.Any{nftrule.LoadMeta(expr.MetaKeyL4PROTO), nftrule.Equal(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})

	// A program with a later nat chain may translate packets that this table would refuse. So
	// these chains only record the refusal. The chain refusals, which is last, carries it out.
	// If there are several instances, one of them carries out all refusals.
	add(dropLater, regular, setPriority(dropLaterPriority))
	add(rejectLater, regular, setPriority(rejectLaterPriority))
	refusals := [][]expr.Any{
		slices.Concat(priorityIs(dropLaterPriority), nftrule.Drop()),
		slices.Concat(priorityIs(rejectLaterPriority), nftrule.GoTo(rejectChain)),
	}
	if !o.AcceptUnknownPorts {
		for _, family := range families {
			rule := nftrule.NewKey(family).Destination().FollowedBy(inSet(mapID{kind: kindClusterIPs, family: family}))
			refusals = append(refusals, append(rule, nftrule.GoTo(rejectChain)...))
		}
	}
	add("refusals", regular, refusals...)

	// If a service has the external traffic policy Local, packets that start on this node use
	// another list.
	var toShortcut [][]expr.Any
	for _, family := range families {
		toShortcut = append(toShortcut, fromPriority(family, ^uint32(handlingMask), mapID{kind: kindShortcuts, family: family}))
	}
	add("shortcut", regular, toShortcut...)
	short := [][]expr.Any{append(nftrule.StartsHere(), nftrule.GoTo("shortcut")...)}
	for _, match := range o.pods().Matches() {
		short = append(short, append(match, nftrule.GoTo("shortcut")...))
	}
	add("short-circuit", regular, short...)

	// The chain services finds the frontend of a packet. Then a chain frontend4 or frontend6
	// looks up the class of the frontend's list, and continues in the chain of that class. This
	// chain needs the list again, to find its endpoints. A packet can only store one number. So
	// the chain of the class calls the chain find4 or find6, which looks up the frontend again.
	var services [][]expr.Any
	for _, family := range families {
		classes := mapID{kind: kindClasses, family: family}
		add(frontendChain(family), regular,
			handled(handleClusterIP, "mark-outsiders"),
			handled(handleExternal, "mark-all"),
			handled(handleLocal, "mark-node"),
			handled(handleLocal, "short-circuit"),
			fromPriority(family, ^uint32(handlingMask), mapID{kind: kindLists, family: family}),
			[]expr.Any{nftrule.LoadMeta(expr.MetaKeyPRIORITY), vmap(classes)},
			// A transaction may remove a list or an endpoint after a rule has looked up a map that
			// leads there. Without the drop, the whole connection would pass untranslated.
			nftrule.Drop())
		services = append(services, lookupFrontends(family, nftrule.GoTo(frontendChain(family))...)...)
		add(lookupChain(family), regular, lookupFrontends(family, &expr.Verdict{Kind: expr.VerdictReturn})...)
		add(findChain(family), regular,
			nftrule.Jump(lookupChain(family)),
			handled(handleLocal, "short-circuit"),
			append(loadPriority(^uint32(handlingMask)), nftrule.SetMeta(expr.MetaKeyPRIORITY)))
		add(clientChain(family), regular, append(clientKey(family, seed),
			&expr.Lookup{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), IsDestRegSet: true, SetName: clientsMap(family).name},
			nftrule.SetMeta(expr.MetaKeyPRIORITY)))
		for _, isAddress := range []bool{false, true} {
			m := mapID{kindNumbers, matchService, family}
			if isAddress {
				m.match = matchAddress
			}
			add(numberChain(isAddress, family), regular, translateNumber(m))
		}
	}
	add("services", regular, services...)

	// Only the first packet of a connection reaches these chains. The packet with which the
	// kernel refuses a connection also reaches the chains of hook output.
	add("prerouting", nat(unix.NF_INET_PRE_ROUTING, o.DNATPriority), nftrule.Jump("services"))
	add("output", nat(unix.NF_INET_LOCAL_OUT, o.DNATPriority), nftrule.IgnoreReplies(), nftrule.Jump("services"))
	add("late-prerouting", nat(unix.NF_INET_PRE_ROUTING, latePriority), nftrule.Jump("refusals"))
	add("late-output", nat(unix.NF_INET_LOCAL_OUT, latePriority), nftrule.IgnoreReplies(), nftrule.Jump("refusals"))
	rules := [][]expr.Any{
		append(priorityFrom(firstNumber, lastNumber), setPriority(0)...),
		slices.Concat(nftrule.Mark(bit, 0), []expr.Any{nftrule.Equal(nftrule.Native(bit)...)}, nftrule.Mark(^uint32(0), bit),
			[]expr.Any{nftrule.SetMeta(expr.MetaKeyMARK), &expr.Masq{FullyRandom: true}}),
	}
	for _, s := range []match{matchService, matchAddress} {
		for _, family := range families {
			rules = append(rules, hairpin(s, family))
		}
	}
	add("postrouting", nat(unix.NF_INET_POST_ROUTING, o.SNATPriority), rules...)

	// Before these chains, this or another proxy has translated packets to services. If a
	// packet's destination is still in a service CIDR, no service has this destination. This
	// does not apply to packets from this node to itself, which leave through lo.
	var forward, output [][]expr.Any
	if o.DropInvalid {
		forward = append(forward, append(nftrule.InState(nftrule.StateInvalid), nftrule.Drop()...))
	}
	for _, cidr := range o.ServiceCIDRs {
		rule := slices.Concat(nftrule.InState(nftrule.StateNew), nftrule.ToPrefix(cidr), nftrule.Drop())
		forward = append(forward, rule)
		output = append(output, slices.Concat([]expr.Any{nftrule.LoadMeta(expr.MetaKeyOIFNAME), notLoopback}, rule))
	}
	if len(forward) > 0 {
		add("filter-forward", filter(unix.NF_INET_FORWARD, filterPriority), forward...)
	}
	if len(output) > 0 {
		add("filter-output", filter(unix.NF_INET_LOCAL_OUT, filterPriority), output...)
	}
	return chains
}

// notLoopback matches if register 0 has the name of an interface other than lo.
var notLoopback = &expr.Cmp{Op: expr.CmpOpNeq, Register: nftrule.Reg(0), Data: append([]byte("lo"), make([]byte, unix.IFNAMSIZ-len("lo"))...)}

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

func setPriority(number uint32) []expr.Any {
	return []expr.Any{&expr.Immediate{Register: nftrule.Reg(0), Data: nftrule.Native(number)}, nftrule.SetMeta(expr.MetaKeyPRIORITY)}
}

func priorityIs(number uint32) []expr.Any {
	return []expr.Any{nftrule.LoadMeta(expr.MetaKeyPRIORITY), nftrule.Equal(nftrule.Native(number)...)}
}

// priorityFrom returns expressions that match packets with a priority in a range.
func priorityFrom(first, last uint32) []expr.Any {
	number := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	return []expr.Any{
		nftrule.LoadMeta(expr.MetaKeyPRIORITY),
		&expr.Byteorder{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpGte, Register: nftrule.Reg(0), Data: number(first)},
		&expr.Cmp{Op: expr.CmpOpLte, Register: nftrule.Reg(0), Data: number(last)},
	}
}
