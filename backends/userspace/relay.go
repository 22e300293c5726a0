// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

// relay connects a client's TCP connection with the connection to its endpoint.
type relay struct {
	client, endpoint *net.TCPConn
	counters         *counters
	log              klog.Logger

	// idle is the maximum idle time after one direction has ended.
	idle  time.Duration
	open  atomic.Int32 // number of directions that have not ended
	reset sync.Once
	done  func()
}

// start moves bytes in both directions, in two new goroutines. It calls done when both
// directions have ended or one has failed. It returns immediately, so that the calling
// goroutine can end. Dialing needs a large stack, and the new goroutines have small ones.
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
	go r.copy(toEndpoint, "to backend", r.client, r.endpoint, &r.counters.bytesToEndpoints)
	go r.copy(toClient, "from backend", r.endpoint, r.client, &r.counters.bytesFromEndpoints)
	return nil
}

// copy moves the bytes of one direction until its end. Then it closes the destination for
// writing. The other direction continues until it ends, fails or is idle for too long.
func (r *relay) copy(s *stream, direction string, source, destination *net.TCPConn, count *atomic.Int64) {
	r.logCopying(direction, source, destination)
	var bytes int64
	for {
		n, err := s.move()
		bytes += int64(n)
		count.Add(int64(n))
		if err == nil {
			if r.open.Load() == 1 {
				r.limitIdle(source, destination)
			}
			continue
		}
		if errors.Is(err, io.EOF) {
			err = nil
			if r.open.Load() > 1 { // otherwise the relay closes both connections below
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
		r.abort() // without effect if both directions have ended
	}
}

// limitIdle sets the deadline of the direction from source to destination. It is called
// after the other direction has ended.
func (r *relay) limitIdle(source, destination *net.TCPConn) {
	deadline := time.Now().Add(r.idle)
	source.SetReadDeadline(deadline)
	destination.SetWriteDeadline(deadline)
}

// abort resets both connections.
func (r *relay) abort() {
	r.reset.Do(func() {
		resetConn(r.client)
		resetConn(r.endpoint)
	})
}

// resetConn closes c so that its peer receives a reset.
func resetConn(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

// The following functions log for copy. They are separate so that copy's goroutine needs
// only a small stack while the log is off.

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
