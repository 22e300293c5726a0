// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

func TestAllHostsReachEachOther(t *testing.T) {
	netnstest.NeedRoot(t)
	w, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	hosts := append([]*Host{w.Client, w.Node, w.Node2}, append(w.Local, w.Remote...)...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, from := range hosts {
		for _, to := range hosts {
			for _, family := range []api.Family{api.IPv4, api.IPv6} {
				for _, protocol := range []api.Protocol{api.TCP, api.UDP} {
					answer, err := from.Ask(ctx, protocol, netip.Addr{}, netip.AddrPortFrom(to.Addr(family), PodPorts[0]))
					if err != nil {
						t.Fatalf("from %s to %s: %v", from.Name, to.Name, err)
					}
					if answer.Name != to.Name || (from != to && !slices.Contains(slices.Collect(from.Addrs.All()), answer.Peer.Addr().Unmap())) {
						t.Errorf("from %s to %s over %s %s: answer %v", from.Name, to.Name, family, protocol, answer)
					}
				}
			}
		}
	}
}

// TestUDPRequestsAreRepeated uses a server that does not answer the first request, and
// then answers several requests late.
func TestUDPRequestsAreRepeated(t *testing.T) {
	server, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	client, err := net.DialUDP("udp", nil, server.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	requests := make(chan string, 10)
	go func() {
		buffer := make([]byte, 100)
		for {
			n, err := server.Read(buffer)
			if err != nil {
				return
			}
			requests <- string(buffer[:n])
		}
	}()
	answer := func(name string, requests ...string) {
		for _, r := range requests {
			server.WriteTo((&Host{Name: name}).answer(r, netip.MustParseAddrPort("192.0.2.1:1")), client.LocalAddr())
		}
	}
	c := newConn(client)
	go func() {
		first, second := <-requests, <-requests
		answer("a", second, first, second)
	}()
	if got, err := c.AskRepeatedly(time.Now().Add(time.Minute)); err != nil || got.Name != "a" {
		t.Errorf("answer %v, error %v", got, err)
	}
	go func() { answer("b", <-requests) }()
	if got, err := c.Ask(time.Now().Add(time.Minute)); err != nil || got.Name != "b" {
		t.Errorf("answer %v, error %v; want none of the answers to earlier requests", got, err)
	}
	if got, err := c.Ask(time.Now().Add(2 * resendInterval)); !TimedOut(err) || len(requests) != 1 {
		t.Errorf("answer %v, error %v; Ask sent %d requests, want one", got, err, len(requests))
	}
}

func TestStreamSocketsOutsidePackageNet(t *testing.T) {
	netnstest.NeedRoot(t)
	w, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	const port = 7000
	if err := w.Local[0].serveStream(unix.IPPROTO_TCP, port); err != nil {
		t.Fatal(err)
	}
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		from, to := w.Client.Addrs.Family(family)[2], w.Local[0].Addr(family)
		c, err := w.Client.dialStream(ctx, unix.IPPROTO_TCP, from, netip.AddrPortFrom(to, port))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		answer, err := newConn(c).Ask(time.Now().Add(time.Minute))
		if err != nil || answer.Name != w.Local[0].Name || answer.Peer.Addr() != from {
			t.Errorf("%s: answer %v, error %v", family, answer, err)
		}
		if _, err := w.Client.dialStream(ctx, unix.IPPROTO_TCP, netip.Addr{}, netip.AddrPortFrom(to, port+1)); !Refused(err) {
			t.Errorf("%s without a listener: %v", family, err)
		}
	}
}
