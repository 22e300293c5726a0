// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/internal/connlimit"
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// peers counts the clients' connections and streams, and enforces the limits.
type peers struct {
	limits ServerOptions

	refusals refusals
	stalled  atomic.Uint64
	sent     atomic.Uint64 // bytes
	streams  atomic.Int64  // open streams
	// waiting has the connections whose handshake has not finished. Such a connection
	// does not count as a connection yet.
	waiting *connlimit.Queue

	mu          sync.Mutex
	connections int
	byHost      map[string]int // number of connections
	byNetwork   map[string]int // number of anonymous connections
	byName      map[string]*account
	open        map[*openStream]struct{}
}

func newPeers(limits ServerOptions) *peers {
	return &peers{
		limits: limits, waiting: connlimit.NewQueue(limits.MaxConnections / 4),
		byHost: map[string]int{}, byNetwork: map[string]int{}, byName: map[string]*account{}, open: map[*openStream]struct{}{},
	}
}

// account counts the open streams of a peer and limits the rate of new streams.
type account struct {
	streams int
	opening *rate.Limiter
	turns   *semaphore.Weighted // see beginnings.turn
}

// openStream is a stream that a client has opened with a request.
type openStream struct {
	peer, node string
	since      time.Time
	revision   atomic.Uint64 // the revision that the client has; 0 until its first answer
}

// opened records a stream until the returned function is called.
func (p *peers) opened(s *openStream) (closed func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[s] = struct{}{}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, s)
	}
}

// refusals counts the connections and streams that exceeded a limit.
type refusals struct {
	mu     sync.Mutex
	count  uint64
	last   time.Time
	reason string // of the last refusal
}

func (r *refusals) add(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count, r.last, r.reason = r.count+1, time.Now(), reason
}

// limitedListener limits the connections whose handshake has not finished.
type limitedListener struct {
	net.Listener
	peers *peers
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &countedConn{Conn: conn, peers: l.peers, host: connlimit.Host(conn.RemoteAddr()), network: connlimit.Network(conn.RemoteAddr())}
	if evicted := l.peers.waiting.Add(c); evicted != nil {
		l.peers.refusals.add(fmt.Sprintf("%d connections are in their handshake, the maximum", l.peers.limits.MaxConnections/4))
		evicted.Close()
	}
	return c, nil
}

// countedConn is a connection that counts towards the limits until it is closed.
type countedConn struct {
	net.Conn
	peers         *peers
	host, network string

	// peers.mu protects these fields.
	connected bool
	anonymous bool // connected without a certificate, from an IPv6 address
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.peers.disconnect(c)
	return c.Conn.Close()
}

// connect counts a connection after its handshake. It returns false if the connection
// exceeds a limit, or was closed during the handshake. All anonymous connections of an
// IPv6 network together may use half of the connections.
func (p *peers) connect(c *countedConn, anonymous bool) bool {
	if !p.waiting.Remove(c) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	refusal := ""
	switch {
	case p.connections >= p.limits.MaxConnections:
		refusal = fmt.Sprintf("the server has %d connections, the maximum", p.connections)
	case p.byHost[c.host] >= p.limits.MaxConnectionsPerPeer:
		refusal = fmt.Sprintf("%s has %d connections, the maximum", c.host, p.byHost[c.host])
	case anonymous && c.network != c.host && p.byNetwork[c.network] >= max(p.limits.MaxConnections/2, 1):
		refusal = fmt.Sprintf("%s has %d connections without certificates, the maximum", c.network, p.byNetwork[c.network])
	}
	if refusal != "" {
		p.refusals.add(refusal)
		return false
	}
	c.connected, c.anonymous = true, anonymous && c.network != c.host
	p.connections++
	p.byHost[c.host]++
	if c.anonymous {
		p.byNetwork[c.network]++
	}
	return true
}

func (p *peers) disconnect(c *countedConn) {
	p.waiting.Remove(c)
	p.mu.Lock()
	defer p.mu.Unlock()
	if !c.connected {
		return
	}
	c.connected = false
	p.connections--
	decrement(p.byHost, c.host)
	if c.anonymous {
		decrement(p.byNetwork, c.network)
	}
}

func decrement(counts map[string]int, key string) {
	if counts[key]--; counts[key] == 0 {
		delete(counts, key)
	}
}

// connCredentials record the connections of streams, so that the server can close them.
type connCredentials struct {
	credentials.TransportCredentials
}

// connInfo is the result of a handshake, together with the connection.
type connInfo struct {
	credentials.AuthInfo
	conn net.Conn
}

var errTooMany = errors.New("too many connections")

// certificate returns the certificate of a client, or nil.
func certificate(info credentials.AuthInfo) *x509.Certificate {
	if tls, ok := info.(credentials.TLSInfo); ok && len(tls.State.PeerCertificates) > 0 {
		return tls.State.PeerCertificates[0]
	}
	return nil
}

// ServerHandshake implements credentials.TransportCredentials.
func (c connCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	if counted, ok := raw.(*countedConn); ok && !counted.peers.connect(counted, certificate(info) == nil) {
		conn.Close()
		return nil, nil, errTooMany
	}
	return conn, connInfo{info, raw}, nil
}

// Clone implements credentials.TransportCredentials.
func (c connCredentials) Clone() credentials.TransportCredentials {
	return connCredentials{c.TransportCredentials.Clone()}
}

// caller is the client of a stream.
type caller struct {
	name string            // the peer's name; see ServerOptions
	cert *x509.Certificate // nil without TLS
	conn net.Conn

	turns *semaphore.Weighted // the turns of the peer's account; set by admit
}

// callerOf returns the client of a stream. Several clients may use the same
// certificate, so the name of the peer includes the client's address. The exception is
// the certificate of a node, if nodeCertificates is true: then the name does not include
// the address.
func callerOf(ctx context.Context, nodeCertificates bool) (caller, error) {
	p, _ := peer.FromContext(ctx)
	info, ok := p.AuthInfo.(connInfo)
	if !ok {
		return caller{}, status.Error(codes.Internal, "stream has no known connection")
	}
	c := caller{name: connlimit.Host(p.Addr), conn: info.conn, cert: certificate(info.AuthInfo)}
	if c.cert != nil {
		switch cn := c.cert.Subject.CommonName; {
		case nodeCertificates && strings.HasPrefix(cn, nodeCertificate):
			c.name = "CN=" + cn
		case cn != "":
			c.name = "CN=" + cn + " at " + c.name
		}
	}
	return c, nil
}

// admit counts a stream of c until done is called. It refuses streams above the limits.
func (p *peers) admit(c *caller) (done func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.byName[c.name]
	if a == nil {
		p.sweep()
		a = &account{opening: rate.NewLimiter(rate.Limit(p.limits.StreamRate), p.limits.MaxStreamsPerPeer), turns: semaphore.NewWeighted(maxTurnsPerPeer)}
		p.byName[c.name] = a
	}
	refusal := ""
	switch {
	case a.streams >= p.limits.MaxStreamsPerPeer:
		refusal = fmt.Sprintf("%s has %d streams, the maximum", c.name, a.streams)
	case !a.opening.Allow():
		refusal = c.name + " opens streams too fast"
	}
	if refusal != "" {
		p.refusals.add(refusal)
		return nil, status.Error(codes.ResourceExhausted, refusal)
	}
	a.streams++
	c.turns = a.turns
	p.streams.Add(1)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		a.streams--
		p.streams.Add(-1)
	}, nil
}

// sweep drops accounts without streams if there are many accounts.
func (p *peers) sweep() {
	if len(p.byName) < 2*p.limits.MaxConnections {
		return
	}
	for name, a := range p.byName {
		if a.streams == 0 {
			delete(p.byName, name)
		}
	}
}
