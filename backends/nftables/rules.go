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

// reg returns the register of four octets with that number, in the form in which the
// kernel lists it. Longer data and keys take the following registers as well.
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

// keyRule is the beginning of a rule: it matches packets of a family and loads the parts
// of a key into registers, one after the other. Then it looks the key up.
type keyRule struct {
	family      api.Family
	expressions []expr.Any
	register    int // the next free one
}

func newKeyRule(family api.Family) *keyRule {
	return &keyRule{family: family, expressions: matchFamily(family)}
}

// source and destination load an address of the packet.
func (r *keyRule) source() *keyRule {
	return r.address(map[api.Family]uint32{api.IPv4: 12, api.IPv6: 8}[r.family])
}

func (r *keyRule) destination() *keyRule {
	return r.address(map[api.Family]uint32{api.IPv4: 16, api.IPv6: 24}[r.family])
}

func (r *keyRule) address(offset uint32) *keyRule {
	n := addrType(r.family).length
	r.expressions = append(r.expressions, &expr.Payload{DestRegister: reg(r.register), Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: n})
	r.register += int(n / 4)
	return r
}

// protocolAndPort loads the protocol and the destination port.
func (r *keyRule) protocolAndPort() *keyRule {
	r.meta(expr.MetaKeyL4PROTO)
	r.expressions = append(r.expressions, &expr.Payload{DestRegister: reg(r.register), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
	r.register++
	return r
}

// frontend loads a packet's destination, in the form of a frontend's key.
func (r *keyRule) frontend(s match) *keyRule {
	if s != matchNodePort {
		r.destination()
	}
	if s != matchAddress {
		r.protocolAndPort()
	}
	return r
}

func (r *keyRule) meta(key expr.MetaKey) *keyRule {
	r.expressions = append(r.expressions, &expr.Meta{Key: key, Register: reg(r.register)})
	r.register++
	return r
}

// then returns the rule with more expressions at its end.
func (r *keyRule) then(expressions ...expr.Any) []expr.Any {
	return append(r.expressions, expressions...)
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
	return newKeyRule(m.family).frontend(m.match).then(vmap(m))
}

// lookupSharedChain returns a rule that goes to the shared chain of a packet's
// destination. Node ports match at some addresses only.
func lookupSharedChain(m mapID) []expr.Any {
	r := newKeyRule(m.family)
	if m.match == matchNodePort {
		admitted := r.destination().then(in(mapID{kind: nodePortAddresses, family: m.family}))
		r = &keyRule{family: m.family, expressions: admitted}
	}
	toChain := mapID{sharedChains, m.match, m.family}
	if m.kind == nodeFrontends {
		toChain.kind = nodeSharedChains
	}
	return r.frontend(m.match).then(lookup(m), setMeta(expr.MetaKeyPRIORITY), loadMeta(expr.MetaKeyPRIORITY), vmap(toChain))
}

// translate returns the rule that sends a new connection to the endpoint in the selected
// slot.
func translate(m mapID) []expr.Any {
	port := 0
	if m.match != matchAddress {
		port = m.addrLen() / 4
	}
	return newKeyRule(m.family).frontend(m.match).meta(expr.MetaKeyPRIORITY).then(lookup(m), natTo(m.family, 0, port))
}

// natTo translates the destination to the address in one register and the port in
// another. If port is 0, the port of a packet stays.
func natTo(family api.Family, address, port int) expr.Any {
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(family)), RegAddrMin: reg(address), RegAddrMax: reg(address)}
	if port != 0 {
		nat.RegProtoMin, nat.RegProtoMax = reg(port), reg(port)
	}
	return nat
}

// hairpin returns the rule that masquerades connections from endpoints to themselves.
func hairpin(s match, family api.Family) []expr.Any {
	key := newKeyRule(family).source().destination()
	if s != matchAddress {
		key.protocolAndPort()
	}
	return append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)},
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 4, Mask: native(ipsDstNAT), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: native(0)},
	}, key.then(in(mapID{hairpins, s, family}), &expr.Masq{FullyRandom: true})...)
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

// fromInterface matches packets that arrive through an interface. A name that ends in "*"
// is a prefix of names.
func fromInterface(name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(prefix)
	}
	return []expr.Any{loadMeta(expr.MetaKeyIIFNAME), equal(data...)}
}

// fromPrefix matches packets with a source in prefix, toPrefix those with a destination
// in it.
func fromPrefix(prefix netip.Prefix) []expr.Any { return matchPrefix(prefix, (*keyRule).source) }
func toPrefix(prefix netip.Prefix) []expr.Any   { return matchPrefix(prefix, (*keyRule).destination) }

func matchPrefix(prefix netip.Prefix, load func(*keyRule) *keyRule) []expr.Any {
	rule := newKeyRule(api.FamilyOf(prefix.Addr()))
	if prefix.Bits() == 0 {
		return rule.then()
	}
	load(rule)
	address := equal(prefix.Masked().Addr().AsSlice()...)
	if prefix.IsSingleIP() {
		return rule.then(address)
	}
	n := prefix.Addr().BitLen() / 8
	mask := make([]byte, n)
	for i := range prefix.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return rule.then(&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: uint32(n), Mask: mask, Xor: make([]byte, n)}, address)
}

func verdictDrop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}
