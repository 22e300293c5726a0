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

// number returns the number with which the key begins.
func (id *elementID) number() uint32 { return binary.NativeEndian.Uint32(id.key[:]) }

// number returns the number in the data.
func (v *value) number() uint32 { return binary.NativeEndian.Uint32(v.data[:]) }

// The struct value has the fields of an element except the key. If the element belongs to
// a set, all these fields are zero.
type value struct {
	data [20]byte
	// chain is the name of the verdict's target chain.
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
	w.id.key[w.at] = p.Number()
	w.at += 4
}

func (w *keyWriter) port(p int32) {
	binary.BigEndian.PutUint16(w.id.key[w.at:], uint16(p))
	w.at += 4
}

// protocolUnless adds the protocol unless omit is true.
func (w *keyWriter) protocolUnless(omit bool, p api.Protocol) {
	if !omit {
		w.protocol(p)
	}
}

func (w *keyWriter) number(number uint32) {
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

// addressElement returns the element for an address in the set of this kind.
func addressElement(kind mapKind, a netip.Addr) element {
	e := element{elementID: elementID{m: mapID{kind: kind, family: api.FamilyOf(a)}}}
	w := keyWriter{id: &e.elementID}
	w.addr(a)
	return e
}

func numberValue(number uint32) (v value) {
	binary.NativeEndian.PutUint32(v.data[:], number)
	return v
}

func endpointValue(a netip.Addr, port int32) value {
	var v value
	n := copy(v.data[:], a.AsSlice())
	binary.BigEndian.PutUint16(v.data[n:], uint16(port))
	return v
}

// String returns the name of the map and the element, in the format of nft.
func (e element) String() string {
	s := e.elementID.String()
	data := e.m.description().data
	switch {
	case e.chain != "":
		s += " : goto " + e.chain
	case len(data) > 0:
		s += " : " + format(data, e.data[:])
	}
	return s
}

// String returns the name of the map and the element's key in the format of nft.
func (id elementID) String() string {
	return id.m.name() + " " + format(id.m.description().key, id.key[:])
}

// format returns the encoding of several values in the format of nft.
func format(types []datatype, b []byte) string {
	var parts []string
	for _, t := range types {
		v := b[:t.length]
		b = b[(t.length+3)&^3:]
		switch t {
		case typeProtocol:
			parts = append(parts, protocolName(v[0]))
		case typePort:
			parts = append(parts, fmt.Sprint(binary.BigEndian.Uint16(v)))
		case typePriority:
			parts = append(parts, formatNumber(binary.NativeEndian.Uint32(v)))
		case typeInteger:
			parts = append(parts, fmt.Sprint(binary.NativeEndian.Uint32(v)))
		default:
			parts = append(parts, addrOf(v).String())
		}
	}
	return strings.Join(parts, " . ")
}

func formatNumber(number uint32) string { return fmt.Sprintf("%x:%x", number>>16, number&0xffff) }

func addrOf(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

func protocolName(number byte) string {
	if p := api.ProtocolOf(number); p != api.UnknownProtocol {
		return strings.ToLower(p.String())
	}
	return fmt.Sprint(number)
}
