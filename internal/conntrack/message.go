// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"encoding/binary"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// Message types and attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	ctDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25
	ctaStatusMask = 26

	ctaTupleIP    = 1
	ctaTupleProto = 2

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaFilterOrigFlags  = 1
	ctaFilterReplyFlags = 2

	filterIPDst    = 1 << 1
	filterProtoNum = 1 << 3
	filterDstPort  = 1 << 5

	ctaProtoInfoTCP      = 1
	ctaProtoInfoTCPState = 1

	statusSeenReply = 1 << 1

	// TCP states of connection tracking. The states from tcpSynRecv to tcpCloseWait are
	// those of connections that are or were established, and are not closed on both
	// sides.
	tcpSynSent   = 1
	tcpSynRecv   = 2
	tcpCloseWait = 5
)

// nfproto returns netfilter's number of a family.
func nfproto(family api.Family) byte {
	if family == api.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// tuple has the addresses, ports and protocol of one direction of a connection.
type tuple struct {
	src, dst netip.AddrPort
	protocol uint8
}

func parseTuple(b []byte) (t tuple) {
	var src, dst netip.Addr
	var sport, dport uint16
	for kind, data := range netfilter.Attributes(b) {
		for inner, value := range netfilter.Attributes(data) {
			switch {
			case kind == ctaTupleIP && (inner == ctaIPv4Src || inner == ctaIPv6Src):
				src, _ = netip.AddrFromSlice(value)
			case kind == ctaTupleIP && (inner == ctaIPv4Dst || inner == ctaIPv6Dst):
				dst, _ = netip.AddrFromSlice(value)
			case kind == ctaTupleProto && inner == ctaProtoNum && len(value) == 1:
				t.protocol = value[0]
			case kind == ctaTupleProto && inner == ctaProtoSrcPort && len(value) == 2:
				sport = binary.BigEndian.Uint16(value)
			case kind == ctaTupleProto && inner == ctaProtoDstPort && len(value) == 2:
				dport = binary.BigEndian.Uint16(value)
			}
		}
	}
	t.src, t.dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return t
}

// parseFlow parses an entry of the table. It returns false if the entry cannot be stale.
// Only UDP entries, untranslated TCP entries without a reply, and translated TCP entries of
// established connections can be stale. The function also returns false for an entry outside
// the default conntrack zone. Such an entry may be untranslated although the kernel
// translates the connection in the default zone.
func parseFlow(entry []byte) (f flow, ok bool) {
	var orig, reply tuple
	var zone uint16
	var state uint8
	for kind, data := range netfilter.Attributes(entry) {
		switch kind {
		case ctaTupleOrig:
			orig = parseTuple(data)
		case ctaTupleReply:
			reply = parseTuple(data)
		case ctaZone:
			if len(data) == 2 {
				zone = binary.BigEndian.Uint16(data)
			}
		case ctaProtoInfo:
			state = tcpState(data)
		}
	}
	f = flow{protocol: orig.protocol, client: orig.src, to: orig.dst, endpoint: reply.src, back: reply.dst}
	if zone != 0 || !f.to.IsValid() || !f.endpoint.IsValid() {
		return f, false
	}
	if f.protocol != unix.IPPROTO_TCP {
		return f, f.protocol == unix.IPPROTO_UDP
	}
	f.established = state >= tcpSynRecv && state <= tcpCloseWait
	translated := f.endpoint != f.to
	return f, f.established && translated || state == tcpSynSent && !translated
}

// tcpState returns the state of a TCP connection, or 0 for another protocol.
func tcpState(b []byte) uint8 {
	for kind, data := range netfilter.Attributes(b) {
		for inner, value := range netfilter.Attributes(data) {
			if kind == ctaProtoInfoTCP && inner == ctaProtoInfoTCPState && len(value) == 1 {
				return value[0]
			}
		}
	}
	return 0
}

// identity returns the attributes that identify an entry. A later entry with the same
// tuple has another identity.
func identity(entry []byte) []byte {
	var w netfilter.Builder
	for kind, data := range netfilter.Attributes(entry) {
		switch kind {
		case ctaTupleOrig:
			w.Bytes(unix.NLA_F_NESTED|kind, data...)
		case ctaID:
			w.Bytes(kind, data...)
		}
	}
	return w.Encoded()
}

// replyIdentity returns the attribute that identifies a later entry: the entry that a
// reply creates after the given entry was deleted.
func replyIdentity(entry []byte) []byte {
	var w netfilter.Builder
	for kind, data := range netfilter.Attributes(entry) {
		if kind == ctaTupleReply {
			w.Bytes(unix.NLA_F_NESTED|ctaTupleOrig, data...)
		}
	}
	return w.Encoded()
}

// encodeDeletion encodes the message that deletes the entry with that identity.
func encodeDeletion(w *netfilter.Builder, family api.Family, identity []byte) {
	at := w.Begin(ctDelete, 0, nfproto(family))
	w.Raw(identity)
	w.End(at)
}

// filter has the address and the port that all destinations of a dump have in common. A
// zero field means that the destinations differ.
type filter struct {
	addr netip.Addr
	port uint16
	// established is true if the dump has TCP entries with a reply.
	established bool
}

func filterOf(d destination) filter { return filter{addr: d.addr, port: d.port} }

// union returns a filter that matches the destinations of f and those of o.
func (f filter) union(o filter) filter {
	if f.addr != o.addr {
		f.addr = netip.Addr{}
	}
	if f.port != o.port {
		f.port = 0
	}
	f.established = f.established || o.established
	return f
}

// encodeDump encodes the message that requests the entries of kind k that match a
// filter. The kernel can filter by one port and by one IPv4 address. For TCP, it also
// omits entries with a reply, unless the filter needs them. Where the kernel cannot
// filter, the dump has more entries. Kernels before 5.8 do not filter by address and
// port.
func encodeDump(w *netfilter.Builder, k kind, f filter) {
	flags := uint32(filterProtoNum)
	at := w.Begin(ctGet, unix.NLM_F_DUMP, nfproto(k.family))
	if k.protocol == unix.IPPROTO_TCP && !f.established {
		w.Uint32(ctaStatus, 0)
		w.Uint32(ctaStatusMask, statusSeenReply)
	}
	tuple := w.Nest(ctaTupleOrig)
	ip := w.Nest(ctaTupleIP)
	// Do not filter by an IPv6 address: the kernel would return all entries except those
	// of that address.
	if k.family == api.IPv4 && f.addr.IsValid() {
		flags |= filterIPDst
		w.Bytes(ctaIPv4Dst, f.addr.AsSlice()...)
	}
	w.EndNest(ip)
	proto := w.Nest(ctaTupleProto)
	w.Bytes(ctaProtoNum, k.protocol)
	if f.port != 0 {
		flags |= filterDstPort
		w.Bytes(ctaProtoDstPort, byte(f.port>>8), byte(f.port))
	}
	w.EndNest(proto)
	w.EndNest(tuple)
	filter := w.Nest(ctaFilter)
	w.Bytes(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags)...)
	w.Bytes(ctaFilterReplyFlags, 0, 0, 0, 0)
	w.EndNest(filter)
	w.End(at)
}
