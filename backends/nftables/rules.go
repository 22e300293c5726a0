// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"github.com/kpng-project/kpng/backends/internal/nftrule"
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

// lookupSharedChain returns a rule that sends a packet to the shared chain of its
// destination. For node ports, the rule first checks that the address has node ports.
func lookupSharedChain(m mapID) []expr.Any {
	r := nftrule.NewKey(m.family)
	if m.match == matchNodePort {
		admitted := r.Destination().FollowedBy(inSet(mapID{kind: kindNodePortAddresses, family: m.family}))
		r = nftrule.KeyAfter(m.family, admitted)
	}
	toChain := mapID{kindSharedChains, m.match, m.family}
	if m.kind == kindNodeFrontends {
		toChain.kind = kindNodeSharedChains
	}
	return loadFrontend(r, m.match).FollowedBy(lookup(m), nftrule.SetMeta(expr.MetaKeyPRIORITY), nftrule.LoadMeta(expr.MetaKeyPRIORITY), vmap(toChain))
}

// translate returns the rule that translates the destination of a packet to the endpoint
// in the selected slot, or to the endpoint with the selected number.
func translate(m mapID) []expr.Any {
	port := 0
	if m.match != matchAddress {
		port = m.addrLen() / 4
	}
	return loadFrontend(nftrule.NewKey(m.family), m.match).Meta(expr.MetaKeyPRIORITY).FollowedBy(lookup(m), nftrule.DNATTo(m.family, 0, port))
}

// toNumber returns the rule that replaces the selected slot by the number of its endpoint.
func toNumber(m mapID) []expr.Any {
	return loadFrontend(nftrule.NewKey(m.family), m.match).Meta(expr.MetaKeyPRIORITY).FollowedBy(lookup(m), nftrule.SetMeta(expr.MetaKeyPRIORITY))
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
