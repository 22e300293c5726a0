// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
)

// addElement adds e to the list of elements that is being encoded.
func (w *wire) addElement(e *element, withData bool) {
	item := w.Nest(unix.NFTA_LIST_ELEM)
	key := e.key[:e.m.keyLen()]
	w.data(unix.NFTA_SET_ELEM_KEY, key)
	switch {
	case !withData:
	case e.m.dataLen() > 0:
		w.data(unix.NFTA_SET_ELEM_DATA, e.data[:e.m.dataLen()])
	case e.m.hasVerdicts():
		data := w.Nest(unix.NFTA_SET_ELEM_DATA)
		verdict := w.Nest(unix.NFTA_DATA_VERDICT)
		code := int32(unix.NFT_GOTO)
		w.Uint32(unix.NFTA_VERDICT_CODE, uint32(code))
		w.String(unix.NFTA_VERDICT_CHAIN, e.chain)
		w.EndNest(verdict)
		w.EndNest(data)
	}
	if withData && e.comment != "" {
		w.Bytes(unix.NFTA_SET_ELEM_USERDATA, slices.Concat([]byte{0, byte(len(e.comment) + 1)}, []byte(e.comment), []byte{0})...)
	}
	w.EndNest(item)
}

func (w *wire) data(attr uint16, v []byte) {
	at := w.Nest(attr)
	w.Bytes(unix.NFTA_DATA_VALUE, v...)
	w.EndNest(at)
}

// decodeElements calls f with the encoding of each element of a NFT_MSG_NEWSETELEM message.
func decodeElements(attributes []byte, f func(item []byte)) {
	for _, item := range netfilter.Attributes(netfilter.Attribute(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		f(item)
	}
}

// decodeElement decodes an element of m. If this package cannot have made the element, ok is
// false. The argument names is a cache, so that elements with the same chain share one
// string.
func decodeElement(m mapID, item []byte, names map[string]string) (e element, ok bool) {
	e.m = m
	key := netfilter.Attribute(netfilter.Attribute(item, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
	data := netfilter.Attribute(item, unix.NFTA_SET_ELEM_DATA)
	number := netfilter.Attribute(data, unix.NFTA_DATA_VALUE)
	ok = len(key) == m.keyLen() && len(number) == m.dataLen()
	copy(e.key[:m.keyLen()], key)
	copy(e.data[:m.dataLen()], number)
	if m.hasVerdicts() {
		e.chain = decodeVerdict(netfilter.Attribute(data, unix.NFTA_DATA_VERDICT), names)
	}
	if v := netfilter.Attribute(item, unix.NFTA_SET_ELEM_USERDATA); len(v) >= 3 && v[0] == 0 && int(v[1]) == len(v)-2 {
		e.comment = netfilter.String(v[2:])
	}
	switch m.kind {
	case kindClasses:
		c, isNumber := classOfElement(&e.elementID, &e.value)
		ok = ok && isNumber && e.chain == c.name()
	case kindSources:
		_, isRange := sourcelists.ParseKey(key)
		ok = ok && isRange
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
		return fmt.Sprintf("verdict %d %s", code, chain) // of another program
	}
	return chain
}
