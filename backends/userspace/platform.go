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
// take seconds. Calls for the same address never overlap. The Backend counts the users of
// an address. It calls Add for the first user and Remove after the last one. Verify adds
// all needed addresses again, in case another process removed one.
type Addresses interface {
	// Add makes addr local and returns when addr is usable. The implementation limits how
	// long that may take, and then returns an error. If another program has made addr local,
	// Add succeeds, and Remove later changes nothing. Adding an address again succeeds and
	// is cheap.
	Add(ctx context.Context, addr netip.Addr) error
	// Remove reverts Add, even a failed Add. It is called again if it fails.
	Remove(ctx context.Context, addr netip.Addr) error
	// Left returns the addresses that an earlier process made local and did not remove, for
	// example because it was killed. Start calls Left and returns its error. The Backend
	// reuses these addresses. After the first pass it removes those that no service needs.
	Left(ctx context.Context) ([]netip.Addr, error)
	// Cleanup reverts all calls of Add, in this process and in earlier, killed processes. It
	// changes nothing else.
	Cleanup(ctx context.Context) error
}

// Sockets opens the listening sockets of a Backend. The Backend closes them. The calls
// never overlap.
type Sockets interface {
	// ListenTCP listens at one address and port, for its IP family only. Accepted
	// connections should use TCP keep-alive.
	ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error)
	// ListenUDP opens a socket bound to one address and port.
	ListenUDP(ctx context.Context, at netip.AddrPort) (*net.UDPConn, error)
}

// network returns the name of a network for package net, such as "tcp6", from a protocol
// and the IP family of addr.
func network(protocol string, addr netip.Addr) string {
	if addr.Is4() {
		return protocol + "4"
	}
	return protocol + "6"
}
