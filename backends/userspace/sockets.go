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

// addresses makes addresses of services local to the host. Packets to a local address
// arrive at this host, and sockets can bind to it.
//
// A backend counts the users of each address: services and draining listeners. It calls
// Add for the first user, and Remove when no users are left. Because these calls may take
// seconds, up to 64 of them run concurrently, but never for the same address. Verify
// calls Add again for all used addresses, in case another process removed one.
type addresses interface {
	// Add makes addr local and returns when addr is usable. If that takes longer than a time
	// limit of the implementation, Add returns an error. If another program has already made
	// addr local, Add succeeds, and Remove later changes nothing. A repeated Add succeeds
	// and is cheap.
	Add(ctx context.Context, addr netip.Addr) error
	// Remove reverts Add, even if Add failed. If Remove fails, the backend repeats it.
	Remove(ctx context.Context, addr netip.Addr) error
	// Left returns the addresses that an earlier process made local and did not remove, for
	// example because it was killed. If Left fails, Start fails. The backend uses these
	// addresses if services need them, and removes the others after the first pass.
	Left(ctx context.Context) ([]netip.Addr, error)
	// Cleanup reverts all calls of Add, by this process and by earlier ones. It changes
	// nothing else.
	Cleanup(ctx context.Context) error
}

// exclusive is implemented by addresses that only one process may use at a time. Own takes
// the ownership until release is called or the process ends. If another process owns the
// addresses, the error wraps [sink.ErrOwned].
type exclusive interface {
	Own(ctx context.Context) (release func(), err error)
}

// sockets opens the listening sockets of a backend. The backend closes these sockets.
// Calls of these methods never overlap.
type sockets interface {
	// ListenTCP listens at one address and port, and only for the IP family of the address.
	// Accepted connections should use TCP keep-alive.
	ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error)
	// ListenUDP opens a socket that is bound to one address and port.
	ListenUDP(ctx context.Context, at netip.AddrPort) (*net.UDPConn, error)
}

// network returns the name that package net has for a protocol and the IP family of addr.
// An example is "tcp6".
func network(protocol string, addr netip.Addr) string {
	if addr.Is4() {
		return protocol + "4"
	}
	return protocol + "6"
}
