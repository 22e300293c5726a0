// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nftrule"
	"golang.org/x/sys/unix"
)

func encodeRules(rules ...[]expr.Any) []string {
	encoded := make([]string, len(rules))
	for i, rule := range rules {
		var w netfilter.Builder
		for _, e := range rule {
			b, err := expr.Marshal(unix.NFPROTO_INET, e)
			if err != nil {
				panic(err) // a bug, because only this package makes expressions
			}
			w.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b...)
		}
		encoded[i] = string(w.Encoded())
	}
	return encoded
}

// loadFrontend loads those fields of a packet that form the key of a frontend.
func loadFrontend(r *nftrule.Key, s match) *nftrule.Key {
	if s != matchNodePort {
		r.Destination()
	}
	if s != matchAddress {
		r.ProtocolAndPort()
	}
	return r
}

// inSet returns an expression that matches if the loaded key is in the set m.
func inSet(m mapID) expr.Any { return &expr.Lookup{SourceRegister: nftrule.Reg(0), SetName: m.name()} }

// lookup returns an expression that replaces the loaded key by its value in the map m.
func lookup(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), IsDestRegSet: true, SetName: m.name()}
}

// vmap returns an expression that applies the verdict of m for the loaded key.
func vmap(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: nftrule.Reg(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: m.name()}
}

// loadPriority loads those bits of the packet's priority that are set in mask.
func loadPriority(mask uint32) []expr.Any {
	return []expr.Any{
		nftrule.LoadMeta(expr.MetaKeyPRIORITY),
		&expr.Bitwise{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), Len: 4, Mask: nftrule.Native(mask), Xor: nftrule.Native(0)},
	}
}

// handled returns a rule that sends packets of frontends with the given handling to a
// chain. The packet's priority is the value of its frontend.
func handled(h handling, chain string) []expr.Any {
	return slices.Concat(loadPriority(handlingMask), []expr.Any{nftrule.Equal(nftrule.Native(uint32(h))...)}, nftrule.Jump(chain))
}

// lookupFrontends returns the rules that look up the frontend of a packet. The value of the
// frontend becomes the packet's priority, and the verdict applies. For node ports, the rule
// first checks that the address has node ports.
func lookupFrontends(family api.Family, verdict ...expr.Any) (rules [][]expr.Any) {
	for _, s := range allMatches {
		r := nftrule.NewKey(family)
		if s == matchNodePort {
			admitted := r.Destination().FollowedBy(inSet(mapID{kind: kindNodePortAddresses, family: family}))
			r = nftrule.KeyAfter(family, admitted)
		}
		rule := loadFrontend(r, s).FollowedBy(lookup(mapID{kindFrontends, s, family}), nftrule.SetMeta(expr.MetaKeyPRIORITY))
		rules = append(rules, append(rule, verdict...))
	}
	return rules
}

// fromPriority returns a rule that replaces the packet's priority by its value in m.
func fromPriority(family api.Family, mask uint32, m mapID) []expr.Any {
	return slices.Concat(nftrule.MatchFamily(family), loadPriority(mask), []expr.Any{lookup(m), nftrule.SetMeta(expr.MetaKeyPRIORITY)})
}

// translateNumber returns the rule that translates the destination of a packet to the
// endpoint with the selected number.
func translateNumber(m mapID) []expr.Any {
	rule, port := []expr.Any{nftrule.LoadMeta(expr.MetaKeyPRIORITY)}, 0
	if m.match != matchAddress {
		rule, port = append(rule, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: nftrule.Reg(1)}), addrLen(m.family)/4
	}
	return append(rule, lookup(m), nftrule.DNATTo(m.family, 0, port))
}

// hairpin returns the rule that masquerades connections of endpoints to themselves.
func hairpin(s match, family api.Family) []expr.Any {
	key := nftrule.NewKey(family).Source().Destination()
	if s != matchAddress {
		key.ProtocolAndPort()
	}
	return append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: nftrule.Reg(0)},
		&expr.Bitwise{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), Len: 4, Mask: nftrule.Native(ipsDstNAT), Xor: nftrule.Native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: nftrule.Reg(0), Data: nftrule.Native(0)},
	}, key.FollowedBy(inSet(mapID{kindHairpins, s, family}), &expr.Masq{FullyRandom: true})...)
}

// ipsDstNAT is the status bit of connections whose destination was translated.
const ipsDstNAT = 1 << 5

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
