// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
)

// encodeRules returns rules in the encoding of netlink.
func encodeRules(rules ...[]expr.Any) []string {
	encoded := make([]string, len(rules))
	for i, rule := range rules {
		var w netfilter.Builder
		for _, e := range rule {
			b, err := expr.Marshal(unix.NFPROTO_INET, e)
			if err != nil {
				panic(err) // this package makes the expressions and their data
			}
			w.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b...)
		}
		encoded[i] = string(w.Encoded())
	}
	return encoded
}

// reg returns the register of four octets with that number, in the form in which the kernel
// lists it. Longer data and keys take the following registers as well.
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

// loadSource and loadDestination load an address into a register. They return the next free
// register.
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

// loadProtocolAndPort loads the protocol and the destination port. It returns the next free
// register.
func loadProtocolAndPort(register int) ([]expr.Any, int) {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(register)},
		&expr.Payload{DestRegister: reg(register + 1), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}, register + 2
}

// loadFrontend loads a packet's destination, in the form of a frontend's key. It returns the
// next free register.
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

// in matches keys in the set m.
func in(m mapID) expr.Any { return &expr.Lookup{SourceRegister: reg(0), SetName: m.name()} }

// lookup loads the data of a key in the map m.
func lookup(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: reg(0), DestRegister: reg(0), IsDestRegSet: true, SetName: m.name()}
}

// vmap applies the verdict of a key in the map m.
func vmap(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: reg(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: m.name()}
}

// lookupVerdict returns a rule that applies the verdict of a packet's destination in m.
func lookupVerdict(m mapID) []expr.Any {
	load, _ := loadFrontend(m.match, m.family)
	return append(append(matchFamily(m.family), load...), vmap(m))
}

// lookupSharedChain returns a rule that goes to the shared chain of a packet's destination.
// Node ports match at some addresses only.
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

// translate returns the rule that sends a new connection to the endpoint in the selected
// slot.
func translate(m mapID) []expr.Any {
	load, register := loadFrontend(m.match, m.family)
	rule := append(matchFamily(m.family), load...)
	rule = append(rule, &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg(register)}, lookup(m))
	if m.match == matchAddress {
		return append(rule, natTo(m.family, 0, 0))
	}
	return append(rule, natTo(m.family, 0, m.addrLen()/4))
}

// natTo translates the destination to the address in one register and the port in another.
// If port is 0, the port of a packet stays.
func natTo(family api.Family, address, port int) expr.Any {
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(family)), RegAddrMin: reg(address), RegAddrMax: reg(address)}
	if port != 0 {
		nat.RegProtoMin, nat.RegProtoMax = reg(port), reg(port)
	}
	return nat
}

// hairpin returns the rule that masquerades connections from endpoints to themselves.
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

// ipsDstNAT is the status bit of connections with a translated destination.
const ipsDstNAT = 1 << 5

// native returns a number in the byte order of registers.
func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// mark loads the packet mark, keeps the bits of mask, and then flips the bits of xor.
func mark(mask, xor uint32) []expr.Any {
	return []expr.Any{
		loadMeta(expr.MetaKeyMARK),
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 4, Mask: native(mask), Xor: native(xor)},
	}
}

// fromInterface matches packets that arrive through an interface. A name that ends in "*" is
// a prefix of names.
func fromInterface(name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(prefix)
	}
	return []expr.Any{loadMeta(expr.MetaKeyIIFNAME), equal(data...)}
}

// fromPrefix matches packets with a source in prefix, toPrefix those with a destination in it.
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
