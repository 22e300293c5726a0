// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package nftrule has expressions of nftables rules that several backends use. Unless
// their comments say otherwise, the expressions load data into register 0.
package nftrule

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// Reg returns the kernel's number of a register of four octets. The first of these
// registers is Reg(0). Data or keys longer than four octets also use the next registers.
func Reg(number int) uint32 {
	if number%4 == 0 {
		return uint32(unix.NFT_REG_1 + number/4)
	}
	return uint32(unix.NFT_REG32_00 + number)
}

// LoadMeta loads a property of the packet.
func LoadMeta(key expr.MetaKey) expr.Any { return &expr.Meta{Key: key, Register: Reg(0)} }

// SetMeta sets a property of the packet to the value in register 0.
func SetMeta(key expr.MetaKey) expr.Any {
	return &expr.Meta{Key: key, SourceRegister: true, Register: Reg(0)}
}

// Equal matches if register 0 has this data.
func Equal(data ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: Reg(0), Data: data}
}

// MatchFamily matches packets of a family.
func MatchFamily(family api.Family) []expr.Any {
	return []expr.Any{LoadMeta(expr.MetaKeyNFPROTO), Equal(netfilter.Family(family))}
}

// AddrLen returns the length of the addresses of a family in octets.
func AddrLen(family api.Family) int {
	if family == api.IPv6 {
		return 16
	}
	return 4
}

// Key builds the beginning of a rule. This beginning matches packets of one family, and
// loads the parts of a lookup key into consecutive registers.
type Key struct {
	family      api.Family
	expressions []expr.Any
	register    int // the next free register
}

// NewKey returns a Key without parts.
func NewKey(family api.Family) *Key {
	return &Key{family: family, expressions: MatchFamily(family)}
}

// KeyAfter returns a Key whose rule begins with the given expressions. These expressions
// must match only packets of the given family. The Key loads its first part into register
// 0.
func KeyAfter(family api.Family, expressions []expr.Any) *Key {
	return &Key{family: family, expressions: expressions}
}

// Source loads the source address of a packet.
func (r *Key) Source() *Key {
	return r.address(map[api.Family]uint32{api.IPv4: 12, api.IPv6: 8}[r.family])
}

// Destination loads the destination address of a packet.
func (r *Key) Destination() *Key {
	return r.address(map[api.Family]uint32{api.IPv4: 16, api.IPv6: 24}[r.family])
}

func (r *Key) address(offset uint32) *Key {
	n := uint32(AddrLen(r.family))
	r.expressions = append(r.expressions, &expr.Payload{DestRegister: Reg(r.register), Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: n})
	r.register += int(n / 4)
	return r
}

// ProtocolAndPort loads the protocol and the destination port.
func (r *Key) ProtocolAndPort() *Key {
	r.Meta(expr.MetaKeyL4PROTO)
	r.expressions = append(r.expressions, &expr.Payload{DestRegister: Reg(r.register), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
	r.register++
	return r
}

// Meta loads a property of the packet. The property must fit into one register.
func (r *Key) Meta(key expr.MetaKey) *Key {
	r.expressions = append(r.expressions, &expr.Meta{Key: key, Register: Reg(r.register)})
	r.register++
	return r
}

// Masked clears the bits of the part that was loaded last, except those in mask.
func (r *Key) Masked(mask []byte) *Key {
	register := Reg(r.register - len(mask)/4)
	r.expressions = append(r.expressions, &expr.Bitwise{
		SourceRegister: register, DestRegister: register, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask)),
	})
	return r
}

// PrefixMask returns the mask of the prefixes of a family with a length.
func PrefixMask(family api.Family, bits int) []byte {
	mask := make([]byte, AddrLen(family))
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// FollowedBy returns the complete rule, which ends with these expressions.
func (r *Key) FollowedBy(expressions ...expr.Any) []expr.Any {
	return append(r.expressions, expressions...)
}

// DNATTo returns an expression that translates the destination to the address and the
// port in two registers. The arguments address and port are numbers for Reg. If the
// argument port is 0, packets keep their port.
func DNATTo(family api.Family, address, port int) expr.Any {
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(netfilter.Family(family)), RegAddrMin: Reg(address), RegAddrMax: Reg(address)}
	if port != 0 {
		nat.RegProtoMin, nat.RegProtoMax = Reg(port), Reg(port)
	}
	return nat
}

// Native encodes a number for a register, in the byte order of the host.
func Native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// Mark returns expressions that load the packet mark, clear the bits that are not set in
// mask, and then flip the bits that are set in xor.
func Mark(mask, xor uint32) []expr.Any {
	return []expr.Any{
		LoadMeta(expr.MetaKeyMARK),
		&expr.Bitwise{SourceRegister: Reg(0), DestRegister: Reg(0), Len: 4, Mask: Native(mask), Xor: Native(xor)},
	}
}

// FromInterface returns expressions that match packets from an interface. A name that
// ends in "*" stands for all names with that prefix.
func FromInterface(name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(prefix)
	}
	return []expr.Any{LoadMeta(expr.MetaKeyIIFNAME), Equal(data...)}
}

// FromPrefix returns expressions that match packets with a source in prefix.
func FromPrefix(prefix netip.Prefix) []expr.Any { return matchPrefix(prefix, (*Key).Source) }

// ToPrefix returns expressions that match packets with a destination in prefix.
func ToPrefix(prefix netip.Prefix) []expr.Any { return matchPrefix(prefix, (*Key).Destination) }

func matchPrefix(prefix netip.Prefix, load func(*Key) *Key) []expr.Any {
	rule := NewKey(api.FamilyOf(prefix.Addr()))
	if prefix.Bits() == 0 {
		return rule.FollowedBy()
	}
	address := Equal(prefix.Masked().Addr().AsSlice()...)
	if prefix.IsSingleIP() {
		return load(rule).FollowedBy(address)
	}
	load(rule).Masked(PrefixMask(rule.family, prefix.Bits()))
	return rule.FollowedBy(address)
}

// Drop returns a rule that drops all packets.
func Drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

// Jump returns a rule that sends packets to a chain, and then on to the next rule.
func Jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

// GoTo returns a rule that sends packets to a chain, from which they do not come back.
func GoTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

// StartsHere returns expressions that match packets that this node sends.
func StartsHere() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: Reg(0), ResultADDRTYPE: true, FlagSADDR: true},
		Equal(Native(unix.RTN_LOCAL)...),
	}
}

// States of connection tracking, for InState.
const (
	StateInvalid uint32 = 1 << 0
	StateNew     uint32 = 1 << 3
)

// InState returns expressions that match packets in one of these states of connection
// tracking.
func InState(states uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: Reg(0)},
		&expr.Bitwise{SourceRegister: Reg(0), DestRegister: Reg(0), Len: 4, Mask: Native(states), Xor: Native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: Reg(0), Data: Native(0)},
	}
}

// IgnoreReplies returns the first rule of a chain of type nat that may refuse connections.
// When the kernel refuses a connection, such chains see the packet of the refusal, because
// its destination is not translated yet. Without this rule, they might refuse or translate
// this packet.
func IgnoreReplies() []expr.Any {
	const reply = 1
	return []expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: Reg(0)}, Equal(reply), &expr.Verdict{Kind: expr.VerdictReturn}}
}

// Pods defines which packets count as packets from this node's pods.
type Pods struct {
	// CIDRs contain the addresses of pods.
	CIDRs []netip.Prefix
	// Interfaces are the interfaces of pods. A name that ends in "*" is a prefix of names.
	Interfaces []string
}

// Matches returns lists of expressions. If any list matches a packet, the packet is from
// a pod.
func (p Pods) Matches() (matches [][]expr.Any) {
	for _, name := range p.Interfaces {
		matches = append(matches, FromInterface(name))
	}
	for _, cidr := range p.CIDRs {
		matches = append(matches, FromPrefix(cidr))
	}
	return matches
}

// Outsiders returns the rules of a chain. These rules apply the given expressions to
// packets that are not from pods. If p defines no pods of a family, the rules do nothing
// to packets of that family.
func (p Pods) Outsiders(then []expr.Any) (rules [][]expr.Any) {
	for _, match := range p.Matches() {
		rules = append(rules, append(match, &expr.Verdict{Kind: expr.VerdictReturn}))
	}
	if len(p.Interfaces) > 0 {
		return append(rules, then)
	}
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
		if slices.ContainsFunc(p.CIDRs, func(cidr netip.Prefix) bool { return api.FamilyOf(cidr.Addr()) == family }) {
			rules = append(rules, append(MatchFamily(family), then...))
		}
	}
	return rules
}
