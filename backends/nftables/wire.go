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
	nftaSetCount      = 20
	nftaSetElemKeyEnd = 10
	nfDrop            = 0
	nfAccept          = 1
	nftSetConcat      = 0x80
	nftaSetDescConcat = 2
	nftaSetFieldLen   = 1
)

// message types have the subsystem in their upper octet.
func nftMsg(t int) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(t) }

// wire encodes messages about one table.
type wire struct {
	*netfilter.Builder
	table string
}

// newTable adds a message that makes the table, or wakes it.
func (w *wire) newTable() {
	at := w.Begin(nftMsg(unix.NFT_MSG_NEWTABLE), unix.NLM_F_CREATE, unix.NFPROTO_INET)
	w.String(unix.NFTA_TABLE_NAME, w.table)
	w.Uint32(unix.NFTA_TABLE_FLAGS, 0)
	w.End(at)
}

// deleteTable adds a message that deletes a table.
func (w *wire) deleteTable(name string) {
	at := w.Begin(nftMsg(unix.NFT_MSG_DELTABLE), 0, unix.NFPROTO_INET)
	w.String(unix.NFTA_TABLE_NAME, name)
	w.End(at)
}

// newSet adds a message that makes a map or set, if it is not there.
func (w *wire) newSet(s layout) {
	at := w.Begin(nftMsg(unix.NFT_MSG_NEWSET), unix.NLM_F_CREATE, unix.NFPROTO_INET)
	w.String(unix.NFTA_SET_TABLE, w.table)
	w.String(unix.NFTA_SET_NAME, s.name)
	w.Uint32(unix.NFTA_SET_FLAGS, s.flags)
	w.Uint32(unix.NFTA_SET_KEY_TYPE, s.keyType)
	w.Uint32(unix.NFTA_SET_KEY_LEN, s.keyLen)
	if s.dataType != 0 {
		w.Uint32(unix.NFTA_SET_DATA_TYPE, s.dataType)
		w.Uint32(unix.NFTA_SET_DATA_LEN, s.dataLen)
	}
	desc := w.Nest(unix.NFTA_SET_DESC)
	if s.size > 0 {
		w.Uint32(unix.NFTA_SET_DESC_SIZE, s.size)
	}
	if len(s.fields) > 0 {
		fields := w.Nest(nftaSetDescConcat)
		for _, length := range s.fields {
			field := w.Nest(unix.NFTA_LIST_ELEM)
			w.Uint32(nftaSetFieldLen, length)
			w.EndNest(field)
		}
		w.EndNest(fields)
	}
	w.EndNest(desc)
	w.Uint32(unix.NFTA_SET_ID, 1)
	w.Bytes(unix.NFTA_SET_USERDATA, s.byteOrders()...)
	w.End(at)
}

// byteOrders returns what nft notes about a set: the byte order of its keys and data.
func (s *layout) byteOrders() (userdata []byte) {
	for i, datatype := range []uint32{s.keyType, s.dataType} {
		if datatype == 0 || datatype == unix.NFT_DATA_VERDICT {
			break
		}
		order := uint32(2) // that of the network
		if datatype == typePriority.number {
			order = 1 // that of the host
		}
		userdata = append(userdata, byte(i), 4)
		userdata = binary.NativeEndian.AppendUint32(userdata, order)
	}
	return userdata
}

// newChain adds a message that makes a chain, if it is not there.
func (w *wire) newChain(name string, h hook) {
	at := w.Begin(nftMsg(unix.NFT_MSG_NEWCHAIN), unix.NLM_F_CREATE, unix.NFPROTO_INET)
	w.String(unix.NFTA_CHAIN_TABLE, w.table)
	w.String(unix.NFTA_CHAIN_NAME, name)
	if h != (hook{}) {
		nest := w.Nest(unix.NFTA_CHAIN_HOOK)
		w.Uint32(unix.NFTA_HOOK_HOOKNUM, h.number)
		w.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
		w.EndNest(nest)
		w.Uint32(unix.NFTA_CHAIN_POLICY, h.policy)
		w.String(unix.NFTA_CHAIN_TYPE, h.kind)
	}
	w.End(at)
}

// deleteChain adds a message that deletes an empty chain.
func (w *wire) deleteChain(name string) {
	at := w.Begin(nftMsg(unix.NFT_MSG_DELCHAIN), 0, unix.NFPROTO_INET)
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
		w.deleteChain(name)
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
	w.newChain(name, hook{})
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
	if e.m.kind == sources {
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

// decodeChain returns what a NFT_MSG_NEWCHAIN message describes.
func decodeChain(payload []byte) (table, name string, h hook) {
	for attr, v := range netfilter.Attributes(payload) {
		switch attr {
		case unix.NFTA_CHAIN_TABLE:
			table = netfilter.String(v)
		case unix.NFTA_CHAIN_NAME:
			name = netfilter.String(v)
		case unix.NFTA_CHAIN_TYPE:
			h.kind = netfilter.String(v)
		case unix.NFTA_CHAIN_POLICY:
			h.policy = decodeUint32(v)
		case unix.NFTA_CHAIN_HOOK:
			for attr, v := range netfilter.Attributes(v) {
				switch attr {
				case unix.NFTA_HOOK_HOOKNUM:
					h.number = decodeUint32(v)
				case unix.NFTA_HOOK_PRIORITY:
					h.priority = int32(decodeUint32(v))
				}
			}
		}
	}
	return table, name, h
}

// decodeSet returns what a NFT_MSG_NEWSET message describes, apart from its fields.
func decodeSet(payload []byte) (s layout) {
	s.elements = -1
	for attr, v := range netfilter.Attributes(payload) {
		switch attr {
		case unix.NFTA_SET_NAME:
			s.name = netfilter.String(v)
		case unix.NFTA_SET_FLAGS:
			s.flags = decodeUint32(v)
		case unix.NFTA_SET_KEY_TYPE:
			s.keyType = decodeUint32(v)
		case unix.NFTA_SET_KEY_LEN:
			s.keyLen = decodeUint32(v)
		case unix.NFTA_SET_DATA_TYPE:
			s.dataType = decodeUint32(v)
		case unix.NFTA_SET_DATA_LEN:
			s.dataLen = decodeUint32(v)
		case nftaSetCount:
			s.elements = int(decodeUint32(v))
		}
	}
	return s
}

func decodeUint32(v []byte) uint32 {
	if len(v) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
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
		case unix.NFTA_SET_ELEM_USERDATA:
			if n := len(v); n >= 3 && v[0] == 0 && int(v[1]) == n-2 {
				e.comment = netfilter.String(v[2:])
			}
		}
	}
	switch m.kind {
	case frontends, nodeFrontends:
		name, known := chains[string(e.data[:dataLen])]
		if !known {
			if c, ok2 := sharedChainOf(&e.elementID, &e.value); ok2 {
				name = c.name()
			}
			chains[string(e.data[:dataLen])] = name
		}
		e.chain = name
	case sharedChains, nodeSharedChains:
		c, ok2 := sharedChainOf(&e.elementID, &e.value)
		ok = ok && ok2 && e.chain == c.name()
	case sources:
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
