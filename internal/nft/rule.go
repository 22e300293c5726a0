// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package nft writes and reads an nftables table of family inet over netlink. It also has
// the rules and chains that the tables of several backends share.
package nft

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// Rule is a rule or a part of a rule: a sequence of encoded expressions. The operator +
// joins parts. Expressions load data into register 0 and use the data of register 0,
// unless their comments say otherwise.
type Rule string

func expression(name string, attributes ...string) Rule {
	return Rule(nested(unix.NFTA_LIST_ELEM, text(unix.NFTA_EXPR_NAME, name), nested(unix.NFTA_EXPR_DATA, attributes...)))
}

// Each of these functions encodes one kind of attribute of an expression: octets, other
// attributes, a number, the number of a register, text, or data for a register.

func octets(attr uint16, v ...byte) string {
	var w netfilter.Builder
	w.Bytes(attr, v...)
	return string(w.Encoded())
}

func nested(attr uint16, attributes ...string) string {
	return octets(attr|unix.NLA_F_NESTED, []byte(strings.Join(attributes, ""))...)
}

func number(attr uint16, v uint32) string {
	return octets(attr, binary.BigEndian.AppendUint32(nil, v)...)
}

// Registers have four octets each. Their numbers begin with 0. Data or keys longer than
// four octets also use the next registers.
func register(attr uint16, register int) string {
	if register%4 == 0 {
		return number(attr, uint32(unix.NFT_REG_1+register/4))
	}
	return number(attr, uint32(unix.NFT_REG32_00+register))
}

func text(attr uint16, s string) string { return octets(attr, append([]byte(s), 0)...) }

func data(attr uint16, v []byte) string {
	return nested(attr, octets(unix.NFTA_DATA_VALUE, v...))
}

// LoadMeta loads a property of the packet, such as NFT_META_MARK.
func LoadMeta(key uint32) Rule { return loadMeta(key, 0) }

func loadMeta(key uint32, to int) Rule {
	return expression("meta", number(unix.NFTA_META_KEY, key), register(unix.NFTA_META_DREG, to))
}

// SetMeta sets a property of the packet.
func SetMeta(key uint32) Rule {
	return expression("meta", number(unix.NFTA_META_KEY, key), register(unix.NFTA_META_SREG, 0))
}

// SetPriority sets the packet's priority to a number.
func SetPriority(v uint32) Rule {
	load := expression("immediate", register(unix.NFTA_IMMEDIATE_DREG, 0), data(unix.NFTA_IMMEDIATE_DATA, Native(v)))
	return load + SetMeta(unix.NFT_META_PRIORITY)
}

func loadCt(key uint32) Rule {
	return expression("ct", number(unix.NFTA_CT_KEY, key), register(unix.NFTA_CT_DREG, 0))
}

func compare(op uint32, v []byte) Rule {
	return expression("cmp", register(unix.NFTA_CMP_SREG, 0), number(unix.NFTA_CMP_OP, op), data(unix.NFTA_CMP_DATA, v))
}

// Equal matches if register 0 has this data.
func Equal(data ...byte) Rule { return compare(unix.NFT_CMP_EQ, data) }

// NotEqual matches if register 0 has other data.
func NotEqual(data ...byte) Rule { return compare(unix.NFT_CMP_NEQ, data) }

// Between matches if register 0 has a number from first to last.
func Between(first, last uint32) Rule {
	toNetwork := expression("byteorder", register(unix.NFTA_BYTEORDER_SREG, 0), register(unix.NFTA_BYTEORDER_DREG, 0),
		number(unix.NFTA_BYTEORDER_OP, unix.NFT_BYTEORDER_HTON), number(unix.NFTA_BYTEORDER_LEN, 4), number(unix.NFTA_BYTEORDER_SIZE, 4))
	bigEndian := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	return toNetwork + compare(unix.NFT_CMP_GTE, bigEndian(first)) + compare(unix.NFT_CMP_LTE, bigEndian(last))
}

// And clears those bits of the loaded number that are not set in mask.
func And(mask uint32) Rule { return bitwise(0, Native(mask), Native(0)) }

// bitwise clears the bits of data that are not set in mask, and then flips the bits that
// are set in xor.
func bitwise(at int, mask, xor []byte) Rule {
	return expression("bitwise", register(unix.NFTA_BITWISE_SREG, at), register(unix.NFTA_BITWISE_DREG, at),
		number(unix.NFTA_BITWISE_LEN, uint32(len(mask))), data(unix.NFTA_BITWISE_MASK, mask), data(unix.NFTA_BITWISE_XOR, xor))
}

// Mark loads the packet mark, clears the bits that are not set in mask, and then flips the
// bits that are set in xor.
func Mark(mask, xor uint32) Rule {
	return LoadMeta(unix.NFT_META_MARK) + bitwise(0, Native(mask), Native(xor))
}

// Native encodes a number for a register, in the byte order of the host.
func Native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func lookup(attributes ...string) Rule {
	return expression("lookup", append(attributes, register(unix.NFTA_LOOKUP_SREG, 0))...)
}

// InSet matches if the loaded key is in a set.
func InSet(set string) Rule { return lookup(text(unix.NFTA_LOOKUP_SET, set)) }

// Lookup replaces the loaded key by its value in a map. If the map does not have the key,
// the packet does not match.
func Lookup(m string) Rule {
	return lookup(text(unix.NFTA_LOOKUP_SET, m), register(unix.NFTA_LOOKUP_DREG, 0))
}

// LookupVerdict applies the verdict for the loaded key in a map.
func LookupVerdict(m string) Rule {
	return lookup(text(unix.NFTA_LOOKUP_SET, m), number(unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT))
}

// Dynset adds or deletes an element of a map. Its key begins in register 0, and its value is
// in another register. An example of the argument operation is NFT_DYNSET_OP_UPDATE.
func Dynset(m string, operation uint32, value int, timeout time.Duration) Rule {
	attributes := []string{
		text(unix.NFTA_DYNSET_SET_NAME, m), number(unix.NFTA_DYNSET_OP, operation),
		register(unix.NFTA_DYNSET_SREG_KEY, 0), register(unix.NFTA_DYNSET_SREG_DATA, value),
	}
	if timeout != 0 {
		milliseconds := binary.BigEndian.AppendUint64(nil, uint64(timeout.Milliseconds()))
		attributes = append(attributes, octets(unix.NFTA_DYNSET_TIMEOUT, milliseconds...))
	}
	return expression("dynset", attributes...)
}

// MatchFamily matches packets of a family.
func MatchFamily(family api.Family) Rule {
	return LoadMeta(unix.NFT_META_NFPROTO) + Equal(netfilter.Family(family))
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
	family   api.Family
	rule     Rule
	register int // the next free register
}

// NewKey returns a Key without parts.
func NewKey(family api.Family) *Key { return KeyAfter(family, MatchFamily(family)) }

// KeyAfter returns a Key without parts. Its rule begins with the given expressions, which
// must match only packets of the given family.
func KeyAfter(family api.Family, begin Rule) *Key { return &Key{family: family, rule: begin} }

// Source loads the source address of a packet.
func (k *Key) Source() *Key {
	return k.address(map[api.Family]uint32{api.IPv4: 12, api.IPv6: 8}[k.family])
}

// Destination loads the destination address of a packet.
func (k *Key) Destination() *Key {
	return k.address(map[api.Family]uint32{api.IPv4: 16, api.IPv6: 24}[k.family])
}

func (k *Key) address(offset uint32) *Key {
	return k.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, AddrLen(k.family))
}

func (k *Key) payload(base, offset uint32, n int) *Key {
	return k.add(expression("payload", register(unix.NFTA_PAYLOAD_DREG, k.register),
		number(unix.NFTA_PAYLOAD_BASE, base), number(unix.NFTA_PAYLOAD_OFFSET, offset), number(unix.NFTA_PAYLOAD_LEN, uint32(n))), n)
}

// add adds an expression that loads n octets.
func (k *Key) add(e Rule, n int) *Key {
	k.rule += e
	k.register += (n + 3) / 4
	return k
}

// ProtocolAndPort loads the protocol and the destination port.
func (k *Key) ProtocolAndPort() *Key {
	return k.Meta(unix.NFT_META_L4PROTO).payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)
}

// Meta loads a property of the packet. The property must fit into one register.
func (k *Key) Meta(key uint32) *Key { return k.add(loadMeta(key, k.register), 4) }

// Random loads a random number from 1 to n.
func (k *Key) Random(n uint32) *Key {
	return k.add(expression("numgen", register(unix.NFTA_NG_DREG, k.register),
		number(unix.NFTA_NG_MODULUS, n), number(unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM), number(unix.NFTA_NG_OFFSET, 1)), 4)
}

// SourceHash loads a hash of the source address of a packet, from 0 to modulus-1. The seed
// must not be 0.
func (k *Key) SourceHash(modulus, seed uint32) *Key {
	to, n := k.register, AddrLen(k.family)
	k.register = (to + n/4 - 1) / (n / 4) * (n / 4) // the kernel needs the address in aligned registers
	from := k.register
	k.Source().register = to
	return k.hash(from, to, n, modulus, seed, 0)
}

// StableHash loads a hash from 1 to modulus. It hashes the source address of a packet, and
// the source port if withPort is true. The seed must not be 0.
func (k *Key) StableHash(withPort bool, modulus, seed uint32) *Key {
	const from = 4 // aligned for addresses of both families
	to, n := k.register, AddrLen(k.family)
	k.register = from
	k.Source()
	if withPort {
		k.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2)
		n += 4 // the kernel clears the rest of the register
	}
	k.register = to
	return k.hash(from, to, n, modulus, seed, 1)
}

func (k *Key) hash(from, to, n int, modulus, seed, offset uint32) *Key {
	return k.add(expression("hash", register(unix.NFTA_HASH_SREG, from), register(unix.NFTA_HASH_DREG, to), number(unix.NFTA_HASH_LEN, uint32(n)),
		number(unix.NFTA_HASH_MODULUS, modulus), number(unix.NFTA_HASH_SEED, seed), number(unix.NFTA_HASH_TYPE, unix.NFT_HASH_JENKINS),
		number(unix.NFTA_HASH_OFFSET, offset)), 4)
}

// Masked clears all bits of the last loaded part that are not set in mask.
func (k *Key) Masked(mask []byte) *Key {
	return k.add(bitwise(k.register-len(mask)/4, mask, make([]byte, len(mask))), 0)
}

// PrefixMask returns the mask of a prefix. The prefix has addresses of the given family,
// and the given number of bits.
func PrefixMask(family api.Family, bits int) []byte {
	mask := make([]byte, AddrLen(family))
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// Then returns the complete rule. The rule ends with these expressions.
func (k *Key) Then(end Rule) Rule { return k.rule + end }

// DNATTo translates the destination to the address and the port in two registers. If the
// argument port is 0, packets keep their port.
func DNATTo(family api.Family, address, port int) Rule {
	attributes := []string{
		number(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT), number(unix.NFTA_NAT_FAMILY, uint32(netfilter.Family(family))),
		register(unix.NFTA_NAT_REG_ADDR_MIN, address), register(unix.NFTA_NAT_REG_ADDR_MAX, address),
	}
	if port != 0 {
		attributes = append(attributes, register(unix.NFTA_NAT_REG_PROTO_MIN, port), register(unix.NFTA_NAT_REG_PROTO_MAX, port))
	}
	return expression("nat", attributes...)
}

// Masquerade translates the source to an address of this node, and to a random port.
var Masquerade = expression("masq", number(unix.NFTA_MASQ_FLAGS, 1<<4)) // NF_NAT_RANGE_PROTO_RANDOM_FULLY

// FromInterface matches packets from an interface. A name that ends in "*" stands for all
// names with that prefix.
func FromInterface(name string) Rule {
	data := InterfaceName(name)
	if prefix, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(prefix)
	}
	return LoadMeta(unix.NFT_META_IIFNAME) + Equal(data...)
}

// InterfaceName encodes the name of an interface for registers.
func InterfaceName(name string) []byte {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return data
}

// FromPrefix matches packets with a source in prefix.
func FromPrefix(prefix netip.Prefix) Rule { return matchPrefix(prefix, (*Key).Source) }

// ToPrefix matches packets with a destination in prefix.
func ToPrefix(prefix netip.Prefix) Rule { return matchPrefix(prefix, (*Key).Destination) }

func matchPrefix(prefix netip.Prefix, load func(*Key) *Key) Rule {
	key := NewKey(api.FamilyOf(prefix.Addr()))
	if prefix.Bits() == 0 {
		return key.rule
	}
	load(key)
	if !prefix.IsSingleIP() {
		key.Masked(PrefixMask(key.family, prefix.Bits()))
	}
	return key.Then(Equal(prefix.Masked().Addr().AsSlice()...))
}

// These expressions end a rule.
var (
	Accept = verdict(nfAccept, "")
	Drop   = verdict(nfDrop, "")
	Return = verdict(unix.NFT_RETURN, "")
)

// Jump sends packets to a chain. Packets that return from the chain continue with the
// next rule.
func Jump(chain string) Rule { return verdict(unix.NFT_JUMP, chain) }

// GoTo sends packets to a chain. The packets do not return from that chain.
func GoTo(chain string) Rule { return verdict(unix.NFT_GOTO, chain) }

func verdict(code int32, chain string) Rule {
	to := number(unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		to += text(unix.NFTA_VERDICT_CHAIN, chain)
	}
	return expression("immediate", number(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), nested(unix.NFTA_IMMEDIATE_DATA, nested(unix.NFTA_DATA_VERDICT, to)))
}

// Reject answers a packet with the ICMP error "port unreachable".
var Reject = expression("reject", number(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_ICMPX_UNREACH), octets(unix.NFTA_REJECT_ICMP_CODE, unix.NFT_REJECT_ICMPX_PORT_UNREACH))

// reset answers a TCP packet with a reset.
var reset = expression("reject", number(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_TCP_RST))

// StartsHere matches packets that this node itself sends.
func StartsHere() Rule {
	return expression("fib", register(unix.NFTA_FIB_DREG, 0), number(unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_F_SADDR),
		number(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)) + Equal(Native(unix.RTN_LOCAL)...)
}

// States of connection tracking, for InState.
const (
	StateInvalid uint32 = 1 << 0
	StateNew     uint32 = 1 << 3
)

// InState matches packets in one of these states of connection tracking.
func InState(states uint32) Rule {
	return loadCt(unix.NFT_CT_STATE) + And(states) + NotEqual(Native(0)...)
}

// IsTranslated matches packets of connections whose destination was translated.
func IsTranslated() Rule {
	const dstNAT = 1 << 5
	return loadCt(unix.NFT_CT_STATUS) + And(dstNAT) + NotEqual(Native(0)...)
}

// IgnoreReplies returns a rule that leaves the chain for packets in the reply
// direction. It must be the first rule of each chain of type nat that may refuse
// connections. When the kernel refuses a connection, it sends a packet to the client.
// Chains of type nat see this packet, because its destination is not translated yet.
// Without the rule, these chains might refuse or translate the packet.
func IgnoreReplies() Rule {
	const reply = 1
	return loadCt(unix.NFT_CT_DIRECTION) + Equal(reply) + Return
}
