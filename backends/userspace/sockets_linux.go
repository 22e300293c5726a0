// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// keepAliveInherited says that accepted connections have the keep-alive settings
// of their listener.
const keepAliveInherited = true

// listenerControl gives a listening socket what the connections it accepts
// inherit.
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

// dialControl makes a connection's first bytes confirm that it stands. Else that
// takes a packet of its own, which wakes the endpoint for nothing. Who has no
// bytes after all says so with confirm.
func dialControl(_, _ string, c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0) })
}

// confirm sends what dialControl puts off; the kernel would after 0.2 s.
func confirm(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
}

// bindAnywhere lets a socket be bound to an address that no interface has. The
// option is that of IPv4 for both families.
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
