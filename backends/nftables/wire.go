// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// These constants of kernel headers are missing in golang.org/x/sys/unix.
const (
	nftaTable       = 1 // the attribute with the name of the table, in all messages
	nftaSetCount    = 20
	nfAccept        = 1
	nftDynsetDelete = 2
)

// nftMsg returns the netlink message type for the nf_tables message t.
func nftMsg(t int) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(t) }

// wire encodes messages about one table.
type wire struct {
	*netfilter.Builder
	table string
}

// begin starts a message about the table. The result is the argument for End.
func (w *wire) begin(msg int, flags uint16) int {
	at := w.Begin(nftMsg(msg), flags, unix.NFPROTO_INET)
	w.String(nftaTable, w.table)
	return at
}

// The method named adds a message about an object of the table. It writes the object's
// name into the attribute attr.
func (w *wire) named(msg int, attr uint16, name string) {
	at := w.begin(msg, 0)
	w.String(attr, name)
	w.End(at)
}

// newTable adds a message that creates the table, or activates a dormant one.
func (w *wire) newTable() {
	at := w.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	w.Uint32(unix.NFTA_TABLE_FLAGS, 0)
	w.End(at)
}

// deleteTable adds a message that deletes the table called name, even if w is for another
// table.
func (w *wire) deleteTable(name string) {
	other := wire{w.Builder, name}
	w.End(other.begin(unix.NFT_MSG_DELTABLE, 0))
}

// newSet adds a message that creates a map or set if it does not exist.
func (w *wire) newSet(s layout) {
	at := w.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
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
	w.EndNest(desc)
	w.Uint32(unix.NFTA_SET_ID, 1)
	w.Bytes(unix.NFTA_SET_USERDATA, append(s.byteOrders(), s.typeof...)...)
	w.End(at)
}

// byteOrders returns the byte orders of keys and data, encoded as nft stores them with
// each set.
func (s *layout) byteOrders() (encoded []byte) {
	for i, datatype := range []uint32{s.keyType, s.dataType} {
		if datatype == 0 || datatype == unix.NFT_DATA_VERDICT {
			break
		}
		order := uint32(2) // network byte order
		if datatype == typePriority.number {
			order = 1 // host byte order
		}
		encoded = append(encoded, userdata(byte(i), binary.NativeEndian.AppendUint32(nil, order))...)
	}
	return encoded
}

// decodeSet decodes a NFT_MSG_NEWSET message.
func decodeSet(attributes []byte) layout {
	number := func(attr uint16) uint32 { return netfilter.Uint32(netfilter.Attribute(attributes, attr)) }
	s := layout{
		name:  netfilter.String(netfilter.Attribute(attributes, unix.NFTA_SET_NAME)),
		flags: number(unix.NFTA_SET_FLAGS), elements: -1,
		keyType: number(unix.NFTA_SET_KEY_TYPE), keyLen: number(unix.NFTA_SET_KEY_LEN),
		dataType: number(unix.NFTA_SET_DATA_TYPE), dataLen: number(unix.NFTA_SET_DATA_LEN),
	}
	if count := netfilter.Attribute(attributes, nftaSetCount); count != nil {
		s.elements = int(netfilter.Uint32(count))
	}
	return s
}

// newChain adds a message that creates a chain if it does not exist.
func (w *wire) newChain(name string, h hook) {
	at := w.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
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

func decodeChain(attributes []byte) (table, name string, h hook) {
	text := func(attr uint16) string { return netfilter.String(netfilter.Attribute(attributes, attr)) }
	nest := netfilter.Attribute(attributes, unix.NFTA_CHAIN_HOOK)
	return text(unix.NFTA_CHAIN_TABLE), text(unix.NFTA_CHAIN_NAME), hook{
		number:   netfilter.Uint32(netfilter.Attribute(nest, unix.NFTA_HOOK_HOOKNUM)),
		priority: int32(netfilter.Uint32(netfilter.Attribute(nest, unix.NFTA_HOOK_PRIORITY))),
		kind:     text(unix.NFTA_CHAIN_TYPE),
		policy:   netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_CHAIN_POLICY)),
	}
}

// flushChain adds a message that deletes all rules of a chain.
func (w *wire) flushChain(name string) {
	w.named(unix.NFT_MSG_DELRULE, unix.NFTA_RULE_CHAIN, name)
}

// deleteChain adds a message that deletes a chain. The chain must be without rules.
func (w *wire) deleteChain(name string) {
	w.named(unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME, name)
}

// deleteChainsAndSets adds messages that delete chains and sets, even if these refer to
// each other. A rule can refer to a set, and an element of a map to a chain.
func (w *wire) deleteChainsAndSets(chains, sets []string) {
	for _, name := range chains {
		w.flushChain(name)
	}
	for _, name := range sets {
		w.named(unix.NFT_MSG_DELSET, unix.NFTA_SET_NAME, name)
	}
	for _, name := range chains {
		w.deleteChain(name)
	}
}

// The method rule adds a message that appends a rule to a chain. The rule comes from
// encodeRules.
func (w *wire) rule(chain, rule string) {
	at := w.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
	w.String(unix.NFTA_RULE_CHAIN, chain)
	list := w.Nest(unix.NFTA_RULE_EXPRESSIONS)
	w.Raw([]byte(rule))
	w.EndNest(list)
	w.End(at)
}

// makeChain adds messages that create a chain with these rules. If the chain exists, its
// rules are replaced.
func (w *wire) makeChain(name string, rules []string) {
	w.newChain(name, hook{})
	w.flushChain(name)
	for _, rule := range rules {
		w.rule(name, rule)
	}
}

// maxElements limits the length of the list of elements in a message, in octets. The list
// is one attribute, and an attribute stores its length in 16 bits.
const maxElements = 60_000

// The method elements adds messages of type NFT_MSG_NEWSETELEM or NFT_MSG_DELSETELEM
// about elems, one map after the other.
func (w *wire) elements(msg int, flags uint16, elems []element) {
	byMap := map[mapID][]*element{}
	for i := range elems {
		m := elems[i].m
		byMap[m] = append(byMap[m], &elems[i])
	}
	for _, m := range slices.SortedFunc(maps.Keys(byMap), mapID.compare) {
		for rest := byMap[m]; len(rest) > 0; {
			at, list := w.beginElements(msg, flags, m.name())
			for len(rest) > 0 && w.Len()-list < maxElements {
				w.addElement(rest[0], msg == unix.NFT_MSG_NEWSETELEM)
				rest = rest[1:]
			}
			w.EndNest(list)
			w.End(at)
		}
	}
}

// beginElements starts a message about elements of a map or set. It returns the arguments
// for End (message) and for EndNest (list).
func (w *wire) beginElements(msg int, flags uint16, set string) (message, list int) {
	message = w.begin(msg, flags)
	w.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	return message, w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
}

// flushSet adds a message that deletes all elements of a map or set.
func (w *wire) flushSet(name string) {
	w.named(unix.NFT_MSG_DELSETELEM, unix.NFTA_SET_ELEM_LIST_SET, name)
}

// deleteForeign adds messages that delete the elements whose encodings are in elems.
func (w *wire) deleteForeign(m mapID, elems [][]byte) {
	for _, e := range elems {
		at, list := w.beginElements(unix.NFT_MSG_DELSETELEM, 0, m.name())
		item := w.Nest(unix.NFTA_LIST_ELEM)
		w.Bytes(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, netfilter.Attribute(e, unix.NFTA_SET_ELEM_KEY)...)
		w.EndNest(item)
		w.EndNest(list)
		w.End(at)
	}
}
