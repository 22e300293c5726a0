// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// keepAlive makes the kernel close idle connections to vanished clients after two
// minutes, because each of them uses two descriptors. Keep-alive does nothing for a
// connection with unacknowledged data. The kernel repeats such data, and finally ends the
// connection. On Linux, this takes about 15 minutes.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 4}

// hostSockets opens sockets of the host.
type hostSockets struct {
	// anyAddress allows sockets to bind to addresses that only a route makes local. By
	// default, IPv6 sockets cannot bind to them.
	anyAddress bool
}

// ListenTCP implements sockets.
func (h hostSockets) ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error) {
	config := h.config(listenerControl)
	// By default, package net uses Multipath TCP for listening sockets. Such a socket takes
	// twice the memory, and supports neither filters nor splice.
	config.SetMultipathTCP(false)
	config.KeepAliveConfig = keepAlive
	if keepAliveInherited {
		config.KeepAliveConfig = net.KeepAliveConfig{}
		config.KeepAlive = -1 // connections inherit keep-alive from the listener; this saves four system calls per connection
	}
	l, err := config.Listen(ctx, network("tcp", at.Addr()), at.String())
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// ListenUDP implements sockets.
func (h hostSockets) ListenUDP(ctx context.Context, at netip.AddrPort) (*net.UDPConn, error) {
	config := h.config(func(syscall.RawConn) error { return nil })
	c, err := config.ListenPacket(ctx, network("udp", at.Addr()), at.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

func (h hostSockets) config(prepare func(syscall.RawConn) error) net.ListenConfig {
	return net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		if h.anyAddress {
			if err := bindAnywhere(c); err != nil {
				return fmt.Errorf("allow binding to an address that is local by a route: %w", err)
			}
		}
		return prepare(c)
	}}
}
