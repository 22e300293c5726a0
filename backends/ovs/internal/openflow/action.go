// SPDX-License-Identifier: Apache-2.0

package openflow

import (
	"encoding/binary"
	"net/netip"
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
	niciraLearn    = 16
	niciraCT       = 35
	niciraNAT      = 36
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
	// Actions are nested actions: address translation, and actions that change the mark of a
	// connection that is committed.
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
	natIPv6      = 1 << 2
	natFirstPort = 1 << 4
	natLastPort  = 1 << 5
)

// Translate translates packets of connections that a translation was committed for.
func Translate() Actions { return nat(0, netip.Addr{}, 0, 0) }

// TranslateDestination replaces the destination address and, if port is not 0, the
// destination port.
func TranslateDestination(addr netip.Addr, port uint16) Actions {
	return nat(natDestination, addr, port, 0)
}

// TranslateSource replaces the source address, and the source port by one from a range.
func TranslateSource(addr netip.Addr, first, last uint16) Actions {
	return nat(natSource, addr, first, last)
}

func nat(flags byte, addr netip.Addr, first, last uint16) Actions {
	b := []byte{0, 0, 0, flags, 0, 0}
	present := &b[5]
	switch {
	case addr.Is4():
		*present |= natIPv4
	case addr.Is6():
		*present |= natIPv6
	}
	if first != 0 {
		*present |= natFirstPort
	}
	if last != 0 {
		*present |= natLastPort
	}
	b = append(b, addr.AsSlice()...)
	if first != 0 {
		b = binary.BigEndian.AppendUint16(b, first)
	}
	if last != 0 {
		b = binary.BigEndian.AppendUint16(b, last)
	}
	return nicira(niciraNAT, b)
}

// Learn adds a flow with the packet's source address, unless such a flow exists.
type Learn struct {
	Table    uint8
	Priority uint16
	Cookie   uint64
	// Idle is the time without packets after which the switch deletes the flow. The switch
	// counts whole seconds, at most 65,535.
	Idle      time.Duration
	EtherType uint16
	// The flow matches packets whose 32-bit register MatchRegister has the value MatchValue.
	MatchRegister int
	MatchValue    uint32
	// The flow loads LoadValue into the 64-bit register LoadRegister.
	LoadRegister int
	LoadValue    uint64
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
	field := func(header uint32) {
		b = binary.BigEndian.AppendUint32(b, header)
		u16(0) // the first bit of the field
	}
	u16(uint16(min(max(l.Idle/time.Second, 1), 65535)), 0, l.Priority)
	b = binary.BigEndian.AppendUint64(b, l.Cookie)
	u16(0)
	b = append(b, l.Table, 0)
	u16(0, 0)
	u16(immediate|16, l.EtherType)
	field(nxmEtherType)
	source, bits := uint32(nxmIPv4Src), uint16(32)
	if l.EtherType == IPv6 {
		source, bits = nxmIPv6Src, 128
	}
	u16(bits)
	field(source)
	field(source)
	u16(immediate | 32)
	b = binary.BigEndian.AppendUint32(b, l.MatchValue)
	field(fieldReg0 + uint32(l.MatchRegister)<<9 | 4)
	u16(immediate | load | 64)
	b = binary.BigEndian.AppendUint64(b, l.LoadValue)
	field(fieldXReg0 + uint32(l.LoadRegister)<<9 | 8)
	return nicira(niciraLearn, b)
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
	for b := []byte(actions); len(b) >= 8; {
		size := int(binary.BigEndian.Uint16(b[2:]))
		if size < 8 || size > len(b) {
			return
		}
		if size >= 10 && binary.BigEndian.Uint16(b) == actionExperimenter && binary.BigEndian.Uint32(b[4:]) == niciraVendor {
			f(binary.BigEndian.Uint16(b[8:]), b[10:size])
		}
		b = b[size:]
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
	var text strings.Builder
	for _, a := range all {
		text.WriteString(string(a))
	}
	return Actions(text.String())
}
