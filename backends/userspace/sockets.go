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

// keepAlive is when and how a connection whose peer is silent is found dead:
// after two minutes, as a client that vanished holds two descriptors until
// then. It does nothing for one with data under way: there, the kernel gives up
// when it has sent that again often enough, on Linux for some 15 minutes.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 4}

// hostSockets are those of the host.
type hostSockets struct {
	// anyAddress lets sockets be bound to addresses that the host has by a route
	// only, which IPv6 does not allow otherwise.
	anyAddress bool
}

// ListenTCP implements Sockets.
func (h hostSockets) ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error) {
	config := h.config(listenerControl)
	// A socket for Multipath TCP, which is net's default for listeners, takes no
	// filter, does not splice, and is twice as large.
	config.SetMultipathTCP(false)
	config.KeepAliveConfig = keepAlive
	if keepAliveInherited {
		config.KeepAliveConfig = net.KeepAliveConfig{}
		config.KeepAlive = -1 // spares four system calls a connection
	}
	l, err := config.Listen(ctx, network("tcp", at.Addr()), at.String())
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// ListenUDP implements Sockets.
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
				return fmt.Errorf("preparing to bind to an address that is local by a route: %w", err)
			}
		}
		return prepare(c)
	}}
}
