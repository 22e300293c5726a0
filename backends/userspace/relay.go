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

// start moves bytes in both directions. It calls done when both sides have ended or one
// has failed. It returns immediately: a connection uses only the two goroutines that
// start leaves, whose stacks are small because they did not dial.
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

// copy moves the bytes of one direction until its end, and then closes the destination
// for writing. The other direction continues until it fails or is idle for too long.
func (r *relay) copy(s *stream, direction string, source, destination *net.TCPConn, count *atomic.Int64) {
	r.logCopying(direction, source, destination)
	var bytes int64
	for {
		n, err := s.move()
		bytes += int64(n)
		count.Add(int64(n))
		if err == nil {
			if r.open.Load() == 1 {
				r.limit(source, destination)
			}
			continue
		}
		if errors.Is(err, io.EOF) {
			err = nil
			if r.open.Load() > 1 { // otherwise both are closed
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
	r.limit(destination, source)
	if waitError(s.source) != nil {
		r.abort() // no effect if both have ended
	}
}

// limit ends the direction from source to destination if it stays idle. The other
// direction has ended.
func (r *relay) limit(source, destination *net.TCPConn) {
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

// Logging is not part of copy, so that copy's goroutine needs no large stack when the log
// is off.

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
