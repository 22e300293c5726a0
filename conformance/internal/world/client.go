// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// Answer is the response of a server to Ask.
type Answer struct {
	// Name is the server's name.
	Name string
	// Peer is the client's address and port as the server sees them.
	Peer netip.AddrPort
}

// Conn is an open connection to a server, or a socket that sends from one UDP
// port.
type Conn struct {
	net.Conn
	lines    *bufio.Reader
	requests int // the sequence number of the last request
}

// Dial opens a connection. The parameter from is the source address. If from is the zero
// Addr, the kernel chooses the source address.
func (h *Host) Dial(ctx context.Context, protocol api.Protocol, from netip.Addr, to netip.AddrPort) (*Conn, error) {
	var c net.Conn
	var err error
	switch protocol {
	case api.TCP:
		err = h.withUnusedPort(func(port int) (err error) {
			dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice(), Port: port}, Control: reuseAddr}
			c, err = dialer.DialContext(ctx, "tcp", to.String())
			return err
		})
	case api.UDP:
		err = h.withUnusedPort(func(port int) (err error) {
			c, err = net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice(), Port: port}, net.UDPAddrFromAddrPort(to))
			return err
		})
	case api.SCTP:
		c, err = h.dialStream(ctx, unix.IPPROTO_SCTP, from, to)
	default:
		return nil, fmt.Errorf("dial %s: %w", protocol, errors.ErrUnsupported)
	}
	if err != nil {
		return nil, err
	}
	return newConn(c), nil
}

func newConn(c net.Conn) *Conn { return &Conn{Conn: c, lines: bufio.NewReader(c)} }

// withUnusedPort calls dial on the host, with a source port that was not used recently.
// Connection tracking then sees a new connection. With a port that the kernel chooses, a
// connection may get the entry of an earlier one: after a proxy resets a TCP connection, its
// entry leads to the lost endpoint for some milliseconds.
func (h *Host) withUnusedPort(dial func(port int) error) (err error) {
	const first, number = 10000, 19000 // source ports below the kernel's ephemeral ports
	for range 100 {
		port := first + int(h.lastPort.Add(1)%number)
		if err = h.Do(func() error { return dial(port) }); !errors.Is(err, unix.EADDRINUSE) {
			return err
		}
	}
	return err
}

// reuseAddr lets a socket use the port of an earlier connection in state TIME-WAIT.
func reuseAddr(_, _ string, c syscall.RawConn) error {
	var err error
	cannot := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(cannot, err)
}

// Ask sends one request and returns the server's response. A caller may call Ask
// repeatedly.
func (c *Conn) Ask(deadline time.Time) (Answer, error) { return c.ask(deadline, c.requests+1) }

// ask sends a request. It ignores answers to requests whose sequence number is less than
// first.
func (c *Conn) ask(deadline time.Time, first int) (Answer, error) {
	if err := c.SetDeadline(deadline); err != nil {
		return Answer{}, err
	}
	c.requests++
	// The kernel returns EPERM if a rule of the client's own host rejects or drops a packet.
	if _, err := fmt.Fprintf(c, "%d\n", c.requests); err != nil && !errors.Is(err, unix.EPERM) {
		return Answer{}, err
	}
	for {
		line, err := c.lines.ReadString('\n')
		if err != nil {
			return Answer{}, err
		}
		var request int
		var name, peer string
		if _, err := fmt.Sscan(line, &request, &name, &peer); err != nil {
			return Answer{}, fmt.Errorf("answer %q: %w", line, err)
		}
		if request < first {
			continue // a late answer over UDP
		}
		addr, err := netip.ParseAddrPort(peer)
		if err != nil {
			return Answer{}, fmt.Errorf("answer %q: %w", line, err)
		}
		return Answer{name, addr}, nil
	}
}

// resendInterval is the time after which AskRepeatedly repeats a UDP request. It is
// longer than the time after which a check counts an unanswered request as dropped.
const resendInterval = time.Second

// AskRepeatedly is like Ask, but over UDP it repeats the request each second until an
// answer arrives, because the network may lose single packets. Checks that expect an
// answer use it.
func (c *Conn) AskRepeatedly(deadline time.Time) (Answer, error) {
	first := c.requests + 1
	if _, ok := c.Conn.(*net.UDPConn); ok {
		for time.Until(deadline) > resendInterval {
			if answer, err := c.ask(time.Now().Add(resendInterval), first); !TimedOut(err) {
				return answer, err
			}
		}
	}
	return c.ask(deadline, first)
}

// Ask opens a connection, calls Conn.Ask and closes the connection.
func (h *Host) Ask(ctx context.Context, protocol api.Protocol, from netip.Addr, to netip.AddrPort) (Answer, error) {
	return h.onNewConn(ctx, protocol, from, to, (*Conn).Ask)
}

// AskRepeatedly opens a connection, calls Conn.AskRepeatedly and closes the connection.
func (h *Host) AskRepeatedly(ctx context.Context, protocol api.Protocol, from netip.Addr, to netip.AddrPort) (Answer, error) {
	return h.onNewConn(ctx, protocol, from, to, (*Conn).AskRepeatedly)
}

func (h *Host) onNewConn(ctx context.Context, protocol api.Protocol, from netip.Addr, to netip.AddrPort, ask func(*Conn, time.Time) (Answer, error)) (Answer, error) {
	c, err := h.Dial(ctx, protocol, from, to)
	if err != nil {
		return Answer{}, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	return ask(c, deadline)
}

// Refused reports whether err means a TCP reset or port unreachable.
func Refused(err error) bool { return errors.Is(err, unix.ECONNREFUSED) }

// TimedOut reports whether err is a timeout.
func TimedOut(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}
