// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// programmed records when each endpoint address reaches the kernel, until ctx ends. With
// IPVS, it only records endpoints for which the function expect was called.
func (c *cluster) programmed(t testing.TB, ctx context.Context) (seen *sightings, expect func(service int, pod netip.Addr)) {
	t.Helper()
	if c.ipvs {
		return virtualServers(t, ctx)
	}
	return tables(t, ctx), func(int, netip.Addr) {}
}

// tables searches nftables notifications for the four bytes of an address,
// so it works for every layout of tables.
func tables(t testing.TB, ctx context.Context) *sightings {
	t.Helper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 512<<20),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)}),
	); err != nil {
		t.Fatal(err)
	}
	seen := newSightings()
	done := make(chan struct{})
	t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		defer unix.Close(fd)
		buffer := make([]byte, 1<<20)
		for ctx.Err() == nil {
			n, _, err := unix.Recvfrom(fd, buffer, 0)
			now := time.Now()
			switch {
			case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
			case err != nil:
				t.Errorf("listen to notifications of the kernel: %v", err)
				return
			default:
				for i := 0; i+4 <= n; i++ {
					if a := netip.AddrFrom4([4]byte(buffer[i : i+4])); podCIDR.Contains(a) {
						seen.saw(a, now)
					}
				}
			}
		}
	}()
	return seen
}

// connect connects to a service's cluster IP and returns how long that takes.
func connect(service int, patience time.Duration) (time.Duration, error) {
	return connectTo(netip.AddrPortFrom(vip(service), servicePort), patience)
}

// connectTo connects to an IPv4 address and returns how long that takes.
func connectTo(to netip.AddrPort, patience time.Duration) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if err := errors.Join(
		// Close connections with a reset, so that their local ports become free.
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
	); err != nil {
		return 0, err
	}
	timeout := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
		return 0, err
	}
	begin := time.Now()
	for {
		// A signal of Go's scheduler may interrupt Connect. In this case call Connect again
		// until it returns EISCONN.
		err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EISCONN):
			return time.Since(begin), nil
		default:
			return time.Since(begin), err
		}
	}
}

// answer accepts connections to all pods until the test ends.
func answer(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", podPort))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
}
