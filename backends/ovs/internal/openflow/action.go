// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Actions is a sequence of actions. A flow without actions drops packets.
type Actions string

const (
	actionGroup        = 22
	actionSetField     = 25
	actionCopyField    = 28
	actionExperimenter = 0xffff

	niciraVendor   = 0x00002320
	niciraResubmit = 14
	niciraPush     = 27
	niciraPop      = 28
	niciraCT       = 35
	niciraNAT      = 36
	niciraLearn    = 45
)

// padded appends zeros, so that the length is a multiple of eight.
func padded(b []byte) []byte { return append(b, make([]byte, -len(b)&7)...) }

// action returns an action with a body.
func action(kind uint16, body []byte) Actions {
	b := binary.BigEndian.AppendUint16(nil, kind)
	b = padded(append(b, append([]byte{0, 0}, body...)...))
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	return Actions(b)
}

func nicira(subtype uint16, body []byte) Actions {
	b := binary.BigEndian.AppendUint32(nil, niciraVendor)
	b = binary.BigEndian.AppendUint16(b, subtype)
	return action(actionExperimenter, append(b, body...))
}

// Resubmit searches a table and executes the actions of the flow that it finds.
func Resubmit(table uint8) Actions {
	const inPort = 0xfff8
	return nicira(niciraResubmit, []byte{inPort >> 8, inPort & 0xff, table, 0, 0, 0})
}

// ToGroup executes one bucket of a group.
func ToGroup(id uint32) Actions { return action(actionGroup, binary.BigEndian.AppendUint32(nil, id)) }

// SetRegister sets bits of a 32-bit register. Bits.Mask has 32 bits.
func SetRegister(register int, bits Bits) Actions {
	return action(actionSetField, appendBits(nil, fieldReg0+uint32(register)<<9, bits, 4))
}

// SetRegister64 sets a 64-bit register.
func SetRegister64(register int, value uint64) Actions {
	return action(actionSetField, appendField(nil, fieldXReg0+uint32(register)<<9, value, 8))
}

// Push puts the value of a 128-bit register on the stack of the packet.
func Push(register int) Actions { return stack(niciraPush, register) }

// Pop moves the value on top of the stack of the packet into a 128-bit register.
func Pop(register int) Actions { return stack(niciraPop, register) }

func stack(subtype uint16, register int) Actions {
	b := []byte{0, 0} // the first bit of the field
	b = binary.BigEndian.AppendUint32(b, fieldXXReg0+uint32(register)<<9|16)
	return nicira(subtype, binary.BigEndian.AppendUint16(b, 128))
}

// CopyToMark copies a bit of a 32-bit register to bit 0 of the connection's mark. It is for
// CT.Commit.
func CopyToMark(register int, bit uint16) Actions {
	b := []byte{0, 1} // one bit
	b = binary.BigEndian.AppendUint16(b, bit)
	b = append(b, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, fieldReg0+uint32(register)<<9|4)
	b = binary.BigEndian.AppendUint32(b, fieldCTMark|4)
	return action(actionCopyField, b)
}

// CT is an action of connection tracking.
type CT struct {
	Zone uint16
	// Table is the table in which processing of the packet continues.
	Table uint8
	// Commit records the connection.
	Commit bool
	// Actions are nested actions: address translation, and actions that change the mark
	// of a committed connection.
	Actions Actions
}

// Action returns the action.
func (c CT) Action() Actions {
	b := []byte{0, 0, 0, 0, 0, 0}
	if c.Commit {
		b[1] = 1
	}
	b = binary.BigEndian.AppendUint16(b, c.Zone)
	b = append(b, c.Table, 0, 0, 0, 0, 0)
	return nicira(niciraCT, append(b, c.Actions...))
}

// The kinds of address translation, and the fields of a translation.
const (
	natSource      = 1
	natDestination = 2

	natIPv4      = 1 << 0
	natLastIPv4  = 1 << 1
	natIPv6      = 1 << 2
	natLastIPv6  = 1 << 3
	natFirstPort = 1 << 4
	natLastPort  = 1 << 5
)

// Translate translates packets of connections for which a translation was committed.
func Translate() Actions { return nat(0, nil, nil) }

// TranslateDestination replaces the destination address and, if port is not 0, the
// destination port.
func TranslateDestination(addr netip.Addr, port uint16) Actions {
	var ports []uint16
	if port != 0 {
		ports = append(ports, port)
	}
	return nat(natDestination, []netip.Addr{addr}, ports)
}

// TranslateSource replaces the source address by an address from a range, and the source
// port by a port from another range.
func TranslateSource(first, last netip.Addr, firstPort, lastPort uint16) Actions {
	return nat(natSource, slices.Compact([]netip.Addr{first, last}), []uint16{firstPort, lastPort})
}

// AvoidClash keeps the addresses of a new connection. It replaces the source port if
// another connection of the zone already has the same addresses and ports.
func AvoidClash() Actions { return nat(natSource, nil, nil) }

// nat returns the action for a range of addresses of one family and a range of ports. Each
// range is empty, or has one value, or has the first and the last value.
func nat(flags byte, addrs []netip.Addr, ports []uint16) Actions {
	const present = 5 // the offset of the bits that say which values follow
	b := []byte{0, 0, 0, flags, 0, 0}
	for i, a := range addrs {
		b[present] |= [][2]byte{{natIPv4, natIPv6}, {natLastIPv4, natLastIPv6}}[i][a.BitLen()/128]
		b = append(b, a.AsSlice()...)
	}
	for i, p := range ports {
		b[present] |= []byte{natFirstPort, natLastPort}[i]
		b = binary.BigEndian.AppendUint16(b, p)
	}
	return nicira(niciraNAT, b)
}

// Learn adds a flow that matches the packet's source address, unless such a flow exists.
type Learn struct {
	Table    uint8
	Priority uint16
	Cookie   uint64
	// Limit is the largest number of flows with Cookie in Table. Learn adds no more flows.
	Limit uint32
	// Idle is the time without packets after which the switch deletes the flow. The switch
	// counts whole seconds, at most 65,535.
	Idle      time.Duration
	EtherType uint16
	// The flow matches packets whose 64-bit register MatchRegister has the same value as in
	// this packet.
	MatchRegister int
	// The flow loads LoadAddress into the 128-bit register AddressRegister, and LoadPort into
	// the more significant half of the 32-bit register PortRegister.
	AddressRegister int
	LoadAddress     [16]byte
	PortRegister    int
	LoadPort        uint16
}

// Action returns the action.
func (l Learn) Action() Actions {
	const (
		immediate    = 1 << 13
		load         = 1 << 11
		nxmEtherType = 0x0000<<16 | 3<<9 | 2
		nxmIPv4Src   = 0x0000<<16 | 7<<9 | 4
		nxmIPv6Src   = classNXM1<<16 | 19<<9 | 16
	)
	var b []byte
	u16 := func(values ...uint16) {
		for _, v := range values {
			b = binary.BigEndian.AppendUint16(b, v)
		}
	}
	field := func(header uint32, firstBit uint16) {
		b = binary.BigEndian.AppendUint32(b, header)
		u16(firstBit)
	}
	u16(uint16(min(max(l.Idle/time.Second, 1), 65535)), 0, l.Priority)
	b = binary.BigEndian.AppendUint64(b, l.Cookie)
	u16(0)
	b = append(b, l.Table, 0)
	u16(0, 0)
	b = binary.BigEndian.AppendUint32(b, l.Limit)
	u16(0, 0)
	u16(immediate|16, l.EtherType)
	field(nxmEtherType, 0)
	source, bits := uint32(nxmIPv4Src), uint16(32)
	if l.EtherType == IPv6 {
		source, bits = nxmIPv6Src, 128
	}
	u16(bits)
	field(source, 0)
	field(source, 0)
	register := fieldXReg0 + uint32(l.MatchRegister)<<9 | 8
	u16(64)
	field(register, 0)
	field(register, 0)
	u16(immediate | load | 128)
	b = append(b, l.LoadAddress[:]...)
	field(fieldXXReg0+uint32(l.AddressRegister)<<9|16, 0)
	u16(immediate|load|16, l.LoadPort)
	field(fieldReg0+uint32(l.PortRegister)<<9|4, 16)
	return nicira(niciraLearn, b)
}

// Numbers returns the IDs of the groups that actions execute, and the values that they
// write into whole 32-bit registers.
func Numbers(actions Actions) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for kind, body := range each(actions) {
			var value []byte
			switch {
			case kind == actionGroup && len(body) >= 4:
				value = body
			case kind == actionSetField && len(body) >= 8 && binary.BigEndian.Uint16(body) == classNXM1 && body[3] == 4:
				value = body[4:]
			default:
				continue
			}
			if !yield(binary.BigEndian.Uint32(value)) {
				return
			}
		}
	}
}

// GroupOf returns the ID of the group that actions execute, or 0 if they execute none.
func GroupOf(actions Actions) uint32 {
	for kind, body := range each(actions) {
		if kind == actionGroup && len(body) >= 4 {
			return binary.BigEndian.Uint32(body)
		}
	}
	return 0
}

// TranslatedTo returns the destination to which actions translate new connections. It
// returns the zero AddrPort if they do not translate destinations.
func TranslatedTo(actions Actions) (to netip.AddrPort) {
	walk(actions, func(subtype uint16, body []byte) {
		const fixed = 14 // the rest of the action of connection tracking
		if subtype == niciraCT && len(body) >= fixed {
			walk(Actions(body[fixed:]), func(subtype uint16, body []byte) {
				if subtype == niciraNAT && len(body) >= 6 && body[3]&natDestination != 0 {
					to = parseRange(body[5], body[6:])
				}
			})
		}
	})
	return to
}

// walk calls f for each action of the vendor Nicira.
func walk(actions Actions, f func(subtype uint16, body []byte)) {
	for kind, body := range each(actions) {
		if kind == actionExperimenter && len(body) >= 6 && binary.BigEndian.Uint32(body) == niciraVendor {
			f(binary.BigEndian.Uint16(body[4:]), body[6:])
		}
	}
}

// each returns the kinds and bodies of actions. It ends at an action that is not valid.
func each(actions Actions) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for b := []byte(actions); len(b) >= 4; {
			size := int(binary.BigEndian.Uint16(b[2:]))
			if size < 4 || size > len(b) || !yield(binary.BigEndian.Uint16(b), b[4:size]) {
				return
			}
			b = b[size:]
		}
	}
}

// parseRange returns the address and port of a translation.
func parseRange(present byte, b []byte) netip.AddrPort {
	size := 4
	if present&natIPv6 != 0 {
		size = 16
	}
	if len(b) < size {
		return netip.AddrPort{}
	}
	addr, _ := netip.AddrFromSlice(b[:size])
	if present&natFirstPort == 0 || len(b) < size+2 {
		return netip.AddrPortFrom(addr, 0)
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[size:]))
}

// Join returns all actions in order.
func Join(all ...Actions) Actions {
	if len(all) == 1 {
		return all[0] // many flows share the memory of their actions
	}
	var text strings.Builder
	for _, a := range all {
		text.WriteString(string(a))
	}
	return Actions(text.String())
}
