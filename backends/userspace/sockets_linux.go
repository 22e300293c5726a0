// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// keepAliveInherited reports that accepted connections inherit the keep-alive settings of
// their listener.
const keepAliveInherited = true

// listenerControl sets the options that accepted connections inherit from a listening
// socket.
func listenerControl(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error {
		for option, value := range map[int]int{
			unix.TCP_KEEPIDLE:  int(keepAlive.Idle / time.Second),
			unix.TCP_KEEPINTVL: int(keepAlive.Interval / time.Second),
			unix.TCP_KEEPCNT:   keepAlive.Count,
		} {
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, option, value); err != nil {
				return fmt.Errorf("setting TCP keep-alive: %w", err)
			}
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1); err != nil {
			return fmt.Errorf("setting TCP keep-alive: %w", err)
		}
		return nil
	})
}

// dialControl delays the last packet of the handshake until the first bytes are sent, so
// that both are one packet. A separate packet would wake the endpoint too early. A
// connection without bytes to send calls confirm.
func dialControl(_, _ string, c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0) })
}

// confirm sends the last packet of the handshake, which dialControl delays. Without
// confirm, the kernel sends it after 0.2 s.
func confirm(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
}

// bindAnywhere lets a socket bind to an address that no interface has. The IPv4 option
// works for both families.
func bindAnywhere(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
	})
}

// onDescriptor calls f with the descriptor of c.
func onDescriptor(c syscall.RawConn, f func(fd int) error) error {
	var err error
	if controlErr := c.Control(func(fd uintptr) { err = f(int(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}
