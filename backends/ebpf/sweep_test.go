// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// sweepsUDP reports whether the programs translate connected UDP sockets of the node.
func sweepsUDP(t *testing.T) bool {
	_, err := sweptNetNS()
	if err != nil {
		t.Log("not tested:", err)
	}
	return err == nil
}

// connect connects a UDP socket to a service.
func (n *node) connect(in netnstest.Place, to string) (c net.Conn) {
	n.t.Helper()
	if err := in(func() (err error) { c, err = net.Dial("udp", to); return err }); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { c.Close() })
	return c
}

// askConnected returns the answer to a datagram of a connected socket.
func askConnected(c net.Conn) (string, error) {
	if _, err := c.Write([]byte("?")); err != nil {
		return "", err
	}
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	buffer := make([]byte, 100)
	length, err := c.Read(buffer)
	return string(buffer[:length]), err
}

// mustBeDestroyed checks that the owner of a socket gets an error.
func (n *node) mustBeDestroyed(c net.Conn) {
	n.t.Helper()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
		n.t.Errorf("socket %s to %s must be destroyed: error %v", c.LocalAddr(), c.RemoteAddr(), err)
	}
}

// mustAnswer checks that a connected socket reaches an endpoint.
func (n *node) mustAnswer(c net.Conn, want string) {
	n.t.Helper()
	if got, err := askConnected(c); err != nil || got != want {
		n.t.Errorf("socket to %s reaches %q, %v, want %q", c.RemoteAddr(), got, err, want)
	}
}

// await waits until the sweeper has finished a sweep that begins after the call.
func (s *sweeper) await(t *testing.T) {
	t.Helper()
	for range 2 {
		s.request()
		for deadline := time.Now().Add(10 * time.Second); len(s.wake) > 0; {
			if time.Now().After(deadline) {
				t.Fatal("the sweeper does not run")
			}
			time.Sleep(time.Millisecond)
		}
	}
}

func testDestroyedUDP(t *testing.T) {
	if !sweepsUDP(t) {
		return
	}
	n := newNode(t, Options{})
	n.serve()
	ips := []string{"10.96.0.1", "fd00:96::1"}
	v4, v6 := []string{endpoints[0], endpoints[3]}, []string{endpoints[1], endpoints[4]}
	n.pass(view("web", ips, v4, nil), view("other", []string{"10.96.0.2"}, endpoints[:1], nil))
	stays, direct := n.connect(n.ns.Do, "10.96.0.2:80"), n.connect(n.ns.Do, "10.0.0.1:8080")
	for i, to := range []string{"10.96.0.1:80", "[fd00:96::1]:80", "[::ffff:10.96.0.1]:80"} {
		i %= 2
		n.set(view("web", ips, v4, nil))
		c := n.connect(n.ns.Do, to)
		n.mustAnswer(c, v4[i])
		// A draining endpoint keeps its sockets.
		n.set(view("web", ips, []string{"~" + v4[0], "~" + v4[1], v6[0], v6[1]}, nil))
		n.udp.await(t)
		n.mustAnswer(c, v4[i])
		n.set(view("web", ips, v6, nil))
		n.mustBeDestroyed(c)
		n.mustAnswer(n.connect(n.ns.Do, to), v6[i])
	}
	n.udp.await(t)
	n.mustAnswer(stays, endpoints[0])
	n.mustAnswer(direct, endpoints[0])

	// A new process destroys sockets that lost their endpoint while no process ran.
	n.set(view("web", ips, v4, nil))
	c := n.connect(n.ns.Do, "10.96.0.1:80")
	n.restart()
	n.pass(view("other", []string{"10.96.0.2"}, endpoints[:1], nil))
	n.mustBeDestroyed(c)
	n.mustAnswer(stays, endpoints[0])
	n.delete("other")
	n.mustBeDestroyed(stays)

	// Without the programs, no socket stays with an endpoint.
	n.set(view("web", ips, v4, nil))
	c = n.connect(n.ns.Do, "10.96.0.1:80")
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustAnswer(c, v4[0])
	if err := n.ns.Do(func() error { return n.Cleanup(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	n.mustBeDestroyed(c)
	n.mustAnswer(direct, endpoints[0])
}

// testForgottenUDP checks that the records of a socket are deleted when the socket is
// closed, or connected to something else.
func testForgottenUDP(t *testing.T) {
	if !sweepsUDP(t) {
		return
	}
	n := newNode(t, Options{MaxClients: 10})
	n.serve()
	ips := []string{"10.96.0.1"}
	n.pass(view("web", ips, endpoints[:1], nil))
	for range 30 {
		c := n.connect(n.ns.Do, "10.96.0.1:80")
		n.mustAnswer(c, endpoints[0])
		c.Close()
	}
	if records := count(t, kernelTable[uint64, peer]{"udp_conns", n.programs.UdpConns}); records != 0 {
		t.Errorf("%d records of closed sockets", records)
	}
	n.rawSocket(netip.MustParseAddrPort("10.96.0.1:80"), unix.SOCK_DGRAM, func(fd int) error {
		if err := errors.Join(unix.Connect(fd, sockaddr("10.96.0.1:80")), unix.Connect(fd, sockaddr("10.0.0.1:8080"))); err != nil {
			return err
		}
		n.delete("web")
		n.udp.await(t)
		peer, err := unix.Getpeername(fd)
		if err == nil && name(peer) != "10.0.0.1:8080" {
			err = fmt.Errorf("a socket that was connected to an endpoint has the peer %s", name(peer))
		}
		return err
	})
}

// resetsBelow is a sink that does nothing, and that honours resets.
type resetsBelow struct{ sink.Sink }

func (resetsBelow) Honours() nodeview.Parameters { return nodeview.Parameters{Resets: true} }

func testResetTCP(t *testing.T) {
	n := newNodeAbove(t, resetsBelow{noProxy}, options{})
	for _, addr := range []string{endpoints[0], endpoints[3]} {
		n.ns.Add(t, "lo", addr)
		netnstest.Listen(t, n.ns.Do, net.JoinHostPort(addr, "8080"), func(c net.Conn) { io.Copy(c, c) })
		n.awaitRoute(net.JoinHostPort(addr, "8081"))
	}
	all := []string{endpoints[0], endpoints[3]}
	ips := []string{"10.96.0.1", "fd00:96::1"}
	requested := func(s *api.Service) { s.ResetConnections = true }
	n.pass(view("web", ips, all, nil), view("other", []string{"10.96.0.2"}, all, nil))
	open := func(to string) (c net.Conn) {
		if err := n.ns.Do(func() (err error) { c, err = net.Dial("tcp", to); return err }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	mustStay := func(connections []net.Conn) {
		t.Helper()
		n.tcp.await(t)
		for _, c := range connections {
			if got, err := askConnected(c); err != nil || got != "?" {
				t.Errorf("connection to %s: answer %q, %v", c.RemoteAddr(), got, err)
			}
		}
	}
	lost := []net.Conn{open("10.96.0.1:80"), open("[fd00:96::1]:80"), open("[::ffff:10.96.0.1]:80")}
	stay := []net.Conn{open("10.96.0.2:80"), open("10.0.0.1:8080"), open("[fd00::1]:8080")}
	n.set(view("web", ips, all, requested))
	mustStay(append(lost, stay...))
	n.set(view("web", ips, nil, nil))
	mustStay(append(lost, stay...))
	start := time.Now()
	n.set(view("web", ips, nil, requested))
	for _, c := range lost {
		n.mustBeDestroyed(c)
	}
	t.Logf("%d connections were reset after %v", len(lost), time.Since(start))
	mustStay(stay)
}
