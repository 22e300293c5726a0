// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command pods takes the place of the pods of demo.yaml. It makes their addresses local
// on this host, and answers HTTP and UDP requests with the name of the pod.
//
//	pods 10.244.0.2:8080 10.244.0.3:8080 [fd00:10:244::2]:8080
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := play(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pods:", err)
		os.Exit(1)
	}
}

func play(ctx context.Context, pods []string) error {
	servers, ctx := errgroup.WithContext(ctx)
	for _, pod := range pods {
		at, err := netip.ParseAddrPort(pod)
		if err != nil {
			return err
		}
		route := localRoute(at.Addr())
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("make %s local: %w", at.Addr(), err)
		}
		defer netlink.RouteDel(route)
		servers.Go(func() error { return serveHTTP(ctx, at) })
		servers.Go(func() error { return serveUDP(ctx, at) })
	}
	return servers.Wait()
}

// localRoute returns a route that makes addr local. The proxy removes all local routes with
// the protocol number 107, so this route has another number.
func localRoute(addr netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		LinkIndex: 1, // the loopback interface
		Type:      unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		Protocol: 108, Priority: 2048,
	}
}

// config can listen at an address that no interface has. Only a route makes such an
// address local.
var config = net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
	var err error
	return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1) }), err)
}}

func serveHTTP(ctx context.Context, at netip.AddrPort) error {
	listener, err := config.Listen(ctx, "tcp", at.String())
	if err != nil {
		return err
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "pod", at) })}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func serveUDP(ctx context.Context, at netip.AddrPort) error {
	socket, err := config.ListenPacket(ctx, "udp", at.String())
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { socket.Close() })()
	for {
		_, client, err := socket.ReadFrom(make([]byte, 1<<16))
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		socket.WriteTo(fmt.Appendln(nil, "pod", at), client)
	}
}
