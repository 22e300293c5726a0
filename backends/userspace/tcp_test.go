// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
)

func TestEndpointsTakeTurns(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a"), namedServer(t, "b"), namedServer(t, "c")).view())
	got := map[string]int{}
	for range 30 {
		got[askOnce(t, "127.0.0.2", port)]++
	}
	if diff := cmp.Diff(map[string]int{"a": 10, "b": 10, "c": 10}, got); diff != "" {
		t.Errorf("connections by endpoint (-want +got):\n%s", diff)
	}
}

// TestManyBytesArriveUnchanged sends many bytes in both directions, so that they are
// spliced.
func TestManyBytesArriveUnchanged(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	echo := listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) { io.Copy(c, c) })
	w.set(serviceAt("echo", "127.0.0.2", port, api.TCP).addEndpoints(echo).view())
	c := dial(t, "127.0.0.2", port)
	sent, got := sha256.New(), sha256.New()
	const size = 16 << 20
	go func() {
		io.CopyN(io.MultiWriter(c.TCPConn, sent), rand.Reader, size)
		c.CloseWrite()
	}()
	n, err := io.Copy(got, c.TCPConn)
	if n != size || err != nil {
		t.Fatalf("received %d bytes of %d, error %v", n, size, err)
	}
	if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Error("the received bytes differ from the sent bytes")
	}
}

func TestHalfClosedConnectionContinues(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	// The server first reads to the end, and then answers.
	count := listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
		all, _ := io.ReadAll(c)
		c.Write(bytes.ToUpper(all))
	})
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(count).view())
	c := dial(t, "127.0.0.2", port)
	c.Write([]byte("hello"))
	c.CloseWrite()
	got, err := io.ReadAll(c)
	if string(got) != "HELLO" || err != nil {
		t.Errorf("after the half-close the answer is %q, error %v", got, err)
	}
}

func TestResetIsForwardedAsReset(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	ended := make(chan error, 1)
	server := listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
		b := make([]byte, 5)
		io.ReadFull(c, b)
		if string(b) == "reset" {
			c.SetLinger(0)
			return
		}
		c.Write(b)
		_, err := c.Read(b)
		ended <- err
	})
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(server).view())

	t.Run("from the endpoint", func(t *testing.T) {
		c := dial(t, "127.0.0.2", port)
		c.Write([]byte("reset"))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error of the client: %v, want a reset", err)
		}
	})
	t.Run("from the client", func(t *testing.T) {
		c := dial(t, "127.0.0.2", port)
		c.Write([]byte("hello"))
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		c.SetLinger(0)
		c.Close()
		if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error of the endpoint: %v, want a reset", err)
		}
	})
}

// TestResetIsForwardedWhileBytesMove resets a connection while its bytes are spliced.
func TestResetIsForwardedWhileBytesMove(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	const before = 4 << 20 // number of bytes before the reset
	ended := make(chan error, 1)
	server := listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
		mode := make([]byte, 1)
		io.ReadFull(c, mode)
		if mode[0] == 'r' {
			io.CopyN(c, zeros{}, before)
			c.SetLinger(0)
			return
		}
		_, err := io.Copy(c, zeros{})
		ended <- err
	})
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(server).view())

	t.Run("from the endpoint", func(t *testing.T) {
		c := dial(t, "127.0.0.2", port)
		c.Write([]byte("r"))
		if n, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error of the client: %v after %d bytes, want a reset", err, n)
		}
	})
	t.Run("from the client", func(t *testing.T) {
		c := dial(t, "127.0.0.2", port)
		c.Write([]byte("w"))
		if _, err := io.CopyN(io.Discard, c, before); err != nil {
			t.Fatal(err)
		}
		c.SetLinger(0)
		c.Close()
		if err := <-ended; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("error of the endpoint: %v, want a reset", err)
		}
	})
}

// zeros is a reader that returns zero bytes without end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// TestListenerClosesDuringConnections repeatedly opens and closes a listener while
// clients connect. After each close, the number of counted connections must be 0.
func TestListenerClosesDuringConnections(t *testing.T) {
	w := newWorld(t, settings{})
	w.set() // without views, w.set only waits until the backend has started
	at := socketAddr{api.TCP, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), uint16(freePort(t, "127.0.0.2")))}
	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(freePort(t, "127.0.0.1")))
	view := serviceAt("web", "127.0.0.2", int32(at.at.Port()), api.TCP).addEndpoints(dead).view()
	p, err := newService(&w.engine, key("web")).planFor(view, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := p.sockets[0].rules
	ended := make(chan struct{})
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for {
				select {
				case <-ended:
					return
				default:
				}
				if c, err := net.Dial("tcp", at.at.String()); err == nil {
					c.Close()
				}
			}
		})
	}
	for range 300 {
		l, err := w.listenTCP(t.Context(), at, r)
		if err != nil {
			t.Error(err)
			break
		}
		time.Sleep(time.Millisecond)
		l.close()
		<-l.drained()
		l.mu.Lock()
		if l.serving != 0 {
			t.Errorf("%d connections are counted after all have ended", l.serving)
		}
		l.mu.Unlock()
	}
	close(ended)
	clients.Wait()
}

func TestRefusingEndpointIsSkipped(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(freePort(t, "127.0.0.1")))
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(dead, namedServer(t, "alive")).view())
	for range 10 {
		if got := askOnce(t, "127.0.0.2", port); got != "alive" {
			t.Fatalf("connected to %s", got)
		}
	}
	if got := w.stats("web").dialFailures; got < 1 || got > 10 {
		t.Errorf("%d dial failures, want at most one for each of 10 connections", got)
	}
}

func TestConnectionIsResetWhenEveryEndpointRefuses(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(freePort(t, "127.0.0.1")))
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(dead).view())
	// If the reset arrives early, net.Dial already returns an error.
	c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.2", strconv.Itoa(int(port))))
	if err == nil {
		defer c.Close()
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset", err)
	}
	if got := w.stats("web").dialFailures; got != 1 {
		t.Errorf("%d dial failures, want 1: an endpoint that refuses is not tried again", got)
	}
}
