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

// relay is a TCP connection of a client and the one to its endpoint.
type relay struct {
	client, endpoint *net.TCPConn
	counters         *counters
	log              klog.Logger

	// idle is how long nothing may move once one direction has ended.
	idle  time.Duration
	open  atomic.Int32 // directions that have not ended
	reset sync.Once
	done  func()
}

// start moves bytes both ways, until both sides have ended or one of them has
// failed, and calls done then. It does not wait for that: the two goroutines it
// leaves are all that a connection holds, and their stacks have not been grown
// by dialing.
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

// copy moves one direction until its end, and hands the end on: the other
// direction may go on after it, until the source fails or nothing moves for too long.
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
			if r.open.Load() > 1 { // else both are closed anyway
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
		r.abort() // which changes nothing where all has ended
	}
}

// limit ends the direction from source to destination unless something moves soon. The
// other one has ended.
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

// resetConn closes c so that its peer sees a reset.
func resetConn(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

// The log is apart from copy, so that its goroutine needs no large stack where
// nobody reads it.

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
