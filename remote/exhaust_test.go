// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/apitest"
)

// ipv6Listener pretends that connections from 127.1.N.M are from 2001:db8:0:N::M.
type ipv6Listener struct{ net.Listener }

func (l ipv6Listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	from := conn.RemoteAddr().(*net.TCPAddr)
	ip := from.IP.To4()
	if ip[1] == 0 {
		return conn, nil
	}
	return ipv6Conn{conn, &net.TCPAddr{IP: net.IP{0x20, 1, 0xd, 0xb8, 6: 0, 7: ip[2], 15: ip[3]}, Port: from.Port}}, nil
}

type ipv6Conn struct {
	net.Conn
	from net.Addr
}

func (c ipv6Conn) RemoteAddr() net.Addr { return c.from }

// connectFrom connects from an address of this machine.
func connectFrom(t *testing.T, to string, from net.IP) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}).Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// A machine without a certificate opens more connections than the server allows, from
// many addresses of its /64. Nodes in other networks and in the same network can still
// connect, and open streams continue.
func TestConnectionsWithoutHandshakeDoNotLockOutNodes(t *testing.T) {
	const limit = 40
	w := newWorld(6, 5, 40)
	ca := newAuthority(t)
	l := listen(t, "127.0.0.1:0")
	opts := quick
	opts.TLS, opts.NodeCertificates, opts.MaxConnections = ca.newFiles(t, "kpng.test"), true, limit
	server, _ := serveOn(t, w.state, ipv6Listener{l}, opts)
	address := l.Addr().String()
	node := apitest.NodeName(1)
	files := ca.newFiles(t, "system:node:"+node)

	var held []net.Conn
	for i := range 3 * limit {
		held = append(held, connectFrom(t, address, net.IPv4(127, 1, 1, byte(i+1))))
	}
	for range 3 {
		if err := try(t, "tcp://"+address, node, files); err != nil {
			t.Errorf("a node in another network cannot connect: %v", err)
		}
	}
	// The oldest connections of the attacker are closed.
	held[0].SetReadDeadline(time.Now().Add(patience))
	if _, err := held[0].Read(make([]byte, 1)); err != io.EOF && !isReset(err) {
		t.Errorf("the attacker's first connection is still open: %v", err)
	}
	if server.Stats().Refused == 0 {
		t.Error("no connection was refused")
	}
}

// Without certificates, all addresses of a /64 together can use half of the connections.
func TestPlaintextConnectionsOfANetworkAreLimited(t *testing.T) {
	const limit = 20
	w := newWorld(6, 5, 40)
	l := listen(t, "127.0.0.1:0")
	opts := quick
	opts.Insecure, opts.MaxConnections = true, limit
	server, _ := serveOn(t, w.state, ipv6Listener{l}, opts)
	address := l.Addr().String()
	for i := range 2 * limit {
		conn := connectFrom(t, address, net.IPv4(127, 1, 1, byte(i+1)))
		// Wait until the server has counted the connection. Then it sends its settings or
		// closes the connection.
		conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil && !isReset(err) {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); (err == nil) != (i < limit/2) {
			t.Errorf("connection %d: %v", i, err)
		}
	}
	if err := try(t, "tcp://"+address, apitest.NodeName(1), nil); err != nil {
		t.Errorf("a client in another network cannot connect: %v", err)
	}
	if n := server.Stats().Refused; n != 3*limit/2 {
		t.Errorf("%d connections refused, want %d", n, 3*limit/2)
	}
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
