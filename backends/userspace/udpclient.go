// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
)

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

// The method send sends the queued datagrams. If that fails, the next datagram of the
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

// The method end closes the socket of the client and removes the client.
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
	})
}

// udpClients is the set of the clients of all listeners. It is safe for concurrent use.
type udpClients struct {
	max int

	mu    sync.Mutex
	count int
	// bySize has the accounts with n clients at the index n-1. It ends with the accounts that
	// have the most clients.
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

// which returns the clients of a service for which match returns true.
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
