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

// relay moves bytes between the TCP connection to a client and the TCP connection to an
// endpoint.
type relay struct {
	client, endpoint *net.TCPConn
	counters         *counters
	log              klog.Logger

	// idle is how long the connection may be idle after one direction has ended.
	idle  time.Duration
	open  atomic.Int32 // number of directions that have not ended
	reset sync.Once
	done  func()
}

// start begins to move bytes in both directions. When both directions have ended or one
// direction has failed, the relay calls r.done. Each direction has a new goroutine with a
// small stack. So start returns immediately, and the caller, which has a large stack from
// dialing, can end.
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

// The method copy moves all bytes of one direction. Then it closes the destination for
// writing. The other direction continues until it also ends, fails or is idle for too
// long.
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

// limitIdle sets the deadline of the direction from source to destination, after the
// other direction has ended.
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
