// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// serve starts TCP and UDP servers on ports of all addresses of the host. They answer
// each line of a TCP connection and each UDP packet. An answer has the content of that
// line or packet, the host's name and the client's address.
func (h *Host) serve(ports []uint16) error {
	for _, port := range ports {
		if err := h.serveTCP(port); err != nil {
			return err
		}
		for _, network := range []string{"udp4", "udp6"} {
			if err := h.serveUDP(network, port); err != nil {
				return err
			}
		}
	}
	return nil
}

func (h *Host) answer(request string, peer netip.AddrPort) []byte {
	return fmt.Appendf(nil, "%s %s %s\n", strings.TrimSpace(request), h.Name, netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()))
}

func (h *Host) serveTCP(port uint16) error {
	var l net.Listener
	if err := h.Do(func() (err error) { l, err = net.Listen("tcp", fmt.Sprintf(":%d", port)); return err }); err != nil {
		return fmt.Errorf("serve on %s: %w", h.Name, err)
	}
	h.servers = append(h.servers, l)
	go h.accept(l)
	return nil
}

func (h *Host) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			peer := c.RemoteAddr().(*net.TCPAddr).AddrPort()
			for lines := bufio.NewReader(c); ; {
				request, err := lines.ReadString('\n')
				if err != nil {
					return
				}
				if _, err := c.Write(h.answer(request, peer)); err != nil {
					return
				}
			}
		}()
	}
}

func (h *Host) serveUDP(network string, port uint16) error {
	// Request a control message with the destination of each packet. The server uses that
	// destination as the source of its answer.
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if controlErr := c.Control(func(fd uintptr) {
			if strings.HasSuffix(network, "6") {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
			}
		}); controlErr != nil {
			return controlErr
		}
		return err
	}}
	var c *net.UDPConn
	if err := h.Do(func() error {
		p, err := config.ListenPacket(context.Background(), network, fmt.Sprintf(":%d", port))
		if err == nil {
			c = p.(*net.UDPConn)
		}
		return err
	}); err != nil {
		return fmt.Errorf("serve on %s: %w", h.Name, err)
	}
	h.servers = append(h.servers, c)
	go func() {
		buffer, control := make([]byte, 1500), make([]byte, 128)
		for {
			length, n, _, from, err := c.ReadMsgUDPAddrPort(buffer, control)
			if err != nil {
				return
			}
			// Ignore errors, because the client notices a missing answer.
			_, _, _ = c.WriteMsgUDPAddrPort(h.answer(string(buffer[:length]), from), answerFrom(control[:n]), from)
		}
	}()
	return nil
}

// answerFrom receives the control message of a packet, which contains the packet's
// destination. It returns a control message that makes this destination the source of the
// answer. The result names no interface, because the interface in the received message
// may be wrong for traffic between addresses of one host.
func answerFrom(control []byte) []byte {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) == unix.SizeofInet4Pktinfo:
			return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(m.Data[4:8])})
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) == unix.SizeofInet6Pktinfo:
			return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: [16]byte(m.Data)})
		}
	}
	return nil
}
