// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"syscall"

	"github.com/kpng-project/kpng/backends/userspace/internal/netif"
	"golang.org/x/net/ipv4"
)

// stream moves the bytes of one direction of a connection. While it waits, it has no
// buffer.
type stream struct {
	from, to *net.TCPConn
	source   syscall.RawConn // the raw connection of the source, for waitReadable
	buffers  *buffers
}

func newStream(source, destination *net.TCPConn, _ bool, b *buffers, _ *pipes, _ *account) (*stream, error) {
	raw, err := source.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &stream{source, destination, raw, b}, nil
}

// move waits for bytes and moves them. It returns the number of moved bytes.
// At the end of the source, the error is io.EOF.
func (s *stream) move() (int, error) {
	if err := waitReadable(s.source); err != nil {
		return 0, err
	}
	buffer := s.buffers.get()
	defer s.buffers.put(buffer)
	n, err := s.from.Read(*buffer)
	if err != nil {
		return 0, err
	}
	return s.to.Write((*buffer)[:n])
}

// pipes is empty, because only Linux can splice.
type pipes struct{}

func newPipes() *pipes { return &pipes{} }

func (*pipes) close() {}

// attach does nothing. Instead, the rules apply after a connection is accepted.
func (s *screen) attach(syscall.RawConn, bool, []netip.Prefix, int) (int, error) { return 0, nil }

// datagrams reads and writes the datagrams of a socket.
type datagrams struct{ c *net.UDPConn }

func newDatagrams(c *net.UDPConn) datagrams { return datagrams{c} }

func (d *datagrams) read(messages []ipv4.Message) (int, error) {
	n, addr, err := d.c.ReadFromUDP(messages[0].Buffers[0])
	messages[0].N, messages[0].Addr = n, addr
	return 1, err
}

// write writes all messages, unless an error occurs.
func (d *datagrams) write(messages []ipv4.Message) error {
	for i := range messages {
		var err error
		if m := &messages[i]; m.Addr == nil {
			_, err = d.c.Write(m.Buffers[0])
		} else {
			_, err = d.c.WriteTo(m.Buffers[0], m.Addr)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// platformOptions are the names of the shared options that the dataplane supports only on
// this platform.
var platformOptions []string

// hostAddresses returns the mechanism that makes addresses of services local on Windows. It
// returns nil if AddAddresses is false, and otherwise sets the default of Interface.
func hostAddresses(o *Options) (addresses, error) {
	if !o.AddAddresses {
		return nil, nil
	}
	if runtime.GOOS != "windows" {
		return nil, fmt.Errorf("option AddAddresses on %s: %w", runtime.GOOS, errors.ErrUnsupported)
	}
	o.Interface = cmp.Or(o.Interface, "vEthernet (HNS Internal NIC)")
	a, err := netif.New(o.Interface, o.StateFile)
	if err != nil {
		return nil, err
	}
	return a, nil
}
