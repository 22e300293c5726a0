// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net"
	"sync"
	"time"
)

// connections dials, and closes what it has dialled. A transport can only close
// connections that are idle, and one whose watches were cancelled just now may
// not be so yet. As it has a dialler of its own, a transport is not shared with
// the program's other clients either.
type connections struct {
	dial func(ctx context.Context, network, address string) (net.Conn, error)

	mu     sync.Mutex
	closed bool
	open   map[*connection]struct{}
}

// newConnections returns connections made by dial or, without one, as client-go
// makes them.
func newConnections(dial func(ctx context.Context, network, address string) (net.Conn, error)) *connections {
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	return &connections{dial: dial, open: map[*connection]struct{}{}}
}

// DialContext returns a new connection.
func (c *connections) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := c.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tracked := &connection{Conn: conn, of: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		conn.Close()
		return nil, net.ErrClosed
	}
	c.open[tracked] = struct{}{}
	return tracked, nil
}

// close closes all connections, those that are still being dialled included.
func (c *connections) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for conn := range c.open {
		conn.Conn.Close()
	}
	clear(c.open)
}

// connection is an open one.
type connection struct {
	net.Conn
	of *connections
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}
