// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
)

// What golang.org/x/sys/unix does not name.
const (
	nftaSetElemKeyEnd = 10
	nfDrop            = 0
)

// message types have the subsystem in their upper octet.
func nftMsg(t int) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(t) }

// wire encodes messages about one table.
type wire struct {
	*netfilter.Builder
	table string
}

// chain adds a message about a chain: NFT_MSG_NEWCHAIN or NFT_MSG_DELCHAIN.
func (w *wire) chain(msg int, name string) {
	at := w.Begin(nftMsg(msg), unix.NLM_F_CREATE, unix.NFPROTO_INET)
	w.String(unix.NFTA_CHAIN_TABLE, w.table)
	w.String(unix.NFTA_CHAIN_NAME, name)
	w.End(at)
}

// flushChain adds a message that empties a chain.
func (w *wire) flushChain(name string) {
	at := w.Begin(nftMsg(unix.NFT_MSG_DELRULE), 0, unix.NFPROTO_INET)
	w.String(unix.NFTA_RULE_TABLE, w.table)
	w.String(unix.NFTA_RULE_CHAIN, name)
	w.End(at)
}

// deleteChains adds messages that delete chains, which may lead to each other.
func (w *wire) deleteChains(names []string) {
	for _, name := range names {
		w.flushChain(name)
	}
	for _, name := range names {
		w.chain(unix.NFT_MSG_DELCHAIN, name)
	}
}

// rule adds a message that appends a rule, encoded by encodeRules, to a chain.
func (w *wire) rule(chain, rule string) {
	at := w.Begin(nftMsg(unix.NFT_MSG_NEWRULE), unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_INET)
	w.String(unix.NFTA_RULE_TABLE, w.table)
	w.String(unix.NFTA_RULE_CHAIN, chain)
	list := w.Nest(unix.NFTA_RULE_EXPRESSIONS)
	w.Raw([]byte(rule))
	w.EndNest(list)
	w.End(at)
}

// makeChain adds messages that make a chain with these rules, whatever it had.
func (w *wire) makeChain(name string, rules []string) {
	w.chain(unix.NFT_MSG_NEWCHAIN, name)
	w.flushChain(name)
	for _, rule := range rules {
		w.rule(name, rule)
	}
}

// maxElements is how many octets of elements a message has at most: the length of
// the attribute that holds them has 16 bits.
const maxElements = 60_000

// allElements adds messages about elements of any map: NFT_MSG_NEWSETELEM or
// NFT_MSG_DELSETELEM. It sorts elems by map.
func (w *wire) allElements(msg int, flags uint16, elems []element) {
	slices.SortStableFunc(elems, func(a, b element) int { return a.m.compare(b.m) })
	for len(elems) > 0 {
		n := 1
		for n < len(elems) && elems[n].m == elems[0].m {
			n++
		}
		w.elements(msg, flags, elems[0].m, elems[:n])
		elems = elems[n:]
	}
}

func (w *wire) elements(msg int, flags uint16, m mapID, elems []element) {
	for len(elems) > 0 {
		at := w.Begin(nftMsg(msg), flags, unix.NFPROTO_INET)
		w.String(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
		w.String(unix.NFTA_SET_ELEM_LIST_SET, m.name())
		list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for len(elems) > 0 && w.Len()-list < maxElements {
			w.element(&elems[0], msg == unix.NFT_MSG_NEWSETELEM)
			elems = elems[1:]
		}
		w.EndNest(list)
		w.End(at)
	}
}

func (w *wire) element(e *element, withData bool) {
	item := w.Nest(unix.NFTA_LIST_ELEM)
	key := e.key[:e.m.keyLen()]
	w.data(unix.NFTA_SET_ELEM_KEY, key)
	if e.m.role == sources {
		w.data(nftaSetElemKeyEnd, rangeEnd(key, e.m.addrLen(), int(e.key[maxKey-1])))
	}
	switch {
	case !withData:
	case e.m.dataLen() > 0:
		w.data(unix.NFTA_SET_ELEM_DATA, e.data[:e.m.dataLen()])
	case e.m.hasVerdicts():
		data := w.Nest(unix.NFTA_SET_ELEM_DATA)
		verdict := w.Nest(unix.NFTA_DATA_VERDICT)
		if e.chain == drop {
			w.Uint32(unix.NFTA_VERDICT_CODE, nfDrop)
		} else {
			code := int32(unix.NFT_GOTO)
			w.Uint32(unix.NFTA_VERDICT_CODE, uint32(code))
			w.String(unix.NFTA_VERDICT_CHAIN, e.chain)
		}
		w.EndNest(verdict)
		w.EndNest(data)
	}
	w.EndNest(item)
}

func (w *wire) data(attr uint16, v []byte) {
	at := w.Nest(attr)
	w.Bytes(unix.NFTA_DATA_VALUE, v...)
	w.EndNest(at)
}

// rangeEnd returns the end of the range of keys that begins with key, whose last
// addrLen octets are an address prefix of that many bits.
func rangeEnd(key []byte, addrLen, bits int) []byte {
	end := append([]byte(nil), key...)
	addr := end[len(end)-addrLen:]
	for i := bits; i < 8*addrLen; i++ {
		addr[i/8] |= 0x80 >> (i % 8)
	}
	return end
}

// foreign is an element that this package could not have made, as the kernel
// encodes it.
type foreign []byte

// deleteForeign adds messages that delete such elements of a map.
func (w *wire) deleteForeign(m mapID, elems []foreign) {
	for _, e := range elems {
		at := w.Begin(nftMsg(unix.NFT_MSG_DELSETELEM), 0, unix.NFPROTO_INET)
		w.String(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
		w.String(unix.NFTA_SET_ELEM_LIST_SET, m.name())
		list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		item := w.Nest(unix.NFTA_LIST_ELEM)
		for attr, v := range netfilter.Attributes(e) {
			if attr == unix.NFTA_SET_ELEM_KEY || attr == nftaSetElemKeyEnd {
				key := w.Nest(attr)
				w.Raw(v)
				w.EndNest(key)
			}
		}
		w.EndNest(item)
		w.EndNest(list)
		w.End(at)
	}
}

// decodeElements calls f with each element of a NFT_MSG_NEWSETELEM message about
// the map m. One that this package could not have made comes as it is.
func decodeElements(m mapID, payload []byte, chains map[string]string, f func(element, foreign)) {
	for attr, list := range netfilter.Attributes(payload) {
		if attr != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		for _, item := range netfilter.Attributes(list) {
			if e, ok := decodeElement(m, item, chains); ok {
				f(e, nil)
			} else {
				f(e, item)
			}
		}
	}
}

func decodeElement(m mapID, item []byte, chains map[string]string) (e element, ok bool) {
	e.m = m
	keyLen, dataLen := m.keyLen(), m.dataLen()
	var end []byte
	for attr, v := range netfilter.Attributes(item) {
		switch attr {
		case unix.NFTA_SET_ELEM_KEY:
			for _, key := range netfilter.Attributes(v) {
				ok = len(key) == keyLen
				copy(e.key[:keyLen], key)
			}
		case nftaSetElemKeyEnd:
			for _, key := range netfilter.Attributes(v) {
				end = key
			}
		case unix.NFTA_SET_ELEM_DATA:
			for attr, data := range netfilter.Attributes(v) {
				if attr == unix.NFTA_DATA_VERDICT {
					e.chain = decodeVerdict(data, chains)
				} else {
					ok = ok && len(data) == dataLen
					copy(e.data[:dataLen], data)
				}
			}
		}
	}
	if m.role == sources {
		bits, isPrefix := prefixLen(e.key[keyLen-m.addrLen():keyLen], end, m.addrLen())
		e.key[maxKey-1] = bits
		ok = ok && isPrefix
	}
	return e, ok
}

// prefixLen returns the length of the prefix that goes from first to the last
// address of end, a key.
func prefixLen(first, end []byte, addrLen int) (bits byte, ok bool) {
	if len(end) < addrLen {
		return 0, false
	}
	last := end[len(end)-addrLen:]
	for bits := range 8*addrLen + 1 {
		prefix := netip.PrefixFrom(addrOf(first), bits)
		if prefix == prefix.Masked() && string(rangeEnd(first, addrLen, bits)) == string(last) {
			return byte(bits), true
		}
	}
	return 0, false
}

// decodeVerdict returns the chain of a verdict. It takes names from chains, so
// that a name is in memory once.
func decodeVerdict(b []byte, chains map[string]string) (chain string) {
	var code int32
	for attr, v := range netfilter.Attributes(b) {
		switch attr {
		case unix.NFTA_VERDICT_CODE:
			code = int32(binary.BigEndian.Uint32(v))
		case unix.NFTA_VERDICT_CHAIN:
			name, ok := chains[string(v)]
			if !ok {
				name = netfilter.String(v)
				chains[string(v)] = name
			}
			chain = name
		}
	}
	switch {
	case code == nfDrop:
		return drop
	case code == unix.NFT_GOTO:
		return chain
	default:
		return fmt.Sprintf("verdict %d %s", code, chain)
	}
}
