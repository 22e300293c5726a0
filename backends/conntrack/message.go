// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"encoding/binary"
	"iter"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// Message types and attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	ctDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25

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
)

// header is the nfgenmsg that begins every message.
func header(family api.Family) []byte {
	if family == api.IPv6 {
		return []byte{unix.AF_INET6, unix.NFNETLINK_V0, 0, 0}
	}
	return []byte{unix.AF_INET, unix.NFNETLINK_V0, 0, 0}
}

const (
	headerLen = 4
	attrLen   = 4
	// attrType is what of an attribute's type is not flags.
	attrType = 0x3fff
)

// appendAttr appends an attribute.
func appendAttr(b []byte, kind uint16, data []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrLen+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func nested(kind uint16, attrs ...[]byte) []byte {
	var data []byte
	for _, a := range attrs {
		data = append(data, a...)
	}
	return appendAttr(nil, unix.NLA_F_NESTED|kind, data)
}

func attr(kind uint16, data ...byte) []byte { return appendAttr(nil, kind, data) }

// attrs yields the attributes of b without copying them, and ends where b is no
// list of attributes.
func attrs(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrLen {
			n := int(binary.NativeEndian.Uint16(b))
			if n < attrLen || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&attrType, b[attrLen:n]) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// tuple is one direction of a connection.
type tuple struct {
	src, dst netip.AddrPort
	protocol uint8
}

func parseTuple(b []byte) (t tuple) {
	var src, dst netip.Addr
	var sport, dport uint16
	for kind, data := range attrs(b) {
		for inner, value := range attrs(data) {
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

// parseFlow reads an entry of the table. It is not ok if the entry is no UDP
// connection, or in another zone than the one in which services are translated:
// others may know the same connection there as it is before that.
func parseFlow(message []byte) (f flow, ok bool) {
	if len(message) < headerLen {
		return flow{}, false
	}
	var orig, reply tuple
	var zone uint16
	for kind, data := range attrs(message[headerLen:]) {
		switch kind {
		case ctaTupleOrig:
			orig = parseTuple(data)
		case ctaTupleReply:
			reply = parseTuple(data)
		case ctaZone:
			if len(data) == 2 {
				zone = binary.BigEndian.Uint16(data)
			}
		}
	}
	f = flow{to: orig.dst, endpoint: reply.src}
	return f, orig.protocol == unix.IPPROTO_UDP && zone == 0 && f.to.IsValid() && f.endpoint.IsValid()
}

// deletion returns the message that deletes the entry of a message, and not one
// that came in its place.
func deletion(message []byte) []byte {
	b := append([]byte(nil), message[:headerLen]...)
	for kind, data := range attrs(message[headerLen:]) {
		switch kind {
		case ctaTupleOrig:
			b = appendAttr(b, unix.NLA_F_NESTED|kind, data)
		case ctaID:
			b = appendAttr(b, kind, data)
		}
	}
	return b
}

// listing returns the message that asks for the UDP entries to any of places, all
// of one family. The kernel sorts out the others as far as it can: it compares
// with one port and one IPv4 address. Before 5.8 it did not, and told of all.
func listing(family api.Family, places []place) []byte {
	flags := uint32(filterProtoNum)
	proto := [][]byte{attr(ctaProtoNum, unix.IPPROTO_UDP)}
	if port := places[0].Port(); port != 0 && all(places, func(p place) bool { return p.Port() == port }) {
		flags |= filterDstPort
		proto = append(proto, attr(ctaProtoDstPort, byte(port>>8), byte(port)))
	}
	var ip [][]byte
	// Of IPv6 addresses the kernel tells of all but the one asked for.
	if addr := places[0].Addr(); family == api.IPv4 && !addr.IsUnspecified() && all(places, func(p place) bool { return p.Addr() == addr }) {
		flags |= filterIPDst
		ip = append(ip, attr(ctaIPv4Dst, addr.AsSlice()...))
	}
	b := header(family)
	b = append(b, nested(ctaTupleOrig, nested(ctaTupleIP, ip...), nested(ctaTupleProto, proto...))...)
	return append(b, nested(ctaFilter,
		attr(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags)...),
		attr(ctaFilterReplyFlags, 0, 0, 0, 0),
	)...)
}

func all(places []place, is func(place) bool) bool {
	for _, p := range places {
		if !is(p) {
			return false
		}
	}
	return true
}
