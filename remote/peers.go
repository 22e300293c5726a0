// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"crypto/x509"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// peers counts the clients' connections and streams, and enforces the limits.
type peers struct {
	limits Limits

	refused, stalled atomic.Uint64
	sent             atomic.Uint64 // bytes
	streams          atomic.Int64  // open streams

	mu          sync.Mutex
	connections int
	byHost      map[string]int // number of connections
	byName      map[string]*account
	open        map[*openStream]struct{}
}

// account counts the open streams of a peer and limits the rate of new streams.
type account struct {
	streams int
	opening *rate.Limiter
}

// openStream is a stream that a client has opened with a request.
type openStream struct {
	peer, node string
	since      time.Time
	revision   atomic.Uint64 // the client has this revision; 0 until its first answer
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

// limitedListener closes connections that would exceed the limits.
type limitedListener struct {
	net.Listener
	peers *peers
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host := hostOf(conn.RemoteAddr())
		if l.peers.connect(host) {
			return &countedConn{conn, sync.OnceFunc(func() { l.peers.disconnect(host) })}, nil
		}
		conn.Close()
	}
}

// countedConn is a connection that counts towards the limits until it is closed.
type countedConn struct {
	net.Conn
	release func() // only the first call has an effect
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.release()
	return c.Conn.Close()
}

func hostOf(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.IP.String()
	}
	return a.Network()
}

func (p *peers) connect(host string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.connections >= p.limits.Connections || p.byHost[host] >= p.limits.ConnectionsPerPeer {
		p.refused.Add(1)
		return false
	}
	p.connections++
	p.byHost[host]++
	return true
}

func (p *peers) disconnect(host string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.connections--
	if p.byHost[host]--; p.byHost[host] == 0 {
		delete(p.byHost, host)
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

// ServerHandshake implements credentials.TransportCredentials.
func (c connCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	return conn, connInfo{info, raw}, err
}

// Clone implements credentials.TransportCredentials.
func (c connCredentials) Clone() credentials.TransportCredentials {
	return connCredentials{c.TransportCredentials.Clone()}
}

// caller is the client of a stream.
type caller struct {
	name string            // the peer's name; see Limits
	cert *x509.Certificate // nil without TLS
	conn net.Conn
}

// callerOf returns the client of a stream. If shared is true, several clients may use the
// same certificate. Then the name of the peer includes the client's address.
func callerOf(ctx context.Context, shared bool) (caller, error) {
	p, _ := peer.FromContext(ctx)
	info, ok := p.AuthInfo.(connInfo)
	if !ok {
		return caller{}, status.Error(codes.Internal, "stream has no known connection")
	}
	c := caller{name: hostOf(p.Addr), conn: info.conn}
	if tls, ok := info.AuthInfo.(credentials.TLSInfo); ok && len(tls.State.PeerCertificates) > 0 {
		c.cert = tls.State.PeerCertificates[0]
		switch cn := c.cert.Subject.CommonName; {
		case cn != "" && shared:
			c.name = "CN=" + cn + " at " + c.name
		case cn != "":
			c.name = "CN=" + cn
		}
	}
	return c, nil
}

// admit counts a stream of c until done is called. It refuses streams above the limits.
func (p *peers) admit(c caller) (done func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.byName[c.name]
	if a == nil {
		p.sweep()
		a = &account{opening: rate.NewLimiter(rate.Limit(p.limits.StreamRate), p.limits.StreamsPerPeer)}
		p.byName[c.name] = a
	}
	if a.streams >= p.limits.StreamsPerPeer {
		p.refused.Add(1)
		return nil, status.Errorf(codes.ResourceExhausted, "%s has %d streams, the maximum", c.name, a.streams)
	}
	if !a.opening.Allow() {
		p.refused.Add(1)
		return nil, status.Errorf(codes.ResourceExhausted, "%s opens streams too fast", c.name)
	}
	a.streams++
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
	if len(p.byName) < 2*p.limits.Connections {
		return
	}
	for name, a := range p.byName {
		if a.streams == 0 {
			delete(p.byName, name)
		}
	}
}
