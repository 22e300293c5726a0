// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// watch returns a channel for the error that the kernel reports for c.
func watch(t *testing.T, c *net.TCPConn) <-chan error {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- waitError(raw) }()
	return ended
}

// expectReset waits for the error of a connection. The error must mean a reset.
func expectReset(t *testing.T, side string, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		// After the other side has closed its direction, a reset is reported as EPIPE.
		if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error of the %s: %v, want a reset", side, err)
		}
	case <-time.After(patience):
		t.Errorf("the %s received no reset", side)
	}
}

// halfClosed connects a client to an endpoint through a backend. It returns both sockets
// after the client has closed its direction.
func halfClosed(t *testing.T, opts settings) (w *world, c *client, endpoint *net.TCPConn) {
	t.Helper()
	w = newWorld(t, opts)
	port := freePort(t, "127.0.0.2")
	read, end := make(chan *net.TCPConn), make(chan struct{})
	t.Cleanup(func() { close(end) })
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
		io.Copy(io.Discard, c)
		read <- c
		<-end
	})).view())
	c = dial(t, "127.0.0.2", port)
	c.Write([]byte("hello"))
	c.CloseWrite()
	return w, c, <-read
}

func TestResetAfterHalfCloseIsForwarded(t *testing.T) {
	t.Run("from the client", func(t *testing.T) {
		w, c, endpoint := halfClosed(t, settings{})
		ended := watch(t, endpoint)
		resetConn(c.TCPConn)
		expectReset(t, "endpoint", ended)
		eventually(t, "the connection ends", func() bool { return w.stats("web").active == 0 })
	})
	t.Run("from the endpoint", func(t *testing.T) {
		w := newWorld(t, settings{})
		port := freePort(t, "127.0.0.2")
		reset := make(chan struct{})
		w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
			c.CloseWrite()
			<-reset
			resetConn(c)
		})).view())
		c := dial(t, "127.0.0.2", port)
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Fatalf("error of the client: %v, want EOF", err)
		}
		ended := watch(t, c.TCPConn)
		close(reset)
		expectReset(t, "client", ended)
	})
}

// TestVanishedHalfClosedClientIsDetected removes the client's socket without sending a
// packet. With keep-alive probes, the kernel detects that the socket is missing.
func TestVanishedHalfClosedClientIsDetected(t *testing.T) {
	netnstest.NeedRoot(t)
	w, c, endpoint := halfClosed(t, settings{})
	l := w.listenerAt(socketAddrOf(t, api.TCP, c.RemoteAddr().String())).(*tcpListener)
	set := func(c *net.TCPConn, options map[int]int) {
		t.Helper()
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		for option, value := range options {
			if err := onDescriptor(raw, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, option, value) }); err != nil {
				t.Fatal(err)
			}
		}
	}
	ended := watch(t, endpoint)
	set(c.TCPConn, map[int]int{unix.TCP_REPAIR: 1}) // so that Close sends no packet
	c.Close()
	l.mu.Lock()
	for r := range l.relays {
		set(r.client, map[int]int{unix.TCP_KEEPIDLE: 1})
	}
	l.mu.Unlock()
	expectReset(t, "endpoint", ended)
}

func TestIdleHalfClosedConnectionIsReset(t *testing.T) {
	_, c, endpoint := halfClosed(t, settings{Options: Options{HalfClosedTimeout: 100 * time.Millisecond}})
	atEndpoint, atClient := watch(t, endpoint), watch(t, c.TCPConn)
	expectReset(t, "endpoint", atEndpoint)
	expectReset(t, "client", atClient)
}

// TestActiveHalfClosedConnectionContinues sends single bytes until the connection is older
// than the timeout. If the machine is so busy that two bytes are a timeout apart, the
// connection may end. Then the test repeats with a longer timeout.
func TestActiveHalfClosedConnectionContinues(t *testing.T) {
	for timeout := 300 * time.Millisecond; timeout < time.Minute; timeout *= 2 {
		_, c, endpoint := halfClosed(t, settings{Options: Options{HalfClosedTimeout: timeout}})
		begin := time.Now()
		moved := begin // the last byte moved at this time or later
		for moved.Sub(begin) < 3*timeout {
			now := time.Now()
			_, err := endpoint.Write([]byte("x"))
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			if idle := time.Since(moved); err != nil && idle < timeout {
				t.Fatalf("the connection ended %v after it was active, with a timeout of %v: %v", idle, timeout, err)
			} else if err != nil {
				break
			}
			moved = now
		}
		if moved.Sub(begin) >= 3*timeout {
			return
		}
	}
	t.Fatal("the machine is too busy for this test")
}
