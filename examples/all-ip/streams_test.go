// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"flag"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

var withSCTP = flag.Bool("sctp", false, "test SCTP, too, which the kernel must have")

// TestStreams sends data over TCP and SCTP between a client and a pod, in both directions and
// families, with a filter and without.
func TestStreams(t *testing.T) {
	t.Run("TCP", func(t *testing.T) { testStreams(t, "tcp", unix.IPPROTO_TCP) })
	if *withSCTP {
		t.Run("SCTP", func(t *testing.T) { testStreams(t, "sctp", unix.IPPROTO_SCTP) })
	}
}

func testStreams(t *testing.T, name string, protocol int) {
	n := newNode(t)
	n.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1")
	client, pod := netnstest.New(t), netnstest.New(t)
	for device, other := range map[string]*netnstest.Namespace{"client": client, "pod": pod} {
		n.Join(t, device, other, "eth0")
		for _, network := range map[string][]string{"client": {"10.1.0.%/24", "fd01::%/64"}, "pod": {"11.0.2.%/24", "1100::20%/120"}}[device] {
			n.Add(t, device, strings.Replace(network, "%", "1", 1))
			other.Add(t, "eth0", strings.Replace(network, "%", "2", 1))
			gateway, _, _ := strings.Cut(strings.Replace(network, "%", "1", 1), "/")
			other.Route(t, "default", gateway, "eth0")
		}
	}
	families := []struct{ client, pod, external string }{{"10.1.0.2", "11.0.2.2", "10.0.0.55"}, {"fd01::2", "1100::202", "1000::55"}}
	for _, f := range families {
		serve(t, pod, protocol, f.pod, 9, 10)
		serve(t, client, protocol, f.client, 9)
	}
	program := func(annotations map[string]string) {
		t.Helper()
		v := view(endpoint("11.0.2.2", true), endpoint("1100::202", true))
		v.Service.Annotations = annotations
		if failed := n.pass(t, v); failed != nil {
			t.Fatal(failed)
		}
	}
	// ask connects, and checks the source that the other end sees. The source "nothing" means that
	// no packet arrives.
	ask := func(from *netnstest.Namespace, source, to string, port uint16, want string) {
		t.Helper()
		patience := time.Minute
		if want == "nothing" {
			patience = time.Second
		}
		got, err := peer(from, protocol, netip.MustParseAddr(source), netip.AddrPortFrom(netip.MustParseAddr(to), port), patience)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			got, err = "nothing", nil
		}
		if got != want || err != nil {
			t.Errorf("port %d of %s sees %q, error %v, want %s", port, to, got, err, want)
		}
	}
	for _, f := range families {
		program(nil)
		ask(client, f.client, f.external, 9, f.client)
		ask(client, f.client, f.external, 10, f.client)
		ask(pod, f.pod, f.client, 9, f.pod)
		program(map[string]string{allow: "1-9/" + name, egress: "true"})
		ask(client, f.client, f.external, 9, f.client)
		ask(client, f.client, f.external, 10, "nothing")
		ask(pod, f.pod, f.client, 9, f.external)
		program(map[string]string{allow: name})
		ask(client, f.client, f.external, 10, f.client)
		program(map[string]string{allow: "udp"})
		ask(client, f.client, f.external, 10, "nothing")
	}
}

// serve listens at ports of an address. It sends each client its address.
func serve(t *testing.T, n *netnstest.Namespace, protocol int, addr string, ports ...uint16) {
	t.Helper()
	for _, port := range ports {
		var l net.Listener
		if err := n.Do(func() error {
			return socket(protocol, netip.AddrPortFrom(netip.MustParseAddr(addr), port), func(fd int, file *os.File) (err error) {
				if err = unix.Listen(fd, 16); err == nil {
					l, err = net.FileListener(file)
				}
				return err
			})
		}); err != nil {
			t.Fatal(err)
		}
		netnstest.Accept(t, l, func(c net.Conn) {
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			io.WriteString(c, host)
		})
	}
}

// peer connects, and returns what the server sends.
func peer(n *netnstest.Namespace, protocol int, from netip.Addr, to netip.AddrPort, patience time.Duration) (string, error) {
	var c net.Conn
	if err := n.Do(func() error {
		return socket(protocol, netip.AddrPortFrom(from, 0), func(fd int, file *os.File) error {
			limit := unix.NsecToTimeval(patience.Nanoseconds())
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
				return err
			}
			err := unix.Connect(fd, sockaddr(to))
			if errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EAGAIN) {
				return os.ErrDeadlineExceeded
			}
			if err == nil {
				c, err = net.FileConn(file)
			}
			return err
		})
	}); err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(c)
	return string(b), err
}

// socket opens a stream socket with a local address. Package net cannot open SCTP sockets, but it
// treats the file of one like a TCP socket.
func socket(protocol int, local netip.AddrPort, use func(fd int, file *os.File) error) error {
	family := unix.AF_INET
	if local.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	file := os.NewFile(uintptr(fd), "socket")
	defer file.Close()
	if err := unix.Bind(fd, sockaddr(local)); err != nil {
		return os.NewSyscallError("bind", err)
	}
	return use(fd, file)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}
