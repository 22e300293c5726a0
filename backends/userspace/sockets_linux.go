// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// keepAliveInherited reports whether accepted connections inherit the settings of
// keep-alive from their listener.
const keepAliveInherited = true

// listenerControl sets the options that accepted connections inherit from a listening
// socket.
func listenerControl(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error {
		for option, value := range map[int]int{
			unix.TCP_KEEPIDLE:  int(keepAlive.Idle / time.Second),
			unix.TCP_KEEPINTVL: int(keepAlive.Interval / time.Second),
			unix.TCP_KEEPCNT:   keepAlive.Count,
		} {
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, option, value); err != nil {
				return fmt.Errorf("set TCP keep-alive: %w", err)
			}
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1); err != nil {
			return fmt.Errorf("set TCP keep-alive: %w", err)
		}
		return nil
	})
}

// dialControl delays the last packet of the handshake until the first bytes are sent. So
// the same packet contains these bytes, and the endpoint does not wake for an empty
// packet. If a connection has no bytes to send, confirm must be called.
func dialControl(_, _ string, c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0) })
}

// confirm sends the last packet of the handshake, which dialControl has delayed. Without
// confirm, the kernel would send it after 0.2 s.
func confirm(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
}

// bindAnywhere lets a socket bind to an address that no interface has. It uses an option
// of IPv4, which also works for IPv6.
func bindAnywhere(c syscall.RawConn) error {
	return onDescriptor(c, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
	})
}

// onDescriptor calls f with the file descriptor of c.
func onDescriptor(c syscall.RawConn, f func(fd int) error) error {
	var err error
	if controlErr := c.Control(func(fd uintptr) { err = f(int(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}

// datagrams reads and writes datagrams of a socket, several per system call.
// The socket may be of either IP family. Only one goroutine may read at a time.
type datagrams struct {
	c *ipv4.PacketConn
	// readLimit is the maximum number of datagrams that the next system call reads. It
	// depends on how many datagrams arrived recently, because it is expensive to prepare
	// unused buffers.
	readLimit int
}

func newDatagrams(c *net.UDPConn) datagrams { return datagrams{ipv4.NewPacketConn(c), 1} }

// read waits for datagrams, reads them, and returns their number.
func (d *datagrams) read(messages []ipv4.Message) (int, error) {
	n, err := d.c.ReadBatch(messages[:d.readLimit], 0)
	switch {
	case n == d.readLimit:
		d.readLimit = min(2*n, len(messages))
	case d.readLimit > 1 && n <= d.readLimit/4:
		d.readLimit /= 2
	}
	return n, err
}

// write writes all messages, unless an error occurs.
func (d *datagrams) write(messages []ipv4.Message) error {
	for len(messages) > 0 {
		n, err := d.c.WriteBatch(messages, 0)
		if err != nil {
			return err
		}
		messages = messages[n:]
	}
	return nil
}
