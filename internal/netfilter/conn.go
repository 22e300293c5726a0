// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netfilter is a netlink client of the kernel's netfilter: nf_tables, connection
// tracking and the sets of ipset. It manages the connection, encodes messages and decodes
// failures. The meaning of the messages is up to its callers.
package netfilter

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Conn is a connection to netfilter. One goroutine may use it at a time.
type Conn struct {
	// Describe returns the value of Failure.What for a refused message. The argument
	// offset is the position of the refused attribute. It is negative if the kernel named
	// no attribute. Default: empty descriptions.
	Describe func(msgType uint16, attributes []byte, offset int) string
	// Transacted is called after each attempt at a transaction, with its size in bytes and
	// its error or nil. Default: none.
	Transacted func(size int, err error)
	// Exchange sends the batch of a transaction and receives the answer, by a call of send.
	// Default: only calls send.
	Exchange func(batch []byte, send func(batch []byte) error) error
	// Commits is the number of transactions that took effect.
	Commits uint32

	nl    *netlink.Conn // nil if the next request must open the connection
	netNS int
	seq   uint32
	buf   []byte // for one datagram; nil if nl is nil
}

const (
	// socketBuffer limits the size of a transaction, because a transaction is one datagram.
	// 64 MiB hold about a million elements.
	socketBuffer = 64 << 20
	// datagramSize is larger than each datagram of the kernel: those of a dump have at most
	// 32 KiB, and error messages do not contain the request.
	datagramSize = 64 << 10
	// ackTimeout limits the wait for an answer. The kernel answers before the send call
	// returns, so a longer wait means that an answer was lost.
	ackTimeout = 30 * time.Second
)

// NewConn returns a connection in the network namespace of the file descriptor netNS, or
// of the process if netNS is 0. The first request opens the connection.
func NewConn(netNS int) *Conn {
	return &Conn{
		Describe:   func(uint16, []byte, int) string { return "" },
		Transacted: func(int, error) {},
		Exchange:   func(batch []byte, send func([]byte) error) error { return send(batch) },
		netNS:      netNS,
	}
}

func (c *Conn) open() error {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: c.netNS})
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	err = errors.Join(
		nl.SetWriteBuffer(socketBuffer),
		nl.SetReadBuffer(8<<20),
		nl.SetOption(netlink.CapAcknowledge, true),      // error messages do not contain the request
		nl.SetOption(netlink.ExtendedAcknowledge, true), // error messages name the refused attribute
	)
	if err != nil {
		nl.Close()
		return fmt.Errorf("set up a netlink socket: %w", err)
	}
	c.nl, c.buf = nl, make([]byte, datagramSize)
	return nil
}

// Close closes the connection. The next request opens it again.
//
// When a program closes a connection, the kernel first destroys all objects that earlier
// transactions removed. Until then, no transaction of nf_tables can begin. This takes a grace
// period of RCU, often 10 to 100 ms. So a process should keep its connections open.
func (c *Conn) Close() error {
	if c.nl == nil {
		return nil
	}
	nl := c.nl
	c.nl, c.buf = nil, nil
	return nl.Close()
}

// setSequenceNumbers sets the sequence numbers of the messages in b. It returns the first
// and the last number.
func (c *Conn) setSequenceNumbers(b []byte) (first, last uint32) {
	c.seq %= 1 << 31 // so that the numbers in b do not overflow
	first = c.seq + 1
	for len(b) > 0 {
		c.seq++
		binary.NativeEndian.PutUint32(b[8:], c.seq)
		b = b[binary.NativeEndian.Uint32(b):]
	}
	return first, c.seq
}

// Transact calls fill to encode messages, and sends them as one nf_tables transaction.
// All messages take effect together. If Transact returns an error other than
// ErrUnknownOutcome, no message takes effect. Transact retries transient failures up to
// five times, within 31 ms.
func (c *Conn) Transact(ctx context.Context, fill func(*Builder)) error {
	return c.TransactAt(ctx, 0, fill)
}

// TransactAt is like Transact, but the kernel refuses the messages with ERESTART unless
// the argument generation is 0 or the number of the kernel's last transaction.
func (c *Conn) TransactAt(ctx context.Context, generation uint32, fill func(*Builder)) error {
	var w Builder
	w.beginBatch(generation)
	empty := w.Len()
	if fill(&w); w.Len() == empty {
		return nil
	}
	w.endBatch()
	for attempt := 0; ; attempt++ {
		err := c.Exchange(w.b, c.transactOnce)
		c.Transacted(w.Len(), err)
		if err == nil {
			c.Commits++
		}
		if !IsTransient(err) || attempt == 5 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		case <-time.After(time.Millisecond << attempt):
		}
	}
}

func (c *Conn) transactOnce(b []byte) error {
	first, last := c.setSequenceNumbers(b)
	// Only the last message before the end of the batch needs an acknowledgement. The kernel
	// always reports failures. It reports a failed commit as a failure of the first message.
	begin, at := 0, 0
	for next := 0; next < len(b); next += int(binary.NativeEndian.Uint32(b[next:])) {
		begin, at = at, next
	}
	requestAck(b[begin:])
	if err := c.send(b); err != nil {
		return err
	}

	var refused *Failure
	for answered := false; !answered; {
		err := c.receive(func(h header, payload []byte) {
			if h.seq < first || h.seq > last || h.msgType != unix.NLMSG_ERROR {
				return
			}
			if errorOf(payload) != 0 && refused == nil {
				refused = c.failure(b, h, payload)
			}
			answered = answered || h.seq == last-1 || h.seq == first
		})
		if err != nil && refused == nil {
			return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
		}
		if err != nil {
			break
		}
	}
	if refused != nil {
		return refused
	}
	return nil
}

// requestAck requests an acknowledgement of the first message in b.
func requestAck(b []byte) {
	binary.NativeEndian.PutUint16(b[6:], binary.NativeEndian.Uint16(b[6:])|unix.NLM_F_ACK)
}

// Query sends the request that the function fill encodes. It calls f with the attributes
// of each message of the answer. A request with the flag NLM_F_DUMP has an answer of many
// messages, and may fail with ErrInterrupted.
func (c *Conn) Query(ctx context.Context, fill func(*Builder), f func(attributes []byte)) error {
	var failed error
	interrupted := false
	err := c.sendRequests(ctx, fill, func(h header, payload []byte) {
		interrupted = interrupted || h.flags&unix.NLM_F_DUMP_INTR != 0
		f(payload[4:])
	}, func(err error) { failed = err })
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	if interrupted {
		return ErrInterrupted
	}
	return nil
}

// Each sends the requests that the function fill encodes. For each request, in order, it
// calls f with the kernel's error or nil. A failed request does not stop the others.
func (c *Conn) Each(ctx context.Context, fill func(*Builder), f func(error)) error {
	return c.sendRequests(ctx, fill, func(header, []byte) {}, f)
}

// sendRequests sends the requests that the function fill encodes. It calls the function
// answer with each message that the kernel returns. Once for each request, it calls the
// function outcome with the kernel's error or nil. When ctx ends, a dump stops. For other
// requests ctx is ignored, because the kernel answers them immediately.
func (c *Conn) sendRequests(ctx context.Context, fill func(*Builder), answer func(header, []byte), outcome func(error)) error {
	var w Builder
	if fill(&w); w.Len() == 0 {
		return nil
	}
	for b := w.b; len(b) > 0; b = b[binary.NativeEndian.Uint32(b):] {
		requestAck(b)
	}
	isDump := binary.NativeEndian.Uint16(w.b[6:])&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	next, last := c.setSequenceNumbers(w.b)
	if err := c.send(w.b); err != nil {
		return err
	}
	for next <= last {
		err := c.receive(func(h header, payload []byte) {
			switch {
			case h.seq != next || next > last:
			case h.msgType != unix.NLMSG_ERROR && h.msgType != unix.NLMSG_DONE:
				answer(h, payload)
			case errorOf(payload) != 0:
				next++
				outcome(c.failure(w.b, h, payload))
			default:
				next++
				outcome(nil)
			}
		})
		if err == nil && isDump && next <= last {
			err = context.Cause(ctx)
		}
		if err != nil {
			c.Close() // the old socket cannot start a new dump before this dump ends
			return err
		}
	}
	return nil
}

// send sends the messages in b. It opens a socket if there is none.
func (c *Conn) send(b []byte) error {
	if c.nl == nil {
		if err := c.open(); err != nil {
			return err
		}
	}
	raw, err := c.nl.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Write(func(fd uintptr) bool {
		sendErr = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return !errors.Is(sendErr, unix.EAGAIN)
	})
	if err := errors.Join(err, sendErr); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	return nil
}

type header struct {
	msgType, flags uint16
	seq            uint32
}

// receive waits for one datagram from the kernel and calls f with each of its messages.
func (c *Conn) receive(f func(h header, payload []byte)) error {
	raw, err := c.nl.SyscallConn()
	if err != nil {
		return err
	}
	if err := c.nl.SetReadDeadline(time.Now().Add(ackTimeout)); err != nil {
		return err
	}
	var n int
	var recvErr error
	err = raw.Read(func(fd uintptr) bool {
		n, _, recvErr = unix.Recvfrom(int(fd), c.buf, 0)
		return !errors.Is(recvErr, unix.EAGAIN) && !errors.Is(recvErr, unix.EINTR)
	})
	if err := errors.Join(err, recvErr); err != nil {
		return os.NewSyscallError("recvfrom", err)
	}
	for b := c.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return errors.New("a netlink message is cut off")
		}
		h := header{
			msgType: binary.NativeEndian.Uint16(b[4:]),
			flags:   binary.NativeEndian.Uint16(b[6:]),
			seq:     binary.NativeEndian.Uint32(b[8:]),
		}
		f(h, b[unix.NLMSG_HDRLEN:size])
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}
