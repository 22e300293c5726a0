// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nft

import (
	"encoding/binary"

	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// These constants of kernel headers are missing in golang.org/x/sys/unix.
const (
	nftaTable    = 1 // the attribute with the name of the table, in all messages
	nftaSetCount = 20
)

// MessageType returns the netlink message type for the nf_tables message t.
func MessageType(t int) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(t) }

// Writer encodes messages about one table.
type Writer struct {
	*netfilter.Builder
	Table string
}

// begin starts a message about the table. The result is the argument for End.
func (w *Writer) begin(msg int, flags uint16) int {
	at := w.Begin(MessageType(msg), flags, unix.NFPROTO_INET)
	w.String(nftaTable, w.Table)
	return at
}

// named adds a message about an object of the table. If the object's name is not empty,
// named writes it into the attribute attr.
func (w *Writer) named(msg int, flags, attr uint16, name string) {
	at := w.begin(msg, flags)
	if name != "" {
		w.String(attr, name)
	}
	w.End(at)
}

// NewTable adds a message that creates the table, or activates a dormant one.
func (w *Writer) NewTable() {
	at := w.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	w.Uint32(unix.NFTA_TABLE_FLAGS, 0)
	w.End(at)
}

// DeleteTable adds a message that deletes the table called name, even if w is for another
// table.
func (w *Writer) DeleteTable(name string) {
	other := Writer{w.Builder, name}
	w.End(other.begin(unix.NFT_MSG_DELTABLE, 0))
}

// NewSet adds a message that creates a map or set if it does not exist.
func (w *Writer) NewSet(s Set) {
	at := w.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
	w.String(unix.NFTA_SET_NAME, s.Name)
	w.Uint32(unix.NFTA_SET_FLAGS, s.Flags)
	w.Uint32(unix.NFTA_SET_KEY_TYPE, s.keyType)
	w.Uint32(unix.NFTA_SET_KEY_LEN, uint32(s.KeyLen))
	if s.dataType != 0 {
		w.Uint32(unix.NFTA_SET_DATA_TYPE, s.dataType)
		w.Uint32(unix.NFTA_SET_DATA_LEN, uint32(s.DataLen))
	}
	desc := w.Nest(unix.NFTA_SET_DESC)
	if s.Size > 0 {
		w.Uint32(unix.NFTA_SET_DESC_SIZE, s.Size)
	}
	w.EndNest(desc)
	w.Uint32(unix.NFTA_SET_ID, 1)
	w.Bytes(unix.NFTA_SET_USERDATA, append(s.byteOrders(), s.typeof...)...)
	w.End(at)
}

// NewChain adds a message that creates a chain, without rules, if it does not exist.
func (w *Writer) NewChain(name string, h Hook) {
	at := w.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	w.String(unix.NFTA_CHAIN_NAME, name)
	if h != (Hook{}) {
		nest := w.Nest(unix.NFTA_CHAIN_HOOK)
		w.Uint32(unix.NFTA_HOOK_HOOKNUM, h.number)
		w.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
		w.EndNest(nest)
		w.Uint32(unix.NFTA_CHAIN_POLICY, h.policy)
		w.String(unix.NFTA_CHAIN_TYPE, h.kind)
	}
	w.End(at)
}

// FlushChain adds a message that deletes all rules of a chain.
func (w *Writer) FlushChain(name string) {
	w.named(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, name)
}

// DeleteChain adds a message that deletes a chain. The chain must be without rules.
func (w *Writer) DeleteChain(name string) {
	w.named(unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name)
}

// DeleteChainsAndSets adds messages that delete chains and sets, even if these refer to
// each other. A rule can refer to a set, and an element of a map can refer to a chain.
func (w *Writer) DeleteChainsAndSets(chains, sets []string) {
	for _, name := range chains {
		w.FlushChain(name)
	}
	for _, name := range sets {
		w.named(unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name)
	}
	for _, name := range chains {
		w.DeleteChain(name)
	}
}

// AddRules adds messages that append rules to a chain.
func (w *Writer) AddRules(chain string, rules []Rule) {
	for _, rule := range rules {
		at := w.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
		w.String(unix.NFTA_RULE_CHAIN, chain)
		list := w.Nest(unix.NFTA_RULE_EXPRESSIONS)
		w.Raw([]byte(rule))
		w.EndNest(list)
		w.End(at)
	}
}

// MakeChain adds messages that create a chain with these rules. If the chain exists, its
// rules are replaced.
func (w *Writer) MakeChain(c Chain) {
	w.NewChain(c.Name, c.Hook)
	w.FlushChain(c.Name)
	w.AddRules(c.Name, c.Rules)
}

// maxElements limits the length of the list of elements in a message, in octets. The list
// is one attribute, and an attribute stores its length in 16 bits.
const maxElements = 60_000

// Elements adds messages of type NFT_MSG_NEWSETELEM, NFT_MSG_DELSETELEM or
// NFT_MSG_GETSETELEM about n elements of a map or set. The function encode adds the
// attributes of an element.
func (w *Writer) Elements(msg int, flags uint16, set string, n int, encode func(i int)) {
	for i := 0; i < n; {
		at := w.begin(msg, flags)
		w.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for ; i < n && w.Len()-list < maxElements; i++ {
			item := w.Nest(unix.NFTA_LIST_ELEM)
			encode(i)
			w.EndNest(item)
		}
		w.EndNest(list)
		w.End(at)
	}
}

// Value adds an attribute of an element that is a value: its key or its data.
func (w *Writer) Value(attr uint16, v []byte) {
	at := w.Nest(attr)
	w.Bytes(unix.NFTA_DATA_VALUE, v...)
	w.EndNest(at)
}

// Value decodes an attribute of an element that is a value: its key or its data. It returns
// nil if there is none.
func Value(item []byte, attr uint16) []byte {
	return netfilter.Attribute(netfilter.Attribute(item, attr), unix.NFTA_DATA_VALUE)
}

// counter is the encoding of a counter of an element.
var counter = []byte(text(unix.NFTA_EXPR_NAME, "counter"))

// Counter adds a counter to an element. The counter begins with 0. It counts the packets
// for which a rule finds the element.
func (w *Writer) Counter() { w.Bytes(unix.NFTA_SET_ELEM_EXPR|unix.NLA_F_NESTED, counter...) }

// Counted returns the number of packets that the counter of an element has counted. If the
// element has no counter, ok is false.
func Counted(item []byte) (packets uint64, ok bool) {
	e := netfilter.Attribute(item, unix.NFTA_SET_ELEM_EXPR)
	if e == nil || netfilter.String(netfilter.Attribute(e, unix.NFTA_EXPR_NAME)) != "counter" {
		return 0, false
	}
	if v := netfilter.Attribute(netfilter.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS); len(v) == 8 {
		packets = binary.BigEndian.Uint64(v)
	}
	return packets, true
}

// FlushSet adds a message that deletes all elements of a map or set.
func (w *Writer) FlushSet(name string) {
	w.named(unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET, name)
}
