// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

// maxKey is the maximum length of a key in octets. The keys of kindHairpins are the
// longest.
const maxKey = 40

// elementID identifies an element of a map. A key shorter than maxKey is followed by
// zeros.
type elementID struct {
	m   mapID
	key [maxKey]byte
}

// frontendID returns the ID of the frontend to which an element belongs. The key of the
// element begins with the key of the frontend.
func (id *elementID) frontendID() elementID {
	f := elementID{m: mapID{kindFrontends, id.m.match, id.m.family}}
	copy(f.key[:f.m.keyLen()], id.key[:])
	return f
}

// The struct value has the fields of an element except the key. If the element belongs to
// a set, all these fields are zero.
type value struct {
	data [20]byte
	// chain is the name of the verdict's target chain. In maps of frontends,
	// it is the name of the shared chain whose number is in the field data.
	chain string
	// comment has the name of a frontend's service port, for people who read the table.
	comment string
}

type element struct {
	elementID
	value
}

type keyWriter struct {
	id *elementID
	at int
}

func (w *keyWriter) addr(a netip.Addr) { w.at += copy(w.id.key[w.at:], a.AsSlice()) }

func (w *keyWriter) protocol(p api.Protocol) {
	w.id.key[w.at] = protocolNumbers[p]
	w.at += 4
}

func (w *keyWriter) port(p int32) {
	binary.BigEndian.PutUint16(w.id.key[w.at:], uint16(p))
	w.at += 4
}

func (w *keyWriter) priority(number uint32) {
	binary.NativeEndian.PutUint32(w.id.key[w.at:], number)
	w.at += 4
}

// frontendElement returns an element of the map m whose key begins with the key of f. It
// also returns the length of the key of f.
func frontendElement(m mapID, f *nodeview.Frontend) (element, int) {
	e := element{elementID: elementID{m: m}}
	w := keyWriter{id: &e.elementID}
	if m.match != matchNodePort {
		w.addr(f.Addr)
	}
	if m.match != matchAddress {
		w.protocol(f.Protocol)
		w.port(f.Port)
	}
	return e, w.at
}

// slotID returns the ID of the element for a slot or number of the frontend f in the map m.
func slotID(m mapID, f *nodeview.Frontend, slot uint32) elementID {
	e, at := frontendElement(m, f)
	w := keyWriter{&e.elementID, at}
	w.priority(slot)
	return e.elementID
}

// endpointID returns the ID of the element for the endpoint to whose number the slot e leads.
func (e *element) endpointID() elementID {
	id := e.elementID
	id.m.kind += kindEndpoints - kindSlots
	copy(id.key[id.m.keyLen()-4:], e.data[:4])
	return id
}

// addressElement returns the element for an address in the set of this kind.
func addressElement(kind mapKind, a netip.Addr) element {
	e := element{elementID: elementID{m: mapID{kind: kind, family: api.FamilyOf(a)}}}
	w := keyWriter{id: &e.elementID}
	w.addr(a)
	return e
}

func priorityValue(number uint32) (v value) {
	binary.NativeEndian.PutUint32(v.data[:], number)
	return v
}

func endpointValue(a netip.Addr, port int32) value {
	var v value
	n := copy(v.data[:], a.AsSlice())
	binary.BigEndian.PutUint16(v.data[n:], uint16(port))
	return v
}

// String returns the name of the map and the element. The format is that of nft, except
// that it shows the name of a chain instead of the number of the chain.
func (e element) String() string {
	s := e.elementID.String()
	addrLen := e.m.addrLen()
	switch {
	case e.chain != "":
		s += " : goto " + e.chain
	case e.m.kind == kindSlots || e.m.kind == kindNodeSlots || e.m.kind == kindRestricted:
		s += " : " + formatPriority(e.data[:])
	case e.m.dataLen() == addrLen:
		s += " : " + addrOf(e.data[:addrLen]).String()
	case e.m.dataLen() > 0:
		s += fmt.Sprintf(" : %s . %d", addrOf(e.data[:addrLen]), binary.BigEndian.Uint16(e.data[addrLen:]))
	}
	return s
}

// String returns the name of the map and the element's key in the format of nft.
func (id elementID) String() string {
	rest := id.key[:id.m.keyLen()]
	var parts []string
	for _, part := range id.m.description().key {
		n := (part.length + 3) &^ 3
		v := rest[:n]
		rest = rest[n:]
		switch part {
		case typeProtocol:
			parts = append(parts, protocolName(v[0]))
		case typePort:
			parts = append(parts, fmt.Sprint(binary.BigEndian.Uint16(v)))
		case typePriority:
			parts = append(parts, formatPriority(v))
		default:
			parts = append(parts, addrOf(v).String())
		}
	}
	return id.m.name() + " " + strings.Join(parts, " . ")
}

func formatPriority(v []byte) string {
	number := binary.NativeEndian.Uint32(v)
	return fmt.Sprintf("%x:%x", number>>16, number&0xffff)
}

func addrOf(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

var protocolNumbers = map[api.Protocol]byte{api.TCP: unix.IPPROTO_TCP, api.UDP: unix.IPPROTO_UDP, api.SCTP: unix.IPPROTO_SCTP}

func protocolName(number byte) string {
	for p, n := range protocolNumbers {
		if n == number {
			return strings.ToLower(p.String())
		}
	}
	return fmt.Sprint(number)
}
