// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"iter"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// layout is the comment of every rule. Change it whenever you change the rules, so that
// all-ip recreates tables that other versions of all-ip made.
const layout = "kpng all-ip 1"

// table is one of the two nftables tables. all-ip changes the sets of a table, but never
// the rules. nft prints the table like this:
//
//	chain services {
//		dnat to ip daddr map @pod
//		dnat to ip daddr . jhash ip saddr mod 64 seed 0x1 map @pods
//		ip daddr @rejected meta l4proto tcp reject with tcp reset
//		ip daddr @rejected reject
//		ip daddr @dropped drop
//	}
//	chain prerouting {
//		type nat hook prerouting priority dstnat - 1
//		jump services
//	}
//	chain output {
//		type nat hook output priority -101
//		jump services
//	}
//	chain postrouting {
//		type nat hook postrouting priority srcnat - 1
//		ip saddr . ip daddr @hairpin masquerade
//	}
//
// The kernel evaluates these chains only for the first packet of a connection, before
// kube-proxy's chains. Connection tracking translates later packets and the replies.
type table struct {
	*nftables.Table
	family api.Family
	// In bytes: the length of an address, and the offsets of the source and destination
	// address in the packet header.
	size, source, destination uint32
	address                   nftables.SetDatatype
	unreachable               uint8 // ICMP code of port unreachable
}

func tables(name string) []*table {
	return []*table{
		{&nftables.Table{Name: name, Family: nftables.TableFamilyIPv4}, api.IPv4, 4, 12, 16, nftables.TypeIPAddr, 3},
		{&nftables.Table{Name: name, Family: nftables.TableFamilyIPv6}, api.IPv6, 16, 8, 24, nftables.TypeIP6Addr, 4},
	}
}

func (t *table) set(name string) *nftables.Set {
	s := &nftables.Set{Table: t.Table, Name: name, KeyType: t.address}
	switch name {
	case podMap:
		s.IsMap, s.DataType = true, t.address
	case slotMap:
		// nft has no name for the type of a hash. Use the type of a mark, which is also a
		// number.
		s.KeyType = nftables.MustConcatSetType(t.address, nftables.TypeMark)
		s.IsMap, s.DataType = true, t.address
	case hairpinSet:
		s.KeyType = nftables.MustConcatSetType(t.address, t.address)
	}
	return s
}

func (t *table) sets() iter.Seq[*nftables.Set] {
	return func(yield func(*nftables.Set) bool) {
		for _, name := range []string{podMap, slotMap, hairpinSet, rejectedSet, droppedSet} {
			if !yield(t.set(name)) {
				return
			}
		}
	}
}

// The names of the chains.
const (
	services    = "services"
	prerouting  = "prerouting"
	output      = "output"
	postrouting = "postrouting"
)

// chains returns all chains. The chains prerouting and output jump to the chain named
// services.
func (t *table) chains() []*nftables.Chain {
	base := func(name string, hook *nftables.ChainHook, priority nftables.ChainPriority) *nftables.Chain {
		return &nftables.Chain{Table: t.Table, Name: name, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: &priority}
	}
	return []*nftables.Chain{
		{Table: t.Table, Name: services},
		base(prerouting, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest-1),
		base(output, nftables.ChainHookOutput, *nftables.ChainPriorityNATDest-1),
		base(postrouting, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource-1),
	}
}

// rules returns the rules of a chain. Each of the kernel's registers 1 to 4 has 16 bytes.
// The registers 8 to 23 have 4 bytes each and use the same memory. The parts of a key are
// in adjacent registers.
func (t *table) rules(chain *nftables.Chain) []*nftables.Rule {
	load := func(register, offset uint32) expr.Any {
		return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: t.size}
	}
	second := unix.NFT_REG32_00 + t.size/4
	mapped := func(by string) []expr.Any {
		return []expr.Any{
			&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: by, IsDestRegSet: true, DestRegister: unix.NFT_REG_1},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(t.Family), RegAddrMin: unix.NFT_REG_1},
		}
	}
	in := func(set string) expr.Any { return &expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set} }
	destinationIn := func(set string, then ...expr.Any) []expr.Any {
		return append([]expr.Any{load(unix.NFT_REG_1, t.destination), in(set)}, then...)
	}
	var rules [][]expr.Any
	switch chain.Name {
	case services:
		rules = [][]expr.Any{
			append([]expr.Any{load(unix.NFT_REG_1, t.destination)}, mapped(podMap)...),
			append([]expr.Any{
				load(unix.NFT_REG_1, t.destination),
				load(unix.NFT_REG_3, t.source),
				&expr.Hash{SourceRegister: unix.NFT_REG_3, Length: t.size, DestRegister: second, Modulus: slots, Seed: 1, Type: expr.HashTypeJenkins},
			}, mapped(slotMap)...),
			destinationIn(rejectedSet,
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: []byte{unix.IPPROTO_TCP}},
				&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}),
			destinationIn(rejectedSet, &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: t.unreachable}),
			destinationIn(droppedSet, &expr.Verdict{Kind: expr.VerdictDrop}),
		}
	case postrouting:
		rules = [][]expr.Any{{load(unix.NFT_REG_1, t.source), load(second, t.destination), in(hairpinSet), &expr.Masq{}}}
	default:
		rules = [][]expr.Any{{&expr.Verdict{Kind: expr.VerdictJump, Chain: services}}}
	}
	var out []*nftables.Rule
	for _, exprs := range rules {
		out = append(out, &nftables.Rule{
			Table: t.Table, Chain: chain, Exprs: exprs,
			UserData: userdata.AppendString(nil, userdata.TypeComment, layout),
		})
	}
	return out
}
