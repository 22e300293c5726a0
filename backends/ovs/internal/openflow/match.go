// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"encoding/binary"
	"iter"
	"net/netip"
)

// The EtherTypes of IP.
const (
	IPv4 = 0x0800
	IPv6 = 0x86dd
)

// The bits of the state that connection tracking assigns to a packet.
const (
	StateNew     = 0x01
	StateReply   = 0x08
	StateTracked = 0x20
	StateDNAT    = 0x80
)

// Bits are bits of a field with their mask. A bit outside Mask matches any value.
type Bits struct{ Value, Mask uint64 }

// registers is the number of 64-bit registers.
const registers = 8

// Match selects IP packets. The zero value of a field matches any packet, except that
// EtherType is required.
type Match struct {
	InPort    uint32
	EtherType uint16
	// Source and Destination are of the family of EtherType.
	Source, Destination netip.Prefix
	// Protocol is required if Port is set. It must be TCP, UDP or SCTP then.
	Protocol uint8
	Port     uint16
	// Registers are the 64-bit registers: Registers[0] consists of reg0 (the more significant
	// half) and reg1, and so on.
	Registers [registers]Bits
	// State, Zone and Mark belong to connection tracking.
	State, Zone, Mark Bits
}

// A field of a match has a class and a number within this class.
const (
	classNXM1     = 0x0001
	classBasic    = 0x8000
	classRegister = 0x8001 // 64-bit registers
	// classStatistics is not for matches.
	classStatistics = 0x8002
)

const (
	fieldInPort    = classBasic<<16 | 0<<9
	fieldEtherType = classBasic<<16 | 5<<9
	fieldProtocol  = classBasic<<16 | 10<<9
	fieldIPv4Src   = classBasic<<16 | 11<<9
	fieldIPv4Dst   = classBasic<<16 | 12<<9
	fieldTCPSrc    = classBasic<<16 | 13<<9
	fieldTCPDst    = classBasic<<16 | 14<<9
	fieldUDPSrc    = classBasic<<16 | 15<<9
	fieldUDPDst    = classBasic<<16 | 16<<9
	fieldSCTPSrc   = classBasic<<16 | 17<<9
	fieldSCTPDst   = classBasic<<16 | 18<<9
	fieldIPv6Src   = classBasic<<16 | 26<<9
	fieldIPv6Dst   = classBasic<<16 | 27<<9
	fieldReg0      = classNXM1 << 16 // the 32-bit register n is fieldReg0 + n<<9
	fieldCTState   = classNXM1<<16 | 105<<9
	fieldCTZone    = classNXM1<<16 | 106<<9
	fieldCTMark    = classNXM1<<16 | 107<<9
	fieldXXReg0    = classNXM1<<16 | 111<<9 // the 128-bit register n is fieldXXReg0 + n<<9
	fieldXReg0     = classRegister << 16    // the 64-bit register n is fieldXReg0 + n<<9
	hasMask        = 1 << 8
)

// protocolPorts maps a protocol to the field of its destination port.
var protocolPorts = map[uint8]uint32{6: fieldTCPDst, 17: fieldUDPDst, 132: fieldSCTPDst}

// Encode returns the fields of the match.
func (m *Match) Encode() string {
	b := make([]byte, 0, 64)
	if m.InPort != 0 {
		b = appendField(b, fieldInPort, uint64(m.InPort), 4)
	}
	b = appendField(b, fieldEtherType, uint64(m.EtherType), 2)
	src, dst := uint32(fieldIPv4Src), uint32(fieldIPv4Dst)
	if m.EtherType == IPv6 {
		src, dst = fieldIPv6Src, fieldIPv6Dst
	}
	b = appendPrefix(b, src, m.Source)
	b = appendPrefix(b, dst, m.Destination)
	if m.Protocol != 0 {
		b = appendField(b, fieldProtocol, uint64(m.Protocol), 1)
	}
	if m.Port != 0 {
		b = appendField(b, protocolPorts[m.Protocol], uint64(m.Port), 2)
	}
	for i, r := range m.Registers {
		b = appendBits(b, fieldXReg0+uint32(i)<<9, r, 8)
	}
	b = appendBits(b, fieldCTState, m.State, 4)
	b = appendBits(b, fieldCTZone, m.Zone, 2)
	b = appendBits(b, fieldCTMark, m.Mark, 4)
	return string(b)
}

func appendUint(b []byte, value uint64, size int) []byte {
	var all [8]byte
	binary.BigEndian.PutUint64(all[:], value)
	return append(b, all[8-size:]...)
}

// appendField appends a field and its required value. The value has size bytes.
func appendField(b []byte, field uint32, value uint64, size int) []byte {
	b = binary.BigEndian.AppendUint32(b, field|uint32(size))
	return appendUint(b, value, size)
}

func appendBits(b []byte, field uint32, bits Bits, size int) []byte {
	switch bits.Mask {
	case 0:
		return b
	case 1<<(8*size) - 1:
		return appendField(b, field, bits.Value, size)
	}
	b = binary.BigEndian.AppendUint32(b, field|hasMask|uint32(2*size))
	return appendUint(appendUint(b, bits.Value, size), bits.Mask, size)
}

func appendPrefix(b []byte, field uint32, p netip.Prefix) []byte {
	if p.Bits() <= 0 { // no prefix, or all addresses
		return b
	}
	addr := p.Masked().Addr().AsSlice()
	if p.IsSingleIP() {
		b = binary.BigEndian.AppendUint32(b, field|uint32(len(addr)))
		return append(b, addr...)
	}
	b = binary.BigEndian.AppendUint32(b, field|hasMask|uint32(2*len(addr)))
	b = append(b, addr...)
	for i := range addr {
		ones := min(max(p.Bits()-8*i, 0), 8)
		b = append(b, ^byte(0xff>>ones))
	}
	return b
}

// Destination returns the destination address, the protocol and the destination port that a
// match requires. A result is zero if the match does not require a single value. The match
// must be a result of [Match.Encode].
func Destination(match string) (addr netip.Addr, protocol uint8, port uint16) {
	for field, value := range fields(match) {
		switch size := len(value); {
		case field == fieldIPv4Dst, field == fieldIPv6Dst:
			addr, _ = netip.AddrFromSlice(value)
		case field == fieldProtocol && size == 1:
			protocol = value[0]
		case (field == fieldTCPDst || field == fieldUDPDst || field == fieldSCTPDst) && size == 2:
			port = binary.BigEndian.Uint16(value)
		}
	}
	return addr, protocol, port
}

// Register64 returns the value that a match requires in a 64-bit register. Bits that may have
// any value are 0.
func Register64(match string, register int) uint64 {
	for field, value := range fields(match) {
		if field&^hasMask == fieldXReg0+uint32(register)<<9 && len(value) >= 8 {
			return binary.BigEndian.Uint64(value)
		}
	}
	return 0
}

// fields yields each field of a match with its value. If there is a mask, it is after the
// value.
func fields(match string) iter.Seq2[uint32, []byte] {
	return func(yield func(uint32, []byte) bool) {
		for b := []byte(match); len(b) >= 4; {
			header := binary.BigEndian.Uint32(b)
			size := int(header & 0xff)
			if len(b) < 4+size || !yield(header&^0xff, b[4:4+size]) {
				return
			}
			b = b[4+size:]
		}
	}
}
