// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// reg returns the register of four octets with that number, as the kernel has it in its
// listings. Data and keys that are longer take the registers that follow.
func reg(number int) uint32 {
	if number%4 == 0 {
		return uint32(unix.NFT_REG_1 + number/4)
	}
	return uint32(unix.NFT_REG32_00 + number)
}

func nfproto(family api.Family) byte {
	if family == api.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// The expressions below load into register 0 unless they say otherwise.

func loadMeta(key expr.MetaKey) expr.Any { return &expr.Meta{Key: key, Register: reg(0)} }

func setMeta(key expr.MetaKey) expr.Any {
	return &expr.Meta{Key: key, SourceRegister: true, Register: reg(0)}
}

func equal(data ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: data}
}

func matchFamily(family api.Family) []expr.Any {
	return []expr.Any{loadMeta(expr.MetaKeyNFPROTO), equal(nfproto(family))}
}

// loadSource and loadDestination load an address into a register. They return the register
// behind it.
func loadSource(family api.Family, register int) (expr.Any, int) {
	return loadAddress(family, register, map[api.Family]uint32{api.IPv4: 12, api.IPv6: 8}[family])
}

func loadDestination(family api.Family, register int) (expr.Any, int) {
	return loadAddress(family, register, map[api.Family]uint32{api.IPv4: 16, api.IPv6: 24}[family])
}

func loadAddress(family api.Family, register int, offset uint32) (expr.Any, int) {
	n := addrType(family).length
	return &expr.Payload{DestRegister: reg(register), Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: n}, register + int(n/4)
}

// loadProtocolAndPort loads the protocol and the destination port. It returns the register
// behind them.
func loadProtocolAndPort(register int) ([]expr.Any, int) {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(register)},
		&expr.Payload{DestRegister: reg(register + 1), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}, register + 2
}

// loadFrontend loads a packet's destination as frontends of a scope have it in their keys.
// It returns the register behind it.
func loadFrontend(s match, family api.Family) (load []expr.Any, register int) {
	if s != matchNodePort {
		var address expr.Any
		address, register = loadDestination(family, register)
		load = append(load, address)
	}
	if s != matchAddress {
		var port []expr.Any
		port, register = loadProtocolAndPort(register)
		load = append(load, port...)
	}
	return load, register
}

// in matches what is in the set m, and lookup loads what it leads to in the map m.
func in(m mapID) expr.Any { return &expr.Lookup{SourceRegister: reg(0), SetName: m.name()} }

func lookup(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: reg(0), DestRegister: reg(0), IsDestRegSet: true, SetName: m.name()}
}

// vmap gives the verdict that the map m has.
func vmap(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: reg(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: m.name()}
}

// lookupVerdict returns a rule that gives the verdict that a packet's destination has.
func lookupVerdict(m mapID) []expr.Any {
	load, _ := loadFrontend(m.match, m.family)
	return append(append(matchFamily(m.family), load...), vmap(m))
}

// lookupSharedChain returns a rule that goes to the chain of the class that a packet's destination
// has. Node ports are served at some addresses only.
func lookupSharedChain(m mapID) []expr.Any {
	rule := matchFamily(m.family)
	if m.match == matchNodePort {
		address, _ := loadDestination(m.family, 0)
		rule = append(rule, address, in(mapID{kind: nodePortAddresses, family: m.family}))
	}
	load, _ := loadFrontend(m.match, m.family)
	rule = append(rule, load...)
	toChain := mapID{sharedChains, m.match, m.family}
	if m.kind == nodeFrontends {
		toChain.kind = nodeSharedChains
	}
	return append(rule, lookup(m), setMeta(expr.MetaKeyPRIORITY), loadMeta(expr.MetaKeyPRIORITY), vmap(toChain))
}

// translate returns the rule that sends a new connection to the endpoint in the slot that
// was drawn.
func translate(m mapID) []expr.Any {
	load, register := loadFrontend(m.match, m.family)
	rule := append(matchFamily(m.family), load...)
	rule = append(rule, &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg(register)}, lookup(m))
	if m.match == matchAddress {
		return append(rule, natTo(m.family, 0, 0))
	}
	return append(rule, natTo(m.family, 0, m.addrLen()/4))
}

// natTo translates the destination to the address in a register, and to the port in another
// unless that is 0.
func natTo(family api.Family, address, port int) expr.Any {
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(family)), RegAddrMin: reg(address), RegAddrMax: reg(address)}
	if port != 0 {
		nat.RegProtoMin, nat.RegProtoMax = reg(port), reg(port)
	}
	return nat
}

// hairpin returns the rule that masquerades connections of endpoints to themselves.
func hairpin(s match, family api.Family) []expr.Any {
	source, register := loadSource(family, 0)
	destination, register := loadDestination(family, register)
	rule := append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)},
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 4, Mask: native(ipsDstNAT), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: native(0)},
	}, matchFamily(family)...)
	rule = append(rule, source, destination)
	if s != matchAddress {
		port, _ := loadProtocolAndPort(register)
		rule = append(rule, port...)
	}
	return append(rule, in(mapID{hairpins, s, family}), &expr.Masq{FullyRandom: true})
}

// ipsDstNAT is the bit of a connection's status that says that its destination is translated.
const ipsDstNAT = 1 << 5

// native returns a number as the kernel has it in registers.
func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// mark returns expressions that keep the bits of mask in the packet mark and flip those of xor.
func mark(mask, xor uint32) []expr.Any {
	return []expr.Any{
		loadMeta(expr.MetaKeyMARK),
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 4, Mask: native(mask), Xor: native(xor)},
	}
}

// fromInterface matches packets that come in through an interface. A name that ends in "*"
// stands for all that begin so.
func fromInterface(name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(prefix)
	}
	return []expr.Any{loadMeta(expr.MetaKeyIIFNAME), equal(data...)}
}

// fromPrefix and toPrefix match packets whose source or destination is in a prefix.
func fromPrefix(prefix netip.Prefix) []expr.Any { return matchPrefix(prefix, loadSource) }
func toPrefix(prefix netip.Prefix) []expr.Any   { return matchPrefix(prefix, loadDestination) }

func matchPrefix(prefix netip.Prefix, load func(api.Family, int) (expr.Any, int)) []expr.Any {
	family := api.FamilyOf(prefix.Addr())
	rule := matchFamily(family)
	if prefix.Bits() == 0 {
		return rule
	}
	address, _ := load(family, 0)
	rule = append(rule, address)
	if !prefix.IsSingleIP() {
		n := prefix.Addr().BitLen() / 8
		mask := make([]byte, n)
		for i := range prefix.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		rule = append(rule, &expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: uint32(n), Mask: mask, Xor: make([]byte, n)})
	}
	return append(rule, equal(prefix.Masked().Addr().AsSlice()...))
}

func verdictDrop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}
