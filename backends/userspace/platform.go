// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"net"
	"net/netip"
)

// Addresses makes addresses of services local to the host, so that packets to them arrive
// here and sockets can bind to them. Each platform needs its own implementation:
// LocalRoutes is the one for Linux.
//
// A Backend changes up to 64 different addresses concurrently, because each change may
// take seconds. Calls for one address never overlap. The Backend counts the users of an
// address, so that it adds and removes each address once. Verify adds all needed
// addresses again, in case another process removed one.
type Addresses interface {
	// Add makes addr local and returns when it is usable. If that takes too long, it returns
	// an error; the implementation sets the limit. If another program has made addr local,
	// Add succeeds, and Remove later changes nothing. Adding an address again is cheap and
	// succeeds.
	Add(ctx context.Context, addr netip.Addr) error
	// Remove reverts Add, also a failed or partial one. It is called again if it fails.
	Remove(ctx context.Context, addr netip.Addr) error
	// Left returns the addresses that Add made local in an earlier, killed process and that
	// are still local. Start calls it and fails if it fails. The Backend reuses these
	// addresses. After the first pass it removes those that no service needs.
	Left(ctx context.Context) ([]netip.Addr, error)
	// Cleanup reverts every Add of this process and of earlier, killed ones, and nothing
	// else.
	Cleanup(ctx context.Context) error
}

// Sockets opens the listening sockets of a Backend, which closes them. The calls never
// overlap.
type Sockets interface {
	// ListenTCP listens at one address and port, for its IP family only. Accepted
	// connections should use TCP keep-alive.
	ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error)
	// ListenUDP opens a socket bound to one address and port.
	ListenUDP(ctx context.Context, at netip.AddrPort) (*net.UDPConn, error)
}

// network returns package net's name of a protocol over the IP family of addr.
func network(protocol string, addr netip.Addr) string {
	if addr.Is4() {
		return protocol + "4"
	}
	return protocol + "6"
}
