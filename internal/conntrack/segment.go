// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/internal/netns"
	"golang.org/x/sys/unix"
)

// TCP flags.
const (
	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

// segment is a TCP segment without data.
type segment struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    uint8
	// length is the number of bytes of data that a received segment had.
	length uint32
}

// challenge returns a SYN+ACK segment. The client of a connection answers it with an ACK
// segment that contains the sequence numbers of the connection (RFC 5961, section 4).
func challenge(from, to netip.AddrPort) segment {
	return segment{from: from, to: to, seq: rand.Uint32(), ack: rand.Uint32(), flags: flagSYN | flagACK}
}

// Challenge returns the IP packet of a TCP segment from the address of a service. If the
// client at the address "to" has a connection to the service's address, it answers with
// an ACK segment.
func Challenge(from, to netip.AddrPort) []byte { return challenge(from, to).encode() }

// encode returns the IP packet of a segment.
func (s segment) encode() []byte {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, s.from.Port())
	binary.BigEndian.PutUint16(tcp[2:], s.to.Port())
	binary.BigEndian.PutUint32(tcp[4:], s.seq)
	binary.BigEndian.PutUint32(tcp[8:], s.ack)
	tcp[12], tcp[13] = 5<<4, s.flags
	binary.BigEndian.PutUint16(tcp[14:], 1024) // the window
	from, to := s.from.Addr().AsSlice(), s.to.Addr().AsSlice()
	pseudo := slices.Concat(from, to, []byte{0, unix.IPPROTO_TCP, 0, byte(len(tcp))}, tcp)
	binary.BigEndian.PutUint16(tcp[16:], checksum(pseudo))
	if s.from.Addr().Is4() {
		header := []byte{4<<4 | 5, 0, 0, byte(20 + len(tcp)), 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}
		header = slices.Concat(header, from, to)
		binary.BigEndian.PutUint16(header[10:], checksum(header))
		return slices.Concat(header, tcp)
	}
	header := []byte{6 << 4, 0, 0, 0, 0, byte(len(tcp)), unix.IPPROTO_TCP, 64}
	return slices.Concat(header, from, to, tcp)
}

// checksum returns the Internet checksum of an even number of bytes.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// parseSegment parses the beginning of an IP packet that the filter of [packets] accepts.
func parseSegment(b []byte) (s segment, ok bool) {
	var from, to netip.Addr
	var header, total int
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		from, to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		header, total = int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	case len(b) >= 40 && b[0]>>4 == 6:
		from, to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		header, total = 40, 40+int(binary.BigEndian.Uint16(b[4:]))
	default:
		return s, false
	}
	if len(b) < header+20 {
		return s, false
	}
	tcp := b[header:]
	return segment{
		from:   netip.AddrPortFrom(from, binary.BigEndian.Uint16(tcp)),
		to:     netip.AddrPortFrom(to, binary.BigEndian.Uint16(tcp[2:])),
		seq:    binary.BigEndian.Uint32(tcp[4:]),
		ack:    binary.BigEndian.Uint32(tcp[8:]),
		flags:  tcp[13],
		length: uint32(max(0, total-header-int(tcp[12]>>4)*4)),
	}, true
}

// packets sends TCP segments with any source address. It receives the segments that arrive
// at any interface, before the kernel translates them.
type packets struct {
	receiver, sender4, sender6 int
	buf                        [128]byte
}

// tick is the maximum duration of one call of the method receive.
const tick = 10 * time.Millisecond

// openPackets opens the sockets in a network namespace. It needs CAP_NET_RAW.
func openPackets(netNS int) (*packets, error) {
	p := &packets{-1, -1, -1, [128]byte{}}
	var errs [3]error
	nsErr := netns.Do(netNS, func() {
		// A packet socket without a protocol receives nothing yet.
		p.receiver, errs[0] = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		p.sender4, errs[1] = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
		p.sender6, errs[2] = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	})
	if errors.Is(errs[2], unix.EAFNOSUPPORT) { // a node without IPv6
		errs[2] = nil
	}
	err := errors.Join(nsErr, errors.Join(errs[:]...))
	if err == nil {
		timeout := unix.NsecToTimeval(tick.Nanoseconds())
		err = errors.Join(
			unix.SetsockoptTimeval(p.receiver, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
			// All connections in work may answer at the same time.
			unix.SetsockoptInt(p.receiver, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, maxInWork*4096))
	}
	if err == nil {
		err = p.accept(nil)
	}
	if err == nil {
		protocol := uint16(unix.ETH_P_ALL)
		err = unix.Bind(p.receiver, &unix.SockaddrLinklayer{Protocol: protocol>>8 | protocol<<8})
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("open packet sockets, which needs CAP_NET_RAW: %w", err)
	}
	return p, nil
}

func (p *packets) close() {
	for _, fd := range [...]int{p.receiver, p.sender4, p.sender6} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func (p *packets) send(s segment) error {
	if s.to.Addr().Is4() {
		return unix.Sendto(p.sender4, s.encode(), 0, &unix.SockaddrInet4{Addr: s.to.Addr().As4()})
	}
	return unix.Sendto(p.sender6, s.encode(), 0, &unix.SockaddrInet6{Addr: s.to.Addr().As16()})
}

// receive returns the next segment. It returns false if no segment arrives within a tick.
func (p *packets) receive() (s segment, ok bool) {
	n, _, err := unix.Recvfrom(p.receiver, p.buf[:], 0)
	if err != nil {
		return s, false
	}
	return parseSegment(p.buf[:n])
}

// ports returns the ports of a segment, as they are in the TCP header.
func ports(from, to netip.AddrPort) uint32 { return uint32(from.Port())<<16 | uint32(to.Port()) }

// accept makes the socket receive only incoming TCP segments with one of the given pairs of
// ports. The kernel needs few steps for each packet, because the filter is a binary search.
func (p *packets) accept(pairs []uint32) error {
	pairs = slices.Compact(slices.Sorted(slices.Values(pairs)))
	filter := append([]unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0xfffff004},       // SKF_AD_PKTTYPE
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: unix.PACKET_OUTGOING, Jt: 12}, // to drop
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 0},                // the version
		{Code: unix.BPF_ALU | unix.BPF_RSH, K: 4},                            //
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: 4, Jf: 7},                     // to version 6
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 9},                // the protocol
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: unix.IPPROTO_TCP, Jf: 7},      // to drop
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 6},                // the fragment
		{Code: unix.BPF_JMP | unix.BPF_JSET, K: 0x1fff, Jt: 5},               // to drop
		{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH, K: 0},               // the length of the header
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_IND, K: 0},                // the ports
		{Code: unix.BPF_JMP | unix.BPF_JA, K: 4},                             // to the search
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 6},                // version 6: the protocol
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: unix.IPPROTO_TCP, Jt: 1},      // to the ports
		{Code: unix.BPF_RET, K: 0},                                           // drop
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 40},               // the ports
	}, search(pairs)...)
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(p.receiver, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program); err != nil {
		return fmt.Errorf("attach a filter of %d instructions: %w", len(filter), err)
	}
	return nil
}

// search returns instructions that accept a packet if the loaded word is in a sorted list.
func search(list []uint32) (filter []unix.SockFilter) {
	if len(list) > 8 {
		low, high := search(list[:len(list)/2]), search(list[len(list)/2:])
		return slices.Concat([]unix.SockFilter{
			{Code: unix.BPF_JMP | unix.BPF_JGE, K: list[len(list)/2], Jf: 1},
			{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(len(low))},
		}, low, high)
	}
	for _, word := range list {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ, K: word, Jf: 1},
			unix.SockFilter{Code: unix.BPF_RET, K: 128})
	}
	return append(filter, unix.SockFilter{Code: unix.BPF_RET, K: 0})
}
