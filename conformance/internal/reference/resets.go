// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// probeMark is the packet mark of probes, which connection tracking ignores.
const probeMark = 0x00200000

// connection has the addresses of a TCP connection from a client to a frontend.
type connection struct{ client, frontend netip.AddrPort }

// resetLost resets the connections to lost endpoints of services that request it. First, it
// makes the rules reject the packets of these connections. Then it sends a probe to each
// client. The probe is a segment outside the client's window, which the client answers with
// an acknowledgement. The rules answer the acknowledgement with a reset.
func resetLost(opts *Options, services []*api.View) error {
	nodes, err := nodePortAddrs(opts.NodePortCIDRs)
	if err != nil {
		return err
	}
	frontends := map[netip.AddrPort]nodeview.Existing{}
	for _, view := range services {
		if !view.Service.ResetConnections {
			continue
		}
		for f := range nodeview.Frontends(view) {
			if f.Protocol == api.TCP {
				for at := range f.At(nodes) {
					frontends[at] = f.Existing
				}
			}
		}
	}
	for family, inet := range flowFamilies(frontends) {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, inet)
		if err != nil {
			return fmt.Errorf("list flows: %w", err)
		}
		var lost []connection
		for _, flow := range flows {
			if flow.Forward.Protocol != unix.IPPROTO_TCP {
				continue
			}
			c := connection{addrPort(flow.Forward.SrcIP, flow.Forward.SrcPort), addrPort(flow.Forward.DstIP, flow.Forward.DstPort)}
			if existing, ours := frontends[c.frontend]; ours && existing.Resets(addrPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort)) {
				lost = append(lost, c)
			}
		}
		if err := reset(opts, family, lost); err != nil {
			return err
		}
	}
	return nil
}

func addrPort(ip []byte, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr.Unmap(), port)
}

// reset resets connections of one family.
func reset(opts *Options, f api.Family, lost []connection) error {
	if len(lost) == 0 {
		return nil
	}
	var elements []string
	for _, c := range lost {
		elements = append(elements, fmt.Sprintf("%s . %d . %s . %d", c.client.Addr(), c.client.Port(), c.frontend.Addr(), c.frontend.Port()))
	}
	if err := load(fmt.Sprintf("add element inet %s lost-%s { %s }\n", opts.Table, family(f), strings.Join(elements, ", "))); err != nil {
		return err
	}
	if opts.Fault == ResetsActive {
		return nil
	}
	domain, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_HDRINCL
	if f == api.IPv6 {
		domain, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_HDRINCL
	}
	socket, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("open raw socket: %w", err)
	}
	defer unix.Close(socket)
	if err := unix.SetsockoptInt(socket, level, option, 1); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_MARK, probeMark); err != nil {
		return err
	}
	for _, c := range lost {
		var to unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte(c.client.Addr().AsSlice()[:4])}
		if f == api.IPv6 {
			to = &unix.SockaddrInet6{Addr: c.client.Addr().As16()}
		}
		if err := unix.Sendto(socket, probe(c), 0, to); err != nil {
			return fmt.Errorf("send probe to %s: %w", c.client, err)
		}
	}
	return nil
}

// probe returns an IP packet from the frontend to the client. It has a TCP segment with a
// random sequence number and without data.
func probe(c connection) []byte {
	from, to := c.frontend.Addr().AsSlice(), c.client.Addr().AsSlice()
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment, c.frontend.Port())
	binary.BigEndian.PutUint16(segment[2:], c.client.Port())
	binary.BigEndian.PutUint32(segment[4:], rand.Uint32())
	binary.BigEndian.PutUint32(segment[8:], rand.Uint32())
	segment[12], segment[13] = 5<<4, 0x10 // 20 bytes, ACK
	pseudo := append(append(append([]byte{}, from...), to...), 0, unix.IPPROTO_TCP, 0, byte(len(segment)))
	binary.BigEndian.PutUint16(segment[16:], checksum(append(pseudo, segment...)))
	if len(from) == 16 {
		header := []byte{6 << 4, 0, 0, 0, 0, byte(len(segment)), unix.IPPROTO_TCP, 64}
		return append(append(append(header, from...), to...), segment...)
	}
	header := []byte{4<<4 | 5, 0, 0, byte(20 + len(segment)), 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0} // the kernel adds the checksum
	return append(append(append(header, from...), to...), segment...)
}

// checksum returns the Internet checksum (RFC 1071). The length of b must be even.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
