// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/net/ipv4"
)

// udpListener forwards the datagrams of UDP clients at one socket.
type udpListener struct {
	frontend
	socket *net.UDPConn
	datagrams
	empty chan struct{}

	mu      sync.Mutex
	closed  bool
	clients map[netip.AddrPort]*udpClient
}

func (e *engine) listenUDP(ctx context.Context, p socketAddr, r *rules) (*udpListener, error) {
	socket, err := e.opts.sockets.ListenUDP(ctx, p.at)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", p, err)
	}
	l := &udpListener{socket: socket, datagrams: newDatagrams(socket), empty: make(chan struct{}), clients: map[netip.AddrPort]*udpClient{}}
	l.engine, l.socketAddr = e, p
	if l.raw, err = socket.SyscallConn(); err == nil {
		err = l.setRules(r)
	}
	if err != nil {
		socket.Close()
		return nil, err
	}
	e.running.Go(l.receive)
	return l, nil
}

// receive forwards datagrams from clients to endpoints until the socket is closed.
func (l *udpListener) receive() {
	var reached []*udpClient // the clients whose datagrams are in the batch
	for {
		err := waitReadable(l.raw)
		if err == nil {
			b := l.batches.get()
			var n int
			if n, err = l.read(b.messages[:]); err == nil {
				reached = l.forward(b.messages[:n], reached[:0])
			}
			l.batches.put(b)
			clear(reached)
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // for example, Windows returns an error for a datagram that is too large
			l.log.V(2).Info("Cannot receive a datagram", "listener", l.socketAddr, "err", err)
			time.Sleep(time.Millisecond)
		}
	}
}

// forward sends each datagram to the endpoint of its client. It appends the clients to
// the slice in the second argument and returns the extended slice.
func (l *udpListener) forward(messages []ipv4.Message, reached []*udpClient) []*udpClient {
	now := l.opts.clock.Now()
	var c *udpClient
	for i := range messages {
		m := &messages[i]
		from := m.Addr.(*net.UDPAddr).AddrPort()
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if c == nil || c.addr != from {
			if c = l.clientAt(from, now); c == nil {
				continue
			}
			if len(c.queue) == 0 {
				reached = append(reached, c)
			}
		}
		c.queue = append(c.queue, ipv4.Message{Buffers: [][]byte{m.Buffers[0][:m.N]}})
	}
	for _, c := range reached {
		c.send(now)
	}
	return reached
}

// clientAt returns the UDP client with the given address, and creates the client if
// necessary. If datagrams of the client must be dropped, the result is nil.
func (l *udpListener) clientAt(from netip.AddrPort, now time.Time) *udpClient {
	l.mu.Lock()
	c := l.clients[from]
	l.mu.Unlock()
	if c != nil {
		return c
	}
	for {
		r := l.current.Load()
		rt := r.routeOf(from.Addr(), l.startsHere)
		if rt.verdict != nodeview.Forward {
			return nil
		}
		unfit := func(e netip.AddrPort) bool { return l.serves(r.port, e) }
		endpoint, ok := r.endpoint(rt, from.Addr(), unfit, now)
		if !ok {
			return nil
		}
		l.logEndpoint(r.port, net.UDPAddrFromAddrPort(from), rt.pool, endpoint)
		c, err := l.newClient(from, endpoint, r, now)
		switch {
		case err == nil:
			return c
		case errors.Is(err, errOutdated):
			continue
		}
		r.port.counters.dialFailures.Add(1)
		l.complain(err, "Dropping datagrams", "service", r.port.name)
		return nil
	}
}

var errOutdated = errors.New("the rules have changed since the endpoint was chosen")

// newClient returns a new client of an endpoint that was chosen with the rules r. If the
// rules have changed since then, the endpoint may have been removed, and newClient
// returns errOutdated.
func (l *udpListener) newClient(from, endpoint netip.AddrPort, r *rules, now time.Time) (*udpClient, error) {
	l.udp.makeRoom()
	if !r.port.account.take(1) {
		l.complain(nil, "Out of file descriptors for this service; dropping its longest idle UDP clients: "+raiseTheLimit, "service", r.port.name)
		l.udp.evictOf(&r.port.udpClients)
		if !r.port.account.take(1) {
			return nil, errNoDescriptor
		}
	}
	c, err := l.makeClient(from, endpoint, r, now)
	if err != nil {
		r.port.account.give(1)
	}
	return c, err
}

var errNoDescriptor = errors.New("the service may not use more file descriptors")

// makeClient makes a client for which the service has taken a descriptor.
func (l *udpListener) makeClient(from, endpoint netip.AddrPort, r *rules, now time.Time) (*udpClient, error) {
	dial := func() (*net.UDPConn, error) {
		return net.DialUDP(network("udp", endpoint.Addr()), nil, net.UDPAddrFromAddrPort(endpoint))
	}
	socket, err := dial()
	if outOfDescriptors(err) || outOfPorts(err) {
		l.complain(err, "Out of file descriptors or local ports; dropping the longest idle UDP clients of the service with the most: "+raiseTheLimit+" or the range of ports")
		l.udp.evict()
		socket, err = dial()
	}
	if err != nil {
		return nil, err
	}
	c := &udpClient{
		listener: l, addr: from, to: net.UDPAddrFromAddrPort(from), endpoint: endpoint,
		socket: socket, datagrams: newDatagrams(socket), port: r.port,
	}
	if c.raw, err = socket.SyscallConn(); err != nil {
		socket.Close()
		return nil, err
	}
	c.lastDatagram.Store(monotonic(now))
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		socket.Close()
		return nil, net.ErrClosed
	}
	// If the endpoint was removed meanwhile, the method endLostUDPClients may already have
	// run without finding this client.
	if !l.udp.add(c, func() bool { return l.current.Load() == r && r.port.serves(endpoint) }) {
		socket.Close()
		return nil, errOutdated
	}
	l.clients[from] = c
	r.port.counters.connections.Add(1)
	r.port.counters.active.Add(1)
	l.running.Go(c.receive)
	return c, nil
}

func (l *udpListener) close() {
	l.socket.Close()
	l.mu.Lock()
	l.closed = true
	clients := slices.Collect(maps.Values(l.clients))
	l.mu.Unlock()
	for _, c := range clients {
		c.end()
	}
	close(l.empty)
}

func (l *udpListener) drained() <-chan struct{} { return l.empty }

func (l *udpListener) abort() {}
