// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"math"

	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
)

// The skeleton is the part of the table that does not depend on services. It consists of
// the maps and sets without their elements, and of the chains that use them.

// The hook priorities of base chains. The kernel first calls the chains of other types with
// priorities below -100. Then it calls all chains of type nat in the order of their
// priorities. It stops when a chain has translated the packet.
const (
	// latePriority is after the nat chains of other programs.
	latePriority = math.MaxInt32
	// filterPriority is after all translations of destinations, also after IPVS.
	filterPriority = 0
)

// skeletonChains returns the chains of the skeleton. The argument seed is the seed of the
// hash of clients.
func (o *Options) skeletonChains(seed uint32) (chains nft.Chains) {
	chains.AddCommon(&o.Options)
	chains.Add("mark-node", nft.StartsHere()+nft.Jump(nft.MarkAll))

	// A program may have given its socket a priority that means a refusal here. The
	// source-range chains run before the nat chains of every instance, so they reset this
	// priority.
	restricted := []nft.Rule{priorityBetween(nft.DropLater, nft.RejectLater) + nft.SetPriority(0)}
	for _, family := range nft.Families {
		for _, s := range allMatches {
			m := mapID{kindRestricted, s, family}.name()
			rule := sourcelists.Restrict(family, frontendKey(family, s), m)
			if s == matchNodePort {
				// A frontend of another service may have the address and the port of a node
				// port. The rules use that frontend, not the node port, and that frontend
				// may have no source ranges.
				name := chainName("restricted-nodeport", family)
				other := frontendKey(family, matchService).Then(nft.Lookup(mapID{kindFrontends, matchService, family}.name()) + nft.Return)
				chains.Add(name, other, rule)
				rule = frontendKey(family, s).Then(nft.Lookup(m) + nft.GoTo(name))
			}
			restricted = append(restricted, rule)
		}
	}
	sourcelists.AddChains(&chains, restricted...)

	// A program with a later nat chain may translate packets that this table would refuse. So
	// these chains only record the refusal. The last chain, "refusals", carries it out.
	// If there are several instances, one of them carries out all refusals.
	chains.Add(dropLater, nft.SetPriority(nft.DropLater))
	chains.Add(rejectLater, nft.SetPriority(nft.RejectLater))
	refusals := []nft.Rule{
		priorityIs(nft.DropLater) + nft.Drop,
		priorityIs(nft.RejectLater) + nft.GoTo(nft.RejectChain),
	}
	if !o.AcceptUnknownPorts {
		for _, family := range nft.Families {
			clusterIPs := mapID{kind: kindClusterIPs, family: family}.name()
			refusals = append(refusals, nft.NewKey(family).Destination().Then(nft.InSet(clusterIPs)+nft.GoTo(nft.RejectChain)))
		}
	}
	chains.Add("refusals", refusals...)

	// If a service has the external traffic policy Local, packets that start on this node use
	// another list.
	var toShortcut []nft.Rule
	for _, family := range nft.Families {
		toShortcut = append(toShortcut, fromPriority(family, ^uint32(handlingMask), mapID{kind: kindShortcuts, family: family}))
	}
	chains.Add("shortcut", toShortcut...)
	short := []nft.Rule{nft.StartsHere() + nft.GoTo("shortcut")}
	for _, match := range nft.FromPods(&o.Options) {
		short = append(short, match+nft.GoTo("shortcut"))
	}
	chains.Add("short-circuit", short...)

	// The chain "services" finds the frontend of a packet. Then a chain frontend4 or
	// frontend6 looks up the class of the frontend's list, and continues in the chain of
	// that class. The chain of the class needs the number of the list again, to find the
	// list's endpoints. A packet can only store one number. So the chain of the class
	// calls the chain find4 or find6, which looks up the frontend again.
	var services []nft.Rule
	for _, family := range nft.Families {
		classes := mapID{kind: kindClasses, family: family}
		chains.Add(frontendChain(family),
			handled(handleClusterIP, nft.MarkOutsiders),
			handled(handleExternal, nft.MarkAll),
			handled(handleLocal, "mark-node"),
			handled(handleLocal, "short-circuit"),
			fromPriority(family, ^uint32(handlingMask), mapID{kind: kindLists, family: family}),
			number(family).Then(nft.LookupVerdict(classes.name())),
			// A transaction may remove a list or an endpoint after a rule has looked up a map that
			// leads there. Without the drop, the whole connection would pass untranslated.
			nft.Drop)
		services = append(services, lookupFrontends(family, nft.GoTo(frontendChain(family)))...)
		chains.Add(lookupChain(family), lookupFrontends(family, nft.Return)...)
		chains.Add(findChain(family),
			nft.Jump(lookupChain(family)),
			handled(handleLocal, "short-circuit"),
			loadPriority(^uint32(handlingMask))+nft.SetMeta(unix.NFT_META_PRIORITY))
		chains.Add(clientChain(family), clientKey(family, seed).Then(toPriority(clientsMap(family).Name)))
		for _, s := range []match{matchService, matchAddress} {
			chains.Add(numberChain(s == matchAddress, family), translateNumber(mapID{kindNumbers, s, family}))
		}
	}
	chains.Add("services", services...)

	// Only the first packet of a connection reaches these chains. The packet with which the
	// kernel refuses a connection also reaches the chains of hook output.
	chains.AddBase("prerouting", nft.NAT(unix.NF_INET_PRE_ROUTING, o.DNATPriority), nft.Jump("services"))
	chains.AddBase("output", nft.NAT(unix.NF_INET_LOCAL_OUT, o.DNATPriority), nft.IgnoreReplies(), nft.Jump("services"))
	chains.AddBase("late-prerouting", nft.NAT(unix.NF_INET_PRE_ROUTING, latePriority), nft.Jump("refusals"))
	chains.AddBase("late-output", nft.NAT(unix.NF_INET_LOCAL_OUT, latePriority), nft.IgnoreReplies(), nft.Jump("refusals"))
	rules := []nft.Rule{priorityBetween(firstNumber, lastNumber) + nft.SetPriority(0), nft.MasqueradeMarked(&o.Options)}
	for _, s := range []match{matchService, matchAddress} {
		for _, family := range nft.Families {
			rules = append(rules, hairpin(s, family))
		}
	}
	chains.AddBase("postrouting", nft.NAT(unix.NF_INET_POST_ROUTING, o.SNATPriority), rules...)

	// Before these chains, this or another proxy has translated packets to services. If a
	// packet's destination is still in a service CIDR, no service has this destination. This
	// does not apply to packets from this node to itself, which leave through lo.
	var forward, output []nft.Rule
	if o.DropInvalid {
		forward = append(forward, nft.InState(nft.StateInvalid)+nft.Drop)
	}
	if len(o.ServiceCIDRs) > 0 || o.FollowServiceCIDRs != nil {
		chains.Add(serviceCIDRsChain, o.serviceCIDRRules()...)
		rule := nft.InState(nft.StateNew) + nft.Jump(serviceCIDRsChain)
		forward = append(forward, rule)
		output = append(output, nft.LoadMeta(unix.NFT_META_OIFNAME)+nft.NotEqual(nft.InterfaceName("lo")...)+rule)
	}
	if len(forward) > 0 {
		chains.AddBase("filter-forward", nft.Filter(unix.NF_INET_FORWARD, filterPriority), forward...)
	}
	if len(output) > 0 {
		chains.AddBase("filter-output", nft.Filter(unix.NF_INET_LOCAL_OUT, filterPriority), output...)
	}
	return chains
}

// serviceCIDRsChain drops packets to addresses in the service CIDRs.
const serviceCIDRsChain = "service-cidrs"

func (o *Options) serviceCIDRRules() (rules []nft.Rule) {
	for _, cidr := range o.ServiceCIDRs {
		rules = append(rules, nft.ToPrefix(cidr)+nft.Drop)
	}
	return rules
}

// priorityIs matches packets with a priority.
func priorityIs(number uint32) nft.Rule {
	return nft.LoadMeta(unix.NFT_META_PRIORITY) + nft.Equal(nft.Native(number)...)
}

// priorityBetween matches packets with a priority in a range.
func priorityBetween(first, last uint32) nft.Rule {
	return nft.LoadMeta(unix.NFT_META_PRIORITY) + nft.Between(first, last)
}
