// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"net"
	"net/netip"
)

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
// the ownership until release is called or the process ends. If another process has it,
// the error wraps [sink.ErrOwned].
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
