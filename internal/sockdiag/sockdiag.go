// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package sockdiag finds and destroys connected sockets of a network namespace, through
// the kernel's sock_diag(7). Destroying needs CAP_NET_ADMIN.
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/internal/netns"
	"golang.org/x/sys/unix"
)

// Values of linux/inet_diag.h, linux/sock_diag.h and net/tcp_states.h.
const (
	sockDestroy = 21

	stateEstablished = 1
	stateFinWait1    = 4
	stateFinWait2    = 5
	stateCloseWait   = 8

	// The sizes of struct inet_diag_req_v2 and inet_diag_msg, and the offset of struct
	// inet_diag_sockid in them. This struct has ports, addresses, an interface and a
	// cookie.
	requestLen, answerLen      = 56, 72
	requestID, answerID, idLen = 8, 4, 48
)

// Conn finds sockets in the states that connected contains. A connected UDP socket is in
// the first of these states.
var connected = []byte{stateEstablished, stateFinWait1, stateFinWait2, stateCloseWait}

// Conn is a netlink socket of a network namespace. One goroutine at a time may use it. After
// an error, it must be closed.
type Conn struct {
	fd  int
	buf [32 << 10]byte // as long as the messages that the kernel sends in dumps
}

// Open opens a netlink socket in the network namespace with the file descriptor netNS. If
// netNS is 0, this is the network namespace of the calling thread.
func Open(netNS int) (*Conn, error) {
	c := &Conn{}
	var err error
	nsErr := netns.Do(netNS, func() {
		c.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	})
	if err = errors.Join(nsErr, err); err != nil {
		return nil, fmt.Errorf("open a socket for sock_diag: %w", err)
	}
	return c, nil
}

// Close closes the socket.
func (c *Conn) Close() { unix.Close(c.fd) }

// Socket is a connected socket. Peer is the address to which the socket is connected. Cookie
// identifies the socket until the next boot.
type Socket struct {
	Peer    netip.AddrPort
	Cookie  uint64
	request [requestLen]byte // for exactly this socket
}

// newRequest returns a request for sockets whose state is in the list connected.
func newRequest(family, protocol uint8) (r [requestLen]byte) {
	r[0], r[1] = family, protocol
	var states uint32
	for _, s := range connected {
		states |= 1 << s
	}
	binary.NativeEndian.PutUint32(r[4:], states)
	return r
}

// Connected calls f for all connected sockets of TCP or UDP.
func (c *Conn) Connected(protocol uint8, f func(Socket)) error {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		r := newRequest(family, protocol)
		if err := c.send(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, r[:]); err != nil {
			return err
		}
		for more := true; more; {
			err := c.receive(func(kind uint16, content []byte) {
				if kind == unix.NLMSG_DONE {
					more = false
				} else if len(content) >= answerLen {
					f(socketOf(protocol, content))
				}
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// socketOf returns the socket that an answer describes.
func socketOf(protocol uint8, answer []byte) Socket {
	s := Socket{request: newRequest(answer[0], protocol)}
	id := s.request[requestID:]
	copy(id, answer[answerID:answerID+idLen])
	addr := netip.AddrFrom16([16]byte(id[20:36])).Unmap()
	if answer[0] == unix.AF_INET {
		addr = netip.AddrFrom4([4]byte(id[20:24]))
	}
	s.Peer = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(id[2:]))
	s.Cookie = uint64(binary.NativeEndian.Uint32(id[40:])) | uint64(binary.NativeEndian.Uint32(id[44:]))<<32
	return s
}

func align(length int) int { return (length + 3) &^ 3 }

// Destroy destroys a socket: its owner gets the error ECONNABORTED. The peer of a TCP socket
// gets a reset. A UDP socket is no longer connected. The result is false if the socket does
// not exist any more.
func (c *Conn) Destroy(s Socket) (bool, error) {
	if err := c.send(sockDestroy, unix.NLM_F_ACK, s.request[:]); err != nil {
		return false, err
	}
	err := c.receive(func(uint16, []byte) {})
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// CanDestroy returns an error if the kernel does not let the process destroy sockets of
// the protocol.
func (c *Conn) CanDestroy(protocol uint8) error {
	// This call fails if the kernel has no support for the protocol.
	if err := c.Connected(protocol, func(Socket) {}); err != nil {
		return err
	}
	_, err := c.Destroy(Socket{request: newRequest(unix.AF_INET, protocol)}) // no socket has port 0
	return err
}

// DestroyTCP ends the connection of the local TCP socket with these addresses. The result is
// false if there is no such socket. The search for a socket also finds a listener at the
// local port. DestroyTCP keeps this listener.
func (c *Conn) DestroyTCP(local, peer netip.AddrPort) (bool, error) {
	family := uint8(unix.AF_INET)
	if local.Addr().Is6() {
		family = unix.AF_INET6
	}
	r := newRequest(family, unix.IPPROTO_TCP)
	id := r[requestID:]
	binary.BigEndian.PutUint16(id, local.Port())
	binary.BigEndian.PutUint16(id[2:], peer.Port())
	copy(id[4:], local.Addr().AsSlice())
	copy(id[20:], peer.Addr().AsSlice())
	copy(id[40:], []byte{255, 255, 255, 255, 255, 255, 255, 255}) // any cookie
	if err := c.send(unix.SOCK_DIAG_BY_FAMILY, 0, r[:]); err != nil {
		return false, err
	}
	var found *Socket
	err := c.receive(func(_ uint16, content []byte) {
		if len(content) >= answerLen && slices.Contains(connected, content[1]) && string(content[answerID:answerID+4]) == string(id[:4]) {
			s := socketOf(unix.IPPROTO_TCP, content)
			found = &s
		}
	})
	if errors.Is(err, unix.ENOENT) || err == nil && found == nil {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return c.Destroy(*found)
}

func (c *Conn) send(kind, flags uint16, content []byte) error {
	message := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(content))
	binary.NativeEndian.PutUint32(message, uint32(cap(message)))
	binary.NativeEndian.PutUint16(message[4:], kind)
	binary.NativeEndian.PutUint16(message[6:], unix.NLM_F_REQUEST|flags)
	if err := unix.Sendto(c.fd, append(message, content...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send a request to sock_diag: %w", err)
	}
	return nil
}

// receive reads some messages, and calls f with the type and content of each.
func (c *Conn) receive(f func(kind uint16, content []byte)) error {
	n, _, err := unix.Recvfrom(c.fd, c.buf[:], 0)
	if err != nil {
		return fmt.Errorf("read the answer of sock_diag: %w", err)
	}
	for rest := c.buf[:n]; len(rest) > 0; {
		if len(rest) < unix.NLMSG_HDRLEN+4 {
			return errors.New("read the answer of sock_diag: too short")
		}
		length := int(binary.NativeEndian.Uint32(rest))
		if length < unix.NLMSG_HDRLEN+4 || length > len(rest) {
			return fmt.Errorf("read the answer of sock_diag: message of %d bytes", length)
		}
		kind, content := binary.NativeEndian.Uint16(rest[4:]), rest[unix.NLMSG_HDRLEN:length]
		// The content begins with an error number. At the end of a dump, this number may be
		// 0.
		if kind == unix.NLMSG_ERROR || kind == unix.NLMSG_DONE {
			if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(content))); errno != 0 {
				return fmt.Errorf("sock_diag refuses a request: %w", errno)
			}
		}
		f(kind, content)
		rest = rest[min(align(length), len(rest)):]
	}
	return nil
}
