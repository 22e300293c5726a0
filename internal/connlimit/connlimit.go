// SPDX-License-Identifier: Apache-2.0

// Package connlimit limits the connections of a server so that one machine cannot use all
// of them.
package connlimit

import (
	"container/list"
	"net"
	"sync"
)

// Host returns the address of a peer without its port, or the name of the network if it
// has no IP address.
func Host(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.IP.String()
	}
	return a.Network()
}

// Network returns the network that one machine may have for itself: an IPv4 address, or
// 64 bits of an IPv6 address.
func Network(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok && tcp.IP.To4() == nil {
		return tcp.IP.Mask(net.CIDRMask(64, 128)).String()
	}
	return Host(a)
}

// Queue holds a limited number of connections. If there are too many, it gives up the
// oldest connection of the network that has the most connections. So a machine that opens
// many connections closes mostly its own, and a new connection is never refused. It is
// safe for concurrent use.
type Queue struct {
	limit int

	mu        sync.Mutex
	byNetwork map[string]*list.List // of net.Conn, oldest first
	places    map[net.Conn]*list.Element
}

// NewQueue returns a queue for at most limit connections.
func NewQueue(limit int) *Queue {
	return &Queue{limit: max(limit, 1), byNetwork: map[string]*list.List{}, places: map[net.Conn]*list.Element{}}
}

// Add adds a connection. If the result is not nil, the caller has to close it.
func (q *Queue) Add(c net.Conn) (evicted net.Conn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.places) >= q.limit {
		var most *list.List
		for _, l := range q.byNetwork {
			if most == nil || l.Len() > most.Len() {
				most = l
			}
		}
		evicted = most.Front().Value.(net.Conn)
		q.remove(evicted)
	}
	network := Network(c.RemoteAddr())
	l := q.byNetwork[network]
	if l == nil {
		l = list.New()
		q.byNetwork[network] = l
	}
	q.places[c] = l.PushBack(c)
	return evicted
}

// Remove removes a connection. It reports whether the connection was in the queue.
func (q *Queue) Remove(c net.Conn) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.remove(c)
}

func (q *Queue) remove(c net.Conn) bool {
	place, ok := q.places[c]
	if !ok {
		return false
	}
	delete(q.places, c)
	network := Network(c.RemoteAddr())
	l := q.byNetwork[network]
	l.Remove(place)
	if l.Len() == 0 {
		delete(q.byNetwork, network)
	}
	return true
}

// Listen returns a listener whose open connections are in a queue with this limit.
func Listen(l net.Listener, limit int) net.Listener { return NewQueue(limit).Listen(l) }

// Listen returns a listener whose open connections are in the queue. Several listeners may
// share a queue.
func (q *Queue) Listen(l net.Listener) net.Listener { return &listener{l, q} }

type listener struct {
	net.Listener
	queue *Queue
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &queued{conn, l.queue}
	if evicted := l.queue.Add(c); evicted != nil {
		evicted.Close()
	}
	return c, nil
}

type queued struct {
	net.Conn
	queue *Queue
}

// Close implements net.Conn.
func (c *queued) Close() error {
	c.queue.Remove(c)
	return c.Conn.Close()
}
