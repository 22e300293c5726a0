// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"net"
	"net/netip"
)

// Addresses makes addresses of services the host's own, so that packets to them
// end here and sockets can be bound to them. It is what differs most between
// platforms: LocalRoutes is that of Linux.
//
// A Backend adds and removes different addresses at the same time, up to 64 of them,
// as each may take seconds; the calls for one address come one at a time. It
// counts who needs an address, so that each is added and removed once; but all that
// are needed are added again by Verify, in case somebody else took one away.
type Addresses interface {
	// Add makes addr local and returns once it is, or with an error if it is not
	// within a time the implementation bounds. An address that somebody else has
	// made local is none of its business: that is no error, and Remove then
	// changes nothing. Nor is it an error, and costs little, if addr has been added.
	Add(ctx context.Context, addr netip.Addr) error
	// Remove takes back what Add did, or what is left of an Add that failed. It is
	// called again if it fails.
	Remove(ctx context.Context, addr netip.Addr) error
	// Left returns the addresses that Add made local in a process before this one, which
	// was killed, and that are local still. A Backend calls it when it starts, and does not
	// start if it fails. It removes those that no service needs when the first pass has
	// ended, and uses the others as they are.
	Left(ctx context.Context) ([]netip.Addr, error)
	// Cleanup removes all that Add ever did, in this process or in one before it
	// that was killed, and nothing else.
	Cleanup(ctx context.Context) error
}

// Sockets opens the sockets that a Backend listens with, and which it closes. A
// Backend calls one method at a time.
type Sockets interface {
	// ListenTCP listens at one address and port, for its IP family alone. What
	// is accepted should have TCP keep-alive switched on.
	ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error)
	// ListenUDP opens a socket bound to one address and port.
	ListenUDP(ctx context.Context, at netip.AddrPort) (*net.UDPConn, error)
}

// network returns the name that package net has for a protocol over the IP
// family of addr.
func network(protocol string, addr netip.Addr) string {
	if addr.Is4() {
		return protocol + "4"
	}
	return protocol + "6"
}
