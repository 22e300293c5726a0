// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
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
		endpoint, ok := r.endpoint(rt, from, unfit, now)
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
	l.accepted.Add(1)
	r.port.counters.active.Add(1)
	c.counted = l.count(r.port, endpoint) // set while l.mu is locked, because the method end reads it
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

func (l *udpListener) resetLost() {}

// udpClient is a client of a UDP listener. It has a socket that is connected to an
// endpoint.
type udpClient struct {
	listener *udpListener
	addr     netip.AddrPort
	to       *net.UDPAddr // the same address as addr, in the type that ipv4.Message needs
	endpoint netip.AddrPort
	socket   *net.UDPConn
	datagrams
	raw          syscall.RawConn
	port         *port
	counted      *endpointCounter
	lastDatagram atomic.Int64 // monotonic time of the last datagram in either direction

	// queue has the datagrams for the endpoint that are not sent yet. Only the goroutine of
	// the listener uses it.
	queue []ipv4.Message
	ended sync.Once
}

// processStart is the zero of monotonic times.
var processStart = time.Now()

// monotonic returns t as nanoseconds since the start of the process. A step of the wall
// clock does not change the difference of two such times.
func monotonic(t time.Time) int64 { return int64(t.Sub(processStart)) }

// send sends the queued datagrams. If that fails, the next datagram of the
// client goes to another endpoint.
func (c *udpClient) send(now time.Time) {
	c.lastDatagram.Store(monotonic(now))
	bytes := 0
	for i := range c.queue {
		bytes += len(c.queue[i].Buffers[0])
	}
	err := c.write(c.queue)
	clear(c.queue)
	c.queue = c.queue[:0]
	if err != nil {
		c.fail(err)
		return
	}
	c.port.counters.bytesToEndpoints.Add(int64(bytes))
	c.counted.add(bytes, 0)
}

// receive forwards datagrams from the endpoint to the client until the client's socket
// fails or is closed.
func (c *udpClient) receive() {
	for {
		n, bytes, err := 0, 0, waitReadable(c.raw)
		if err == nil {
			b := c.listener.batches.get()
			if n, err = c.read(b.messages[:]); err == nil {
				for i := range b.messages[:n] {
					m := &b.messages[i]
					m.Buffers[0] = m.Buffers[0][:m.N]
					m.Addr = c.to
					bytes += m.N
				}
				// Datagrams that cannot be sent are lost, and are not counted.
				if c.listener.write(b.messages[:n]) == nil {
					c.port.counters.bytesFromEndpoints.Add(int64(bytes))
					c.counted.add(0, bytes)
				}
				c.lastDatagram.Store(monotonic(c.listener.opts.clock.Now()))
			}
			c.listener.batches.put(b)
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}

// fail removes the client, because its socket has returned an error. Either the socket
// was closed, or the endpoint does not accept datagrams.
func (c *udpClient) fail(err error) {
	if !errors.Is(err, net.ErrClosed) {
		c.port.counters.dialFailures.Add(1)
		c.port.affinity.detachClient(portClient{c.port, c.addr.Addr()}, c.endpoint)
		c.listener.log.V(2).Info("Endpoint did not take a datagram", "listener", c.listener.socketAddr, "endpoint", c.endpoint, "err", err)
	}
	c.end()
}

// end closes the socket of the client and removes the client.
func (c *udpClient) end() {
	c.ended.Do(func() {
		l := c.listener
		l.mu.Lock()
		delete(l.clients, c.addr)
		l.mu.Unlock()
		l.udp.remove(c)
		c.socket.Close()
		c.port.account.give(1)
		c.port.counters.active.Add(-1)
		c.counted.end()
	})
}

// udpClients is the set of the clients of all listeners. It is safe for concurrent use.
type udpClients struct {
	max int

	mu    sync.Mutex
	count int
	// At the index n-1, bySize has the accounts with n clients. It ends with the accounts
	// that have the most clients.
	bySize []map[*udpAccount]struct{}
}

// udpAccount has the UDP clients of one service. udpClients.mu guards it.
type udpAccount struct{ clients map[*udpClient]struct{} }

func newUDPClients(max int) *udpClients { return &udpClients{max: max} }

// resize moves an account whose number of clients has changed. The caller holds the lock.
func (u *udpClients) resize(a *udpAccount, before int) {
	if before > 0 {
		delete(u.bySize[before-1], a)
	}
	if now := len(a.clients); now > 0 {
		if now > len(u.bySize) {
			u.bySize = append(u.bySize, map[*udpAccount]struct{}{})
		}
		u.bySize[now-1][a] = struct{}{}
	}
	if last := len(u.bySize) - 1; len(u.bySize[last]) == 0 {
		u.bySize = u.bySize[:last] // all accounts with more clients than a have been moved before
	}
}

// add adds a client unless valid returns false.
func (u *udpClients) add(c *udpClient, valid func() bool) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !valid() {
		return false
	}
	a := &c.port.udpClients
	if a.clients == nil {
		a.clients = map[*udpClient]struct{}{}
	}
	a.clients[c] = struct{}{}
	u.count++
	u.resize(a, len(a.clients)-1)
	return true
}

func (u *udpClients) remove(c *udpClient) {
	u.mu.Lock()
	defer u.mu.Unlock()
	a := &c.port.udpClients
	delete(a.clients, c)
	u.count--
	u.resize(a, len(a.clients)+1)
	if len(a.clients) == 0 {
		a.clients = nil // frees memory, because a map never shrinks
	}
}

// makeRoom makes room for one more client. If the maximum is reached, it removes clients.
func (u *udpClients) makeRoom() {
	u.mu.Lock()
	full := u.count >= u.max
	u.mu.Unlock()
	if full {
		u.evict()
	}
}

// evict removes clients of a service that has the most clients.
func (u *udpClients) evict() {
	u.mu.Lock()
	var most *udpAccount
	if len(u.bySize) > 0 {
		for most = range u.bySize[len(u.bySize)-1] {
			break
		}
	}
	u.mu.Unlock()
	if most != nil {
		u.evictOf(most)
	}
}

// evictOf removes one sixteenth of the clients of a service. It selects the clients that
// have been idle longest. It removes several at a time, because each call has to look at
// all clients of the service.
func (u *udpClients) evictOf(a *udpAccount) {
	type entry struct {
		client       *udpClient
		lastDatagram int64
	}
	var entries []entry
	for _, c := range u.which(a, func(*udpClient) bool { return true }) {
		entries = append(entries, entry{c, c.lastDatagram.Load()})
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.lastDatagram, b.lastDatagram) })
	for _, e := range entries[:(len(entries)+15)/16] {
		e.client.end()
	}
}

// which returns some clients of a service: for these clients, match returns true.
func (u *udpClients) which(a *udpAccount, match func(*udpClient) bool) (matching []*udpClient) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for c := range a.clients {
		if match(c) {
			matching = append(matching, c)
		}
	}
	return matching
}

// expire removes the clients that have had no datagram since the given time.
func (u *udpClients) expire(since time.Time) {
	u.mu.Lock()
	var silent []*udpClient
	for _, accounts := range u.bySize {
		for a := range accounts {
			for c := range a.clients {
				if c.lastDatagram.Load() < monotonic(since) {
					silent = append(silent, c)
				}
			}
		}
	}
	u.mu.Unlock()
	for _, c := range silent {
		c.end()
	}
}

// batchSize is the maximum number of datagrams in a batch.
const batchSize = 32

// maxDatagram is larger than any UDP datagram.
const maxDatagram = 1 << 16

// batch has memory for datagrams. The kernel allocates a page only when it is used.
type batch struct {
	messages [batchSize]ipv4.Message
	whole    [batchSize][]byte
}

func newBatch() *batch {
	b := &batch{}
	memory := make([]byte, batchSize*maxDatagram)
	for i := range b.messages {
		b.whole[i] = memory[i*maxDatagram : (i+1)*maxDatagram]
		b.messages[i].Buffers = make([][]byte, 1)
	}
	b.reset()
	return b
}

// reset makes the buffer of each message as large as possible again.
func (b *batch) reset() {
	for i := range b.messages {
		b.messages[i].Buffers[0] = b.whole[i]
		b.messages[i].Addr = nil
	}
}

// maxBatches limits the number of batches, each of which has 2 MiB. No goroutine blocks
// while it uses a batch. So it is useless to have more batches than CPU cores.
const maxBatches = 16

// batches is a pool of batches. It is safe for concurrent use. It is not a sync.Pool,
// because each garbage collection would free the batches, and allocation is expensive.
type batches struct {
	free chan *batch
	// allocations has one value per existing batch, so its capacity limits the batches.
	allocations chan struct{}
}

func newBatches() *batches {
	return &batches{make(chan *batch, maxBatches), make(chan struct{}, maxBatches)}
}

// get returns a batch. While all batches are in use, it waits.
func (b *batches) get() *batch {
	select {
	case batch := <-b.free:
		return batch
	default:
	}
	select {
	case batch := <-b.free:
		return batch
	case b.allocations <- struct{}{}:
		return newBatch()
	}
}

func (b *batches) put(batch *batch) {
	batch.reset()
	b.free <- batch
}
