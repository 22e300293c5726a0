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

// gate forwards connections to a unix socket and counts the bytes from the socket. While
// it is closed, it forwards nothing.
type gate struct {
	address string
	// received counts bytes. Any goroutine may read and reset it.
	received atomic.Int64
	to       string

	mu    sync.Mutex
	open  bool
	conns []net.Conn
}

// newGate returns an open gate. The end of the test closes it.
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

// enter opens a connection to the socket for the incoming connection in. If that fails,
// it closes in.
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

// reopen opens the gate again and resets the count.
func (g *gate) reopen() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = true
	g.received.Store(0)
}

// counted is a writer that counts bytes.
type counted struct {
	io.Writer
	bytes *atomic.Int64
}

// Write implements io.Writer.
func (c counted) Write(p []byte) (int, error) {
	c.bytes.Add(int64(len(p)))
	return c.Writer.Write(p)
}
