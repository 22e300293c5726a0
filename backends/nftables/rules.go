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

// reg returns the kernel's number for a register of four octets. The argument is the
// index of that register, from 0. Longer data and keys also use the following registers.
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

// Unless they say otherwise, the expressions below load data into register 0.

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

// keyRule is the beginning of a rule that looks up a key. It matches packets of one
// family. Then it loads the parts of the key into consecutive registers.
type keyRule struct {
	family      api.Family
	expressions []expr.Any
	register    int // the next free register
}

func newKeyRule(family api.Family) *keyRule {
	return &keyRule{family: family, expressions: matchFamily(family)}
}

// source loads the source address of a packet.
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

func (r *keyRule) protocolAndPort() *keyRule {
	r.meta(expr.MetaKeyL4PROTO)
	r.expressions = append(r.expressions, &expr.Payload{DestRegister: reg(r.register), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
	r.register++
	return r
}

// frontend loads those fields of a packet that form the key of a frontend.
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

// followedBy returns the complete rule, which ends with these expressions.
func (r *keyRule) followedBy(expressions ...expr.Any) []expr.Any {
	return append(r.expressions, expressions...)
}

// inSet returns an expression that matches if the loaded key is in the set m.
func inSet(m mapID) expr.Any { return &expr.Lookup{SourceRegister: reg(0), SetName: m.name()} }

// lookup returns an expression that replaces the loaded key by its value in the map m.
func lookup(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: reg(0), DestRegister: reg(0), IsDestRegSet: true, SetName: m.name()}
}

// vmap returns an expression that applies the verdict of m for the loaded key.
func vmap(m mapID) expr.Any {
	return &expr.Lookup{SourceRegister: reg(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: m.name()}
}

// lookupVerdict returns a rule that applies the verdict of m for a packet's destination.
func lookupVerdict(m mapID) []expr.Any {
	return newKeyRule(m.family).frontend(m.match).followedBy(vmap(m))
}

// lookupSharedChain returns a rule that sends a packet to the shared chain of its
// destination. The rule for node ports first checks the packet's address.
func lookupSharedChain(m mapID) []expr.Any {
	r := newKeyRule(m.family)
	if m.match == matchNodePort {
		admitted := r.destination().followedBy(inSet(mapID{kind: nodePortAddresses, family: m.family}))
		r = &keyRule{family: m.family, expressions: admitted}
	}
	toChain := mapID{sharedChains, m.match, m.family}
	if m.kind == nodeFrontends {
		toChain.kind = nodeSharedChains
	}
	return r.frontend(m.match).followedBy(lookup(m), setMeta(expr.MetaKeyPRIORITY), loadMeta(expr.MetaKeyPRIORITY), vmap(toChain))
}

// translate returns the rule that translates the destination of a packet to the endpoint
// in the selected slot.
func translate(m mapID) []expr.Any {
	port := 0
	if m.match != matchAddress {
		port = m.addrLen() / 4
	}
	return newKeyRule(m.family).frontend(m.match).meta(expr.MetaKeyPRIORITY).followedBy(lookup(m), natTo(m.family, 0, port))
}

// natTo returns an expression that translates the destination of a packet. The arguments
// address and port are registers. If port is 0, packets keep their port.
func natTo(family api.Family, address, port int) expr.Any {
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nfproto(family)), RegAddrMin: reg(address), RegAddrMax: reg(address)}
	if port != 0 {
		nat.RegProtoMin, nat.RegProtoMax = reg(port), reg(port)
	}
	return nat
}

// hairpin returns the rule that masquerades connections of endpoints to themselves.
func hairpin(s match, family api.Family) []expr.Any {
	key := newKeyRule(family).source().destination()
	if s != matchAddress {
		key.protocolAndPort()
	}
	return append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)},
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 4, Mask: native(ipsDstNAT), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: native(0)},
	}, key.followedBy(inSet(mapID{hairpins, s, family}), &expr.Masq{FullyRandom: true})...)
}

// ipsDstNAT is the status bit of connections whose destination was translated.
const ipsDstNAT = 1 << 5

// native encodes a number for a register, in the byte order of the host.
func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// mark returns expressions that load the packet mark, clear all bits that are not set in
// mask, and then flip the bits that are set in xor.
func mark(mask, xor uint32) []expr.Any {
	return []expr.Any{
		loadMeta(expr.MetaKeyMARK),
		&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: 4, Mask: native(mask), Xor: native(xor)},
	}
}

// fromInterface returns expressions that match packets from an interface. A name that
// ends in "*" stands for all names with that prefix.
func fromInterface(name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(prefix)
	}
	return []expr.Any{loadMeta(expr.MetaKeyIIFNAME), equal(data...)}
}

// fromPrefix returns expressions that match packets with a source in prefix. The function
// toPrefix does so for the destination.
func fromPrefix(prefix netip.Prefix) []expr.Any { return matchPrefix(prefix, (*keyRule).source) }
func toPrefix(prefix netip.Prefix) []expr.Any   { return matchPrefix(prefix, (*keyRule).destination) }

func matchPrefix(prefix netip.Prefix, load func(*keyRule) *keyRule) []expr.Any {
	rule := newKeyRule(api.FamilyOf(prefix.Addr()))
	if prefix.Bits() == 0 {
		return rule.followedBy()
	}
	load(rule)
	address := equal(prefix.Masked().Addr().AsSlice()...)
	if prefix.IsSingleIP() {
		return rule.followedBy(address)
	}
	n := prefix.Addr().BitLen() / 8
	mask := make([]byte, n)
	for i := range prefix.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return rule.followedBy(&expr.Bitwise{SourceRegister: reg(0), DestRegister: reg(0), Len: uint32(n), Mask: mask, Xor: make([]byte, n)}, address)
}

func verdictDrop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}
