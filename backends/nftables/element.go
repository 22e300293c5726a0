// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
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

// number returns the number with which the key begins.
func (id *elementID) number() uint32 { return binary.NativeEndian.Uint32(id.key[:]) }

// number returns the number in the data.
func (v *value) number() uint32 { return binary.NativeEndian.Uint32(v.data[:]) }

// The struct value has the fields of an element except the key. If the element belongs to
// a set, all these fields are zero.
type value struct {
	data [20]byte
	// counted is true if the element has a counter. Only elements of maps for which
	// mapID.canCount is true have a counter.
	counted bool
	// text is the name of the verdict's target chain in kindClasses. In kindFrontends, it is
	// the comment: the name of the service port, for people who read the table.
	text string
}

type element struct {
	elementID
	value
}

// elementRef has pointers to the ID and the value of an element.
type elementRef struct {
	*elementID
	*value
}

func (e *element) ref() elementRef { return elementRef{&e.elementID, &e.value} }

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
	case e.m.hasVerdicts() && e.text != "":
		s += " : goto " + e.text
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
func format(types []nft.Type, b []byte) string {
	var parts []string
	for _, t := range types {
		v := b[:t.Length]
		b = b[(t.Length+3)&^3:]
		switch t {
		case nft.TypeProtocol:
			parts = append(parts, protocolName(v[0]))
		case nft.TypePort:
			parts = append(parts, fmt.Sprint(binary.BigEndian.Uint16(v)))
		case nft.TypePriority:
			parts = append(parts, formatNumber(binary.NativeEndian.Uint32(v)))
		case nft.TypeInteger:
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
	if p := kernelnode.ProtocolOf(number); p != api.UnknownProtocol {
		return strings.ToLower(p.String())
	}
	return fmt.Sprint(number)
}

// writeElements adds messages of type NFT_MSG_NEWSETELEM or NFT_MSG_DELSETELEM about elems,
// one map after the other.
func writeElements(w *nft.Writer, msg int, flags uint16, elems ...elementRef) {
	w.Grow(len(elems) * usualLen)
	byMap := map[mapID][]elementRef{}
	for _, e := range elems {
		byMap[e.m] = append(byMap[e.m], e)
	}
	for _, m := range slices.SortedFunc(maps.Keys(byMap), mapID.compare) {
		list := byMap[m]
		w.Elements(msg, flags, m.name(), len(list), func(i int) { list[i].encode(w, msg == unix.NFT_MSG_NEWSETELEM) })
	}
}

// usualLen is the length of most encoded elements in octets, or a little more.
const usualLen = 56

// encodeKey adds the key of an element to a message.
func (id *elementID) encodeKey(w *nft.Writer) {
	w.Value(unix.NFTA_SET_ELEM_KEY, id.key[:id.m.keyLen()])
}

// encode adds the attributes of e to a message.
func (e elementRef) encode(w *nft.Writer, withData bool) {
	e.encodeKey(w)
	switch {
	case !withData:
	case e.m.dataLen() > 0:
		w.Value(unix.NFTA_SET_ELEM_DATA, e.data[:e.m.dataLen()])
	case e.m.hasVerdicts():
		data := w.Nest(unix.NFTA_SET_ELEM_DATA)
		verdict := w.Nest(unix.NFTA_DATA_VERDICT)
		code := int32(unix.NFT_GOTO)
		w.Uint32(unix.NFTA_VERDICT_CODE, uint32(code))
		w.String(unix.NFTA_VERDICT_CHAIN, e.text)
		w.EndNest(verdict)
		w.EndNest(data)
	}
	if withData && e.counted {
		w.Counter()
	}
	if withData && e.m.kind == kindFrontends && e.text != "" {
		w.Bytes(unix.NFTA_SET_ELEM_USERDATA, slices.Concat([]byte{0, byte(len(e.text) + 1)}, []byte(e.text), []byte{0})...)
	}
}

// deleteForeign adds a message that deletes the elements whose encodings are in elems.
func deleteForeign(w *nft.Writer, m mapID, elems [][]byte) {
	w.Elements(unix.NFT_MSG_DELSETELEM, 0, m.name(), len(elems), func(i int) {
		w.Bytes(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, netfilter.Attribute(elems[i], unix.NFTA_SET_ELEM_KEY)...)
	})
}

// describeElement describes an encoded element for errors, see nft.NewConn.
func describeElement(set string, item []byte) string {
	for _, m := range allMaps() {
		if m.name() == set {
			e, _ := decodeElement(m, item, map[string]string{})
			return e.String()
		}
	}
	return ""
}

// decodeElement decodes an element of m. If this package cannot have made the element, ok is
// false. The argument names is a cache, so that elements with the same chain share one
// string.
func decodeElement(m mapID, item []byte, names map[string]string) (e element, ok bool) {
	e.m = m
	key, number := nft.Value(item, unix.NFTA_SET_ELEM_KEY), nft.Value(item, unix.NFTA_SET_ELEM_DATA)
	ok = len(key) == m.keyLen() && len(number) == m.dataLen()
	copy(e.key[:m.keyLen()], key)
	copy(e.data[:m.dataLen()], number)
	if m.canCount() {
		_, e.counted = nft.Counted(item)
	}
	if m.hasVerdicts() {
		data := netfilter.Attribute(item, unix.NFTA_SET_ELEM_DATA)
		e.text = decodeVerdict(netfilter.Attribute(data, unix.NFTA_DATA_VERDICT), names)
	}
	if v := netfilter.Attribute(item, unix.NFTA_SET_ELEM_USERDATA); len(v) >= 3 && v[0] == 0 && int(v[1]) == len(v)-2 {
		e.text += netfilter.String(v[2:])
	}
	switch m.kind {
	case kindClasses:
		c, isNumber := classOfElement(&e.elementID, &e.value)
		ok = ok && isNumber && e.text == c.name()
	case kindSources:
		_, isRange := sourcelists.ParseKey(key)
		ok = ok && isRange
	case kindHairpins:
		n := nft.AddrLen(m.family)
		ok = ok && bytes.Equal(key[:n], key[n:2*n])
	}
	return e, ok
}

// decodeVerdict returns the name of a verdict's target chain.
func decodeVerdict(verdict []byte, names map[string]string) string {
	code := int32(netfilter.Uint32(netfilter.Attribute(verdict, unix.NFTA_VERDICT_CODE)))
	b := netfilter.Attribute(verdict, unix.NFTA_VERDICT_CHAIN)
	chain, ok := names[string(b)]
	if !ok {
		chain = netfilter.String(b)
		names[string(b)] = chain
	}
	if code != unix.NFT_GOTO {
		return fmt.Sprintf("verdict %d %s", code, chain) // a verdict of another program
	}
	return chain
}
