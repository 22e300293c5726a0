// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package userspace

import (
	"net"
	"syscall"
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

// The method move waits for bytes and moves them. It returns the number of moved bytes.
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
