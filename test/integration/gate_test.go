// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// gate forwards connections to a unix socket while the gate is open. It counts the bytes
// that it reads from the socket.
type gate struct {
	address string
	// received is the number of bytes from the socket. Any goroutine may read and reset it.
	received atomic.Int64
	to       string

	mu    sync.Mutex
	open  bool
	conns []net.Conn
}

// newGate returns an open gate. It is closed when the test ends.
func newGate(t testing.TB, to string) *gate {
	t.Helper()
	g := &gate{address: socket(t), to: strings.TrimPrefix(to, "unix://"), open: true}
	l, err := net.Listen("unix", strings.TrimPrefix(g.address, "unix://"))
	if err != nil {
		t.Fatal(err)
	}
	var copying sync.WaitGroup
	copying.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			if out := g.enter(in); out != nil {
				copying.Go(func() { io.Copy(out, in); out.Close() })
				copying.Go(func() { io.Copy(counted{in, &g.received}, out); in.Close() })
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		g.close()
		copying.Wait()
	})
	return g
}

// enter connects to the socket for an incoming connection. If the gate is closed or the
// socket accepts no connection, enter closes the incoming connection and returns nil.
func (g *gate) enter(in net.Conn) net.Conn {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open {
		if out, err := net.Dial("unix", g.to); err == nil {
			g.conns = append(g.conns, in, out)
			return out
		}
	}
	in.Close()
	return nil
}

// close closes the gate and all its connections.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = false
	for _, c := range g.conns {
		c.Close()
	}
	g.conns = nil
}

// reopen opens the gate again and sets received to 0.
func (g *gate) reopen() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = true
	g.received.Store(0)
}

type counted struct {
	io.Writer
	bytes *atomic.Int64
}

func (c counted) Write(p []byte) (int, error) {
	c.bytes.Add(int64(len(p)))
	return c.Writer.Write(p)
}
