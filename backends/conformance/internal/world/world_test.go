// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"bufio"
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

func TestAllHostsReachEachOther(t *testing.T) {
	w, err := New()
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
					if answer.Name != to.Name || (from != to && !from.Addrs.Contains(answer.Peer.Addr())) {
						t.Errorf("from %s to %s over %s %s: answer %v", from.Name, to.Name, family, protocol, answer)
					}
				}
			}
		}
	}
}

func TestStreamSocketsOutsidePackageNet(t *testing.T) {
	w, err := New()
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
		answer, err := (&Conn{c, bufio.NewReader(c)}).Ask(time.Now().Add(time.Minute))
		if err != nil || answer.Name != w.Local[0].Name || answer.Peer.Addr() != from {
			t.Errorf("%s: answer %v, error %v", family, answer, err)
		}
		if _, err := w.Client.dialStream(ctx, unix.IPPROTO_TCP, netip.Addr{}, netip.AddrPortFrom(to, port+1)); !Refused(err) {
			t.Errorf("%s without a listener: %v", family, err)
		}
	}
}
