// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

// frontendKey loads those fields of a packet that form the key of a frontend. For node
// ports, it first checks that the address has node ports.
func frontendKey(family api.Family, s match) *nft.Key {
	k := nft.NewKey(family)
	if s == matchNodePort {
		admitted := k.Destination().Then(nft.InSet(mapID{kind: kindNodePortAddresses, family: family}.name()))
		k = nft.KeyAfter(family, admitted)
	} else {
		k.Destination()
	}
	if s != matchAddress {
		k.ProtocolAndPort()
	}
	return k
}

// number builds a rule that begins with the number in the packet's priority. The rule does
// not check the family of the packet.
func number(family api.Family) *nft.Key {
	return nft.KeyAfter(family, "").Meta(unix.NFT_META_PRIORITY)
}

// loadPriority loads those bits of the packet's priority that are set in mask.
func loadPriority(mask uint32) nft.Rule {
	return nft.LoadMeta(unix.NFT_META_PRIORITY) + nft.And(mask)
}

// toPriority replaces the loaded key by its value in the map m, and sets the packet's
// priority to the value.
func toPriority(m string) nft.Rule { return nft.Lookup(m) + nft.SetMeta(unix.NFT_META_PRIORITY) }

// handled returns a rule that sends packets of frontends with the given handling to a
// chain. The packet's priority has the value from the frontend's element.
func handled(h handling, chain string) nft.Rule {
	return loadPriority(handlingMask) + nft.Equal(nft.Native(uint32(h))...) + nft.Jump(chain)
}

// lookupFrontends returns the rules that look up the frontend of a packet. The value of the
// frontend becomes the packet's priority, and the verdict applies.
func lookupFrontends(family api.Family, verdict nft.Rule) (rules []nft.Rule) {
	for _, s := range allMatches {
		rules = append(rules, frontendKey(family, s).Then(toPriority(mapID{kindFrontends, s, family}.name())+verdict))
	}
	return rules
}

// fromPriority returns a rule that replaces the packet's priority by its value in m.
func fromPriority(family api.Family, mask uint32, m mapID) nft.Rule {
	return nft.MatchFamily(family) + loadPriority(mask) + toPriority(m.name())
}

// translate returns the end of a rule that translates the destination of a packet to the
// endpoint for the loaded key. For all-ports services, the packet keeps
// its port.
func translate(m mapID) nft.Rule {
	port := 0
	if m.match != matchAddress {
		port = nft.AddrLen(m.family) / 4
	}
	return nft.Lookup(m.name()) + nft.DNATTo(m.family, 0, port)
}

// translateNumber returns the rule that translates the destination of a packet to the
// endpoint with the selected number.
func translateNumber(m mapID) nft.Rule {
	key := number(m.family)
	if m.match != matchAddress {
		key.Meta(unix.NFT_META_L4PROTO)
	}
	return key.Then(translate(m))
}

// hairpin returns the rule that masquerades connections of endpoints to themselves.
func hairpin(s match, family api.Family) nft.Rule {
	key := nft.KeyAfter(family, nft.IsTranslated()+nft.MatchFamily(family)).Source().Destination()
	if s != matchAddress {
		key.ProtocolAndPort()
	}
	return key.Then(nft.InSet(mapID{kindHairpins, s, family}.name()) + nft.Masquerade)
}

// The names of chains of the skeleton.

// frontendChain returns the name of the chain for packets whose frontend was found.
func frontendChain(family api.Family) string { return chainName("frontend", family) }

// findChain returns the name of the chain that sets a packet's priority to its list.
func findChain(family api.Family) string { return chainName("find", family) }

// lookupChain returns the name of the chain that sets a packet's priority to the value of
// its frontend.
func lookupChain(family api.Family) string { return chainName("lookup", family) }

// clientChain returns the name of the chain that replaces the list by the number of the
// client's endpoint, if the client is known.
func clientChain(family api.Family) string { return chainName("client", family) }

// numberChain returns the name of the chain that translates packets to the endpoint with the
// selected number.
func numberChain(isAddress bool, family api.Family) string {
	if isAddress {
		return chainName("address-number", family)
	}
	return chainName("number", family)
}

func chainName(name string, family api.Family) string { return fmt.Sprintf("%s%d", name, family) }
