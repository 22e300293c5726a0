// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// What golang.org/x/sys/unix does not name.
const (
	nftaSetElemKeyEnd = 10
	nfDrop            = 0
	nlaTypeMask       = 0x3fff
)

// message types have the subsystem in their upper octet.
func nftMsg(t int) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(t) }

// wire puts together netlink messages, one after the other.
type wire struct {
	b     []byte
	table string
}

// begin begins a message. It returns where, for end.
func (w *wire) begin(msgType, flags uint16, family byte, resID uint16) int {
	at := len(w.b)
	w.b = append(w.b, 0, 0, 0, 0) // the length, see end
	w.b = binary.NativeEndian.AppendUint16(w.b, msgType)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = append(w.b, 0, 0, 0, 0, 0, 0, 0, 0) // sequence and port, see conn.send
	w.b = append(w.b, family, unix.NFNETLINK_V0)
	w.b = binary.BigEndian.AppendUint16(w.b, resID)
	return at
}

func (w *wire) end(at int) { binary.NativeEndian.PutUint32(w.b[at:], uint32(len(w.b)-at)) }

// nest begins a nested attribute, to be ended with endNest.
func (w *wire) nest(attr uint16) int {
	at := len(w.b)
	w.b = append(w.b, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, attr|unix.NLA_F_NESTED)
	return at
}

func (w *wire) endNest(at int) { binary.NativeEndian.PutUint16(w.b[at:], uint16(len(w.b)-at)) }

func (w *wire) bytes(attr uint16, v []byte) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(4+len(v)))
	w.b = binary.NativeEndian.AppendUint16(w.b, attr)
	w.b = append(w.b, v...)
	w.pad()
}

func (w *wire) string(attr uint16, s string) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(4+len(s)+1))
	w.b = binary.NativeEndian.AppendUint16(w.b, attr)
	w.b = append(w.b, s...)
	w.b = append(w.b, 0)
	w.pad()
}

func (w *wire) pad() {
	for len(w.b)%4 != 0 {
		w.b = append(w.b, 0)
	}
}

func (w *wire) uint32(attr uint16, v uint32) {
	w.b = binary.NativeEndian.AppendUint16(w.b, 8)
	w.b = binary.NativeEndian.AppendUint16(w.b, attr)
	w.b = binary.BigEndian.AppendUint32(w.b, v)
}

// beginBatch and endBatch are around messages that take effect together.
func (w *wire) beginBatch() {
	w.end(w.begin(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
}

func (w *wire) endBatch() {
	w.end(w.begin(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
}

// chain adds a message about a chain: NFT_MSG_NEWCHAIN or NFT_MSG_DELCHAIN.
func (w *wire) chain(msg int, name string) {
	at := w.begin(nftMsg(msg), unix.NLM_F_CREATE, unix.NFPROTO_INET, 0)
	w.string(unix.NFTA_CHAIN_TABLE, w.table)
	w.string(unix.NFTA_CHAIN_NAME, name)
	w.end(at)
}

// flushChain adds a message that empties a chain.
func (w *wire) flushChain(name string) {
	at := w.begin(nftMsg(unix.NFT_MSG_DELRULE), 0, unix.NFPROTO_INET, 0)
	w.string(unix.NFTA_RULE_TABLE, w.table)
	w.string(unix.NFTA_RULE_CHAIN, name)
	w.end(at)
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
	at := w.begin(nftMsg(unix.NFT_MSG_NEWRULE), unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_INET, 0)
	w.string(unix.NFTA_RULE_TABLE, w.table)
	w.string(unix.NFTA_RULE_CHAIN, chain)
	list := w.nest(unix.NFTA_RULE_EXPRESSIONS)
	w.b = append(w.b, rule...)
	w.endNest(list)
	w.end(at)
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
		at := w.begin(nftMsg(msg), flags, unix.NFPROTO_INET, 0)
		w.string(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
		w.string(unix.NFTA_SET_ELEM_LIST_SET, m.name())
		list := w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for len(elems) > 0 && len(w.b)-list < maxElements {
			w.element(&elems[0], msg == unix.NFT_MSG_NEWSETELEM)
			elems = elems[1:]
		}
		w.endNest(list)
		w.end(at)
	}
}

func (w *wire) element(e *element, withData bool) {
	item := w.nest(unix.NFTA_LIST_ELEM)
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
		data := w.nest(unix.NFTA_SET_ELEM_DATA)
		verdict := w.nest(unix.NFTA_DATA_VERDICT)
		if e.chain == drop {
			w.uint32(unix.NFTA_VERDICT_CODE, nfDrop)
		} else {
			code := int32(unix.NFT_GOTO)
			w.uint32(unix.NFTA_VERDICT_CODE, uint32(code))
			w.string(unix.NFTA_VERDICT_CHAIN, e.chain)
		}
		w.endNest(verdict)
		w.endNest(data)
	}
	w.endNest(item)
}

func (w *wire) data(attr uint16, v []byte) {
	at := w.nest(attr)
	w.bytes(unix.NFTA_DATA_VALUE, v)
	w.endNest(at)
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

// attributes calls f with each attribute of b, flags taken from its type.
func attributes(b []byte, f func(attr uint16, v []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&nlaTypeMask, b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// foreign is an element that this package could not have made, as the kernel
// encodes it.
type foreign []byte

// deleteForeign adds messages that delete such elements of a map.
func (w *wire) deleteForeign(m mapID, elems []foreign) {
	for _, e := range elems {
		at := w.begin(nftMsg(unix.NFT_MSG_DELSETELEM), 0, unix.NFPROTO_INET, 0)
		w.string(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
		w.string(unix.NFTA_SET_ELEM_LIST_SET, m.name())
		list := w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		item := w.nest(unix.NFTA_LIST_ELEM)
		attributes(e, func(attr uint16, v []byte) {
			if attr == unix.NFTA_SET_ELEM_KEY || attr == nftaSetElemKeyEnd {
				key := w.nest(attr)
				w.b = append(w.b, v...)
				w.endNest(key)
			}
		})
		w.endNest(item)
		w.endNest(list)
		w.end(at)
	}
}

// decodeElements calls f with each element of a NFT_MSG_NEWSETELEM message about
// the map m. One that this package could not have made comes as it is.
func decodeElements(m mapID, payload []byte, chains map[string]string, f func(element, foreign)) {
	attributes(payload, func(attr uint16, list []byte) {
		if attr != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return
		}
		attributes(list, func(_ uint16, item []byte) {
			if e, ok := decodeElement(m, item, chains); ok {
				f(e, nil)
			} else {
				f(e, item)
			}
		})
	})
}

func decodeElement(m mapID, item []byte, chains map[string]string) (e element, ok bool) {
	e.m = m
	keyLen, dataLen := m.keyLen(), m.dataLen()
	var end []byte
	attributes(item, func(attr uint16, v []byte) {
		switch attr {
		case unix.NFTA_SET_ELEM_KEY:
			attributes(v, func(_ uint16, key []byte) {
				ok = len(key) == keyLen
				copy(e.key[:keyLen], key)
			})
		case nftaSetElemKeyEnd:
			attributes(v, func(_ uint16, key []byte) { end = key })
		case unix.NFTA_SET_ELEM_DATA:
			attributes(v, func(attr uint16, data []byte) {
				if attr == unix.NFTA_DATA_VERDICT {
					e.chain = decodeVerdict(data, chains)
				} else {
					ok = ok && len(data) == dataLen
					copy(e.data[:dataLen], data)
				}
			})
		}
	})
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
	attributes(b, func(attr uint16, v []byte) {
		switch attr {
		case unix.NFTA_VERDICT_CODE:
			code = int32(binary.BigEndian.Uint32(v))
		case unix.NFTA_VERDICT_CHAIN:
			name, ok := chains[string(v)]
			if !ok {
				name = cString(v)
				chains[string(v)] = name
			}
			chain = name
		}
	})
	switch {
	case code == nfDrop:
		return drop
	case code == unix.NFT_GOTO:
		return chain
	default:
		return fmt.Sprintf("verdict %d %s", code, chain)
	}
}

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
