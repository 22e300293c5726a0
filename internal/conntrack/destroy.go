// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

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

	// The sizes of struct inet_diag_req_v2 and inet_diag_msg, and the place of struct
	// inet_diag_sockid, which has ports, addresses, an interface and a cookie.
	diagRequestLen, diagAnswerLen = 56, 72
	requestID, answerID, idLen    = 8, 4, 48
)

// sockets ends the TCP sockets of a network namespace. One goroutine may use it.
type sockets struct {
	fd  int
	buf [4096]byte
}

// openSockets opens a netlink socket in a network namespace.
func openSockets(netNS int) (*sockets, error) {
	s := &sockets{}
	var err error
	nsErr := netns.Do(netNS, func() {
		s.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	})
	if err = errors.Join(nsErr, err); err != nil {
		return nil, fmt.Errorf("open a socket for sock_diag: %w", err)
	}
	return s, nil
}

func (s *sockets) close() { unix.Close(s.fd) }

// destroy ends the connection of the local socket with these addresses. The kernel sends a
// reset to the peer, and the socket's owner gets the error ECONNABORTED. The result is
// false if there is no such socket. The search for a socket also finds a listener at the
// local port, which must stay.
func (s *sockets) destroy(local, peer netip.AddrPort) (bool, error) {
	request := make([]byte, diagRequestLen)
	request[0], request[1] = unix.AF_INET, unix.IPPROTO_TCP
	if local.Addr().Is6() {
		request[0] = unix.AF_INET6
	}
	binary.NativeEndian.PutUint32(request[4:], ^uint32(0)) // all states
	id := request[requestID:]
	binary.BigEndian.PutUint16(id, local.Port())
	binary.BigEndian.PutUint16(id[2:], peer.Port())
	copy(id[4:], local.Addr().AsSlice())
	copy(id[20:], peer.Addr().AsSlice())
	copy(id[40:], []byte{255, 255, 255, 255, 255, 255, 255, 255}) // any cookie
	answer, err := s.exchange(unix.SOCK_DIAG_BY_FAMILY, 0, request)
	if err != nil || len(answer) < diagAnswerLen {
		return false, err
	}
	connected := []byte{stateEstablished, stateFinWait1, stateFinWait2, stateCloseWait}
	found := answer[answerID : answerID+idLen]
	if !slices.Contains(connected, answer[1]) || string(found[:4]) != string(id[:4]) {
		return false, nil
	}
	copy(id[40:], found[40:]) // exactly this socket
	_, err = s.exchange(sockDestroy, unix.NLM_F_ACK, request)
	return err == nil, err
}

// exchange sends a request and returns the content of the answer. It returns nothing if
// the kernel knows no such socket.
func (s *sockets) exchange(kind uint16, flags uint16, request []byte) ([]byte, error) {
	message := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(request))
	binary.NativeEndian.PutUint32(message, uint32(cap(message)))
	binary.NativeEndian.PutUint16(message[4:], kind)
	binary.NativeEndian.PutUint16(message[6:], unix.NLM_F_REQUEST|flags)
	if err := unix.Sendto(s.fd, append(message, request...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("send a request to sock_diag: %w", err)
	}
	n, _, err := unix.Recvfrom(s.fd, s.buf[:], 0)
	if err != nil {
		return nil, fmt.Errorf("read the answer of sock_diag: %w", err)
	}
	if n < unix.NLMSG_HDRLEN+4 {
		return nil, errors.New("read the answer of sock_diag: too short")
	}
	content := s.buf[unix.NLMSG_HDRLEN:n]
	if binary.NativeEndian.Uint16(s.buf[4:]) != unix.NLMSG_ERROR {
		return content, nil
	}
	errno := unix.Errno(-int32(binary.NativeEndian.Uint32(content)))
	if errno == 0 || errno == unix.ENOENT {
		return nil, nil
	}
	return nil, fmt.Errorf("sock_diag refuses a request: %w", errno)
}
