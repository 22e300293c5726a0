// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// TestLocalPortsAreShared opens connections to two endpoints. It opens more connections
// than there are local ports. Connections to different endpoints may use the same local
// port.
func TestLocalPortsAreShared(t *testing.T) {
	n := netnstest.New(t)
	n.Set(t, "ipv4/ip_local_port_range=30000 30003")
	if err := n.Do(func() error {
		l := &tcpListener{connecting: t.Context()}
		for _, at := range []string{"127.0.0.1:1001", "127.0.0.1:1002"} {
			endpoint := listenAt(t, at, func(c *net.TCPConn) { io.Copy(io.Discard, c) })
			for i := range 3 {
				c, err := l.dialTCP(endpoint, patience)
				if err != nil {
					return fmt.Errorf("connection %d: %w", i, err)
				}
				defer c.Close()
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// TestEndpointMaySendFirst connects several times to an endpoint that sends before the
// client. The kernel's delay of 0.2 s for the last packet of the handshake must not
// affect such a connection.
func TestEndpointMaySendFirst(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("smtp", "127.0.0.2", port, api.TCP).addEndpoints(listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
		fmt.Fprintln(c, "220 ready")
		io.Copy(io.Discard, c)
	})).view())
	fastest := patience
	for range 20 {
		begin := time.Now()
		c := dial(t, "127.0.0.2", port)
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		fastest = min(fastest, time.Since(begin))
		c.Close()
	}
	if fastest > 150*time.Millisecond {
		t.Errorf("the fastest of 20 connections took %v", fastest)
	}
}

func TestManyBytesAreMovedWithoutPipes(t *testing.T) {
	w := newWorld(t, settings{pipes: &pipes{open: func() (*pipe, error) { return nil, errors.New("too many open files") }}})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("echo", "127.0.0.2", port, api.TCP).addEndpoints(listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) { io.Copy(c, c) })).view())
	c := dial(t, "127.0.0.2", port)
	sent := bytes.Repeat([]byte("kpng"), 1<<20)
	go func() {
		c.Write(sent)
		c.CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("received %d bytes of %d, error %v", len(got), len(sent), err)
	}
}

// TestServiceAtItsShareOfDescriptorsGetsNoPipes runs a backend with descriptors for only
// one connection, so that none is left for a pipe.
func TestServiceAtItsShareOfDescriptorsGetsNoPipes(t *testing.T) {
	none := &pipes{open: func() (*pipe, error) {
		t.Error("a pipe is opened")
		return newPipe()
	}}
	w := newWorld(t, settings{descriptors: someDescriptors(1, 2), pipes: none})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("echo", "127.0.0.2", port, api.TCP).addEndpoints(listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) { io.Copy(c, c) })).view())
	c := dial(t, "127.0.0.2", port)
	go c.Write(make([]byte, 4<<20))
	if _, err := io.CopyN(io.Discard, c, 4<<20); err != nil {
		t.Error(err)
	}
}

// TestEndFollowsLastBytesToSlowReader fills the buffers between endpoint and client. So
// the last bytes and the end of the stream must wait in the backend.
func TestEndFollowsLastBytesToSlowReader(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	answer := bytes.Repeat([]byte("kpng"), 1<<20)
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(listenAt(t, "127.0.0.1:0", func(c *net.TCPConn) {
		for rest := answer; len(rest) > 0; { // in small pieces, which are copied and not spliced
			n := min(len(rest), 20_000)
			c.Write(rest[:n])
			rest = rest[n:]
		}
		c.Close()
	})).view())
	c := dial(t, "127.0.0.2", port)
	c.CloseWrite() // the direction to the endpoint ends first
	time.Sleep(100 * time.Millisecond)
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, answer) {
		t.Errorf("received %d bytes of %d, error %v", len(got), len(answer), err)
	}
}
