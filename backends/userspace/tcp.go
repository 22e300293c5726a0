// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/klog/v2"
)

// tcpListener accepts TCP connections at one socket and relays them.
type tcpListener struct {
	frontend
	socket  *net.TCPListener
	account *account // counts the descriptors of the service
	// connecting is the context for attempts to connect to endpoints. The function giveUp
	// cancels this context.
	connecting context.Context
	giveUp     context.CancelFunc
	// The method close closes the channel closeRequested, so that accept stops waiting.
	// acceptEnded is closed when accept returns.
	closeRequested, acceptEnded chan struct{}

	mu      sync.Mutex
	serving int // number of connections that were accepted and have not ended
	relays  map[*relay]struct{}
	closed  bool
	aborted bool
	empty   chan struct{}
}

func (e *engine) listenTCP(ctx context.Context, p socketAddr, r *rules) (*tcpListener, error) {
	socket, err := e.opts.sockets.ListenTCP(ctx, p.at)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", p, err)
	}
	l := &tcpListener{
		socket: socket, account: &r.port.account, relays: map[*relay]struct{}{},
		closeRequested: make(chan struct{}), acceptEnded: make(chan struct{}), empty: make(chan struct{}),
	}
	l.engine, l.socketAddr = e, p
	if l.raw, err = socket.SyscallConn(); err == nil {
		err = l.setRules(r)
	}
	if err != nil {
		socket.Close()
		return nil, err
	}
	l.connecting, l.giveUp = context.WithCancel(context.Background())
	e.running.Go(l.accept)
	return l, nil
}

// accept accepts connections until the socket is closed, and starts a
// goroutine for each of them. For a short connection, the backend takes 100 µs of CPU
// time, of which accept takes 8 µs. So accept becomes a bottleneck only with about a
// dozen cores. Several sockets per address (SO_REUSEPORT) would be worse: each socket
// needs a descriptor, and closing a socket resets the clients in its queue.
func (l *tcpListener) accept() {
	defer close(l.acceptEnded)
	wait := time.Duration(0)
	for {
		client, err := l.socket.AcceptTCP()
		switch {
		case err == nil:
			wait = 0
			if !l.admit() {
				resetConn(client)
				continue
			}
			l.enter()
			go l.serve(client)
			continue
		case errors.Is(err, net.ErrClosed):
			return
		case outOfDescriptors(err):
			l.complain(err, outOfDescriptorsMessage, "listener", l.socketAddr)
		default: // for example, the client has disconnected, or there is no memory
			l.log.V(2).Info("Cannot accept a connection", "listener", l.socketAddr, "err", err)
		}
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		select {
		case <-time.After(wait):
		case <-l.closeRequested:
		}
	}
}

// admit waits until the service may take the descriptors for a connection, and takes
// them. If the listener closes before that, or too many connections of the service wait,
// admit returns false.
func (l *tcpListener) admit() bool {
	if l.account.take(descriptorsPerConnection) {
		return true
	}
	l.complain(nil, shareMessage, "listener", l.socketAddr)
	return l.account.takeUnless(descriptorsPerConnection, l.closeRequested)
}

// descriptorsPerConnection is 2: one for the client and one for the endpoint.
const descriptorsPerConnection = 2

const (
	raiseTheLimit           = "raise the limit of open files (LimitNOFILE, ulimit -n)"
	outOfDescriptorsMessage = "Out of file descriptors; new connections wait until others end: " + raiseTheLimit
	shareMessage            = "Out of file descriptors for this service; new connections wait until others end: " + raiseTheLimit
)

func (l *tcpListener) enter() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.serving++
}

// recordEnd records that a connection has ended. If the connection had no relay, r is
// nil.
func (l *tcpListener) recordEnd(r *relay) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.relays, r)
	l.account.give(descriptorsPerConnection)
	l.serving--
	l.checkEmpty()
}

// checkEmpty closes l.empty if the listener is closed and no connection is left. The
// caller holds the lock.
func (l *tcpListener) checkEmpty() {
	if l.closed && l.serving == 0 {
		l.giveUp()
		close(l.empty)
	}
}

// serve connects client to an endpoint and starts a relay between them.
func (l *tcpListener) serve(client *net.TCPConn) {
	if log := l.log.V(3); log.Enabled() {
		log.Info("Accepted TCP connection from remote", "remoteAddress", client.RemoteAddr(), "localAddress", client.LocalAddr())
	}
	port := l.current.Load().port
	counters := &port.counters
	counters.connections.Add(1)
	l.accepted.Add(1)
	counters.active.Add(1)
	endpoint, at, err := l.connect(client)
	if err != nil {
		l.log.V(2).Info("Resetting connection", "listener", l.socketAddr, "client", client.RemoteAddr(), "reason", err)
		resetConn(client)
		counters.active.Add(-1)
		l.recordEnd(nil)
		return
	}
	counted := l.count(port, at)
	r := &relay{client: client, endpoint: endpoint, port: port, counters: counters, counted: counted, log: l.log, idle: l.opts.HalfClosedTimeout}
	r.done = func() {
		counters.active.Add(-1)
		counted.end()
		l.recordEnd(r)
	}
	if log := l.log.V(4); log.Enabled() {
		log.Info("Creating proxy between remote and local addresses",
			"inRemoteAddress", client.RemoteAddr(), "inLocalAddress", client.LocalAddr(),
			"outLocalAddress", endpoint.LocalAddr(), "outRemoteAddress", endpoint.RemoteAddr())
	}
	l.mu.Lock()
	l.relays[r] = struct{}{}
	aborted := l.aborted || r.lost()
	l.mu.Unlock()
	if aborted {
		r.abort() // the relay then ends soon after its start
	}
	if err := r.start(l.buffers, l.pipes, l.account); err != nil { // start fails only if a connection is invalid
		r.done()
	}
}

var errNotAdmitted = errors.New("the client is not admitted, or there is no endpoint for it on this node")

var errOwnEndpoints = errors.New("all its endpoints are addresses that this proxy serves itself")

// connect connects to the next endpoint. If that fails, it tries other
// endpoints.
func (l *tcpListener) connect(client *net.TCPConn) (conn *net.TCPConn, endpoint netip.AddrPort, err error) {
	from := client.RemoteAddr().(*net.TCPAddr).AddrPort()
	from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
	var tried, refused []netip.AddrPort
	var failures []error
	for attempt := range dialTimeouts {
		r := l.current.Load() // the rules may change between attempts
		unfit := func(e netip.AddrPort) bool { return slices.Contains(tried, e) || l.serves(r.port, e) }
		rt := r.routeOf(from.Addr(), l.startsHere)
		if rt.verdict != nodeview.Forward {
			return nil, endpoint, errNotAdmitted
		}
		var ok bool
		endpoint, ok = r.endpoint(rt, from, unfit, l.opts.clock.Now())
		if !ok && len(tried) > len(refused) {
			// From now on, tried has only the endpoints that refused. The others did not answer in
			// time. Retry them with a longer timeout.
			tried = slices.Clone(refused)
			endpoint, ok = r.endpoint(rt, from, unfit, l.opts.clock.Now())
		}
		if !ok {
			break
		}
		l.logEndpoint(r.port, client.RemoteAddr(), rt.pool, endpoint)

		patience := dialTimeouts[attempt]
		if r.affinity > 0 {
			patience = dialTimeouts[len(dialTimeouts)-1]
		}
		conn, err = l.dialTCP(endpoint, patience)
		switch {
		case err == nil:
			return conn, endpoint, nil
		case l.connecting.Err() != nil:
			return nil, endpoint, errors.New("listener is closed")
		case outOfDescriptors(err):
			l.complain(err, outOfDescriptorsMessage, "service", r.port.name)
			return nil, endpoint, err // a connection to another endpoint would also need a descriptor
		}
		r.port.counters.dialFailures.Add(1)
		failures = append(failures, err)
		l.log.V(2).Info("Endpoint did not accept the connection", "service", r.port.name, "endpoint", endpoint, "err", err)
		tried = append(tried, endpoint)
		var timeout net.Error
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			refused = append(refused, endpoint)
		}
	}
	if len(failures) == 0 {
		return nil, endpoint, errOwnEndpoints
	}
	return nil, endpoint, fmt.Errorf("no endpoint accepted the connection: %w", errors.Join(failures...))
}

func (l *tcpListener) dialTCP(endpoint netip.AddrPort, timeout time.Duration) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: timeout, KeepAliveConfig: keepAlive, Control: dialControl}
	// DialTCP would bind the socket first, which reserves one of 28,232 local ports for all
	// destinations. DialContext reserves a local port only for this endpoint.
	c, err := d.DialContext(l.connecting, network("tcp", endpoint.Addr()), endpoint.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func (l *tcpListener) close() {
	close(l.closeRequested)
	l.socket.Close()
	<-l.acceptEnded // now l.serving counts all accepted connections
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.checkEmpty()
}

func (l *tcpListener) drained() <-chan struct{} { return l.empty }

func (l *tcpListener) abort() {
	l.giveUp()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.aborted = true
	for r := range l.relays {
		r.abort()
	}
}

func (l *tcpListener) resetLost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r := range l.relays {
		if r.lost() {
			r.abort()
		}
	}
}

// relay moves bytes between the TCP connection to a client and the TCP connection to an
// endpoint.
type relay struct {
	client, endpoint *net.TCPConn
	port             *port
	counters         *counters
	counted          *endpointCounter
	log              klog.Logger

	// idle is how long the connection may be idle after one direction has ended.
	idle  time.Duration
	open  atomic.Int32 // number of directions that have not ended
	reset sync.Once
	done  func()
}

// start begins to move bytes in both directions. When both directions have ended or one
// direction has failed, the relay calls r.done. Each direction has a new goroutine with a
// small stack. So start returns immediately. The caller has a large stack from dialing,
// and can end now.
func (r *relay) start(b *buffers, p *pipes, a *account) error {
	toEndpoint, err := newStream(r.client, r.endpoint, true, b, p, a)
	if err != nil {
		return err
	}
	toClient, err := newStream(r.endpoint, r.client, false, b, p, a)
	if err != nil {
		return err
	}
	r.open.Store(2)
	go r.copy(toEndpoint, "to backend", r.client, r.endpoint, true)
	go r.copy(toClient, "from backend", r.endpoint, r.client, false)
	return nil
}

// copy moves all bytes of one direction. Then it closes the destination for
// writing. The other direction continues until it also ends, fails or is idle for too
// long.
func (r *relay) copy(s *stream, direction string, source, destination *net.TCPConn, sent bool) {
	r.logCopying(direction, source, destination)
	var bytes int64
	for {
		n, err := s.move()
		bytes += int64(n)
		r.count(n, sent)
		if err == nil {
			if r.open.Load() == 1 {
				r.limitIdle(source, destination)
			}
			continue
		}
		if errors.Is(err, io.EOF) {
			err = nil
			if r.open.Load() > 1 { // the end of the last direction closes both connections below
				err = destination.CloseWrite()
			}
		}
		if err != nil {
			r.abort()
		}
		r.logCopied(direction, source, destination, bytes, err)
		break
	}
	if r.open.Add(-1) == 0 {
		r.client.Close()
		r.endpoint.Close()
		r.done()
		return
	}
	r.limitIdle(destination, source)
	if waitError(s.source) != nil {
		r.abort() // has no effect if both directions have ended
	}
}

// count counts bytes that were sent to the endpoint, or received from it.
func (r *relay) count(bytes int, sent bool) {
	if sent {
		r.counters.bytesToEndpoints.Add(int64(bytes))
		r.counted.add(bytes, 0)
	} else {
		r.counters.bytesFromEndpoints.Add(int64(bytes))
		r.counted.add(0, bytes)
	}
}

// limitIdle sets the deadline of the direction from source to destination, after the
// other direction has ended.
func (r *relay) limitIdle(source, destination *net.TCPConn) {
	deadline := time.Now().Add(r.idle)
	source.SetReadDeadline(deadline)
	destination.SetWriteDeadline(deadline)
}

// lost reports whether the connection must be reset because its endpoint is lost.
func (r *relay) lost() bool {
	at := r.endpoint.RemoteAddr().(*net.TCPAddr).AddrPort()
	return r.port.resets(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
}

// abort resets both connections.
func (r *relay) abort() {
	r.reset.Do(func() {
		resetConn(r.client)
		resetConn(r.endpoint)
	})
}

// resetConn closes c, and its peer receives a reset.
func resetConn(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

// The following functions write the log of copy. Because they are separate, the goroutine
// of copy needs only a small stack if this log is off.

func (r *relay) logCopying(direction string, source, destination *net.TCPConn) {
	if log := r.log.V(4); log.Enabled() {
		log.Info("Copying remote address bytes", "direction", direction,
			"sourceRemoteAddress", source.RemoteAddr(), "destinationRemoteAddress", destination.RemoteAddr())
	}
}

func (r *relay) logCopied(direction string, source, destination *net.TCPConn, bytes int64, err error) {
	if log := r.log.V(4); log.Enabled() {
		log.Info("Copied remote address bytes", "bytes", bytes, "direction", direction,
			"sourceRemoteAddress", source.RemoteAddr(), "destinationRemoteAddress", destination.RemoteAddr())
		if err != nil {
			log.Info("Connection ended with an error", "direction", direction, "err", err)
		}
	}
}

// buffers is a pool of buffers for streams. It is safe for concurrent use.
type buffers struct{ pool sync.Pool }

// bufferSize is the size of a buffer. Streams copy bytes through such a buffer.
const bufferSize = 32 << 10

func newBuffers() *buffers {
	return &buffers{sync.Pool{New: func() any {
		b := make([]byte, bufferSize)
		return &b
	}}}
}

func (b *buffers) get() *[]byte { return b.pool.Get().(*[]byte) }

func (b *buffers) put(buffer *[]byte) { b.pool.Put(buffer) }
