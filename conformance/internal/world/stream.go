// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Package net cannot open SCTP sockets. But it accepts the file descriptor of a
// one-to-one SCTP socket and treats it as a TCP socket, because the system calls are the
// same. The argument protocol of the functions below is IPPROTO_SCTP, except in tests:
// these pass IPPROTO_TCP, because the kernel may lack SCTP.

// hasSCTP reports whether the kernel has SCTP sockets.
func hasSCTP() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// serveStream starts a server that answers like the TCP server, but over any protocol.
func (h *Host) serveStream(protocol int, port uint16) error {
	var l net.Listener
	err := h.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), "server")
		defer file.Close()
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}); err != nil {
			return err
		}
		if err := unix.Listen(fd, 128); err != nil {
			return err
		}
		l, err = net.FileListener(file)
		return err
	})
	if err != nil {
		return fmt.Errorf("serve protocol %d on %s: %w", protocol, h.Name, err)
	}
	h.servers = append(h.servers, l)
	go h.accept(l)
	return nil
}

// dialStream connects a stream socket.
func (h *Host) dialStream(ctx context.Context, protocol int, from netip.Addr, to netip.AddrPort) (c net.Conn, err error) {
	err = h.Do(func() error {
		family := unix.AF_INET
		if to.Addr().Is6() {
			family = unix.AF_INET6
		}
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		file := os.NewFile(uintptr(fd), "client")
		defer file.Close()
		if deadline, ok := ctx.Deadline(); ok {
			patience := unix.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience); err != nil {
				return os.NewSyscallError("setsockopt", err)
			}
		}
		if from.IsValid() {
			if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))); err != nil {
				return os.NewSyscallError("bind", err)
			}
		}
		switch err := unix.Connect(fd, sockaddr(to)); {
		case errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("connect to %s: %w", to, os.ErrDeadlineExceeded)
		case err != nil:
			return fmt.Errorf("connect to %s: %w", to, err)
		}
		c, err = net.FileConn(file)
		return err
	})
	return c, err
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}
