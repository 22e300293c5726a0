// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// stream moves the bytes of one direction of a connection. Few at a time go
// through a buffer, which is two system calls; many go through a pipe, by which
// the kernel moves pages instead of copying bytes. It has neither while it
// waits: ten thousand idle connections are the rule, not the exception.
type stream struct {
	source, sink         syscall.RawConn
	destination          *net.TCPConn
	buffers              *buffers
	pipes                *pipes
	buffer               *[]byte
	pipe                 *pipe
	n                    int
	err                  error
	spliced              bool // so much comes at once that a pipe is worth it
	fill, splice, unload func(fd uintptr) bool
}

func newStream(source, destination *net.TCPConn, b *buffers, p *pipes) (*stream, error) {
	from, err := source.SyscallConn()
	if err != nil {
		return nil, err
	}
	to, err := destination.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stream{source: from, sink: to, destination: destination, buffers: b, pipes: p}
	s.fill, s.splice, s.unload = s.tryFill, s.trySplice, s.tryUnload // made once, as each is an allocation
	return s, nil
}

// move waits until there is something to move, and moves what there is. It
// returns how many bytes that were, and io.EOF at the end.
func (s *stream) move() (int, error) {
	if s.spliced {
		return s.moveByPipe()
	}
	if err := s.source.Read(s.fill); err != nil {
		return 0, err
	}
	if s.err != nil {
		return 0, s.err
	}
	defer s.putBuffer()
	if s.n == 0 {
		return 0, io.EOF
	}
	s.spliced = s.n == len(*s.buffer)
	return s.destination.Write((*s.buffer)[:s.n])
}

// tryFill reads from the source, if it has something.
func (s *stream) tryFill(fd uintptr) bool {
	s.buffer = s.buffers.get()
	s.n, s.err = ignoringEINTR(func() (int, error) { return unix.Read(int(fd), *s.buffer) })
	if s.err == unix.EAGAIN {
		s.putBuffer()
		return false
	}
	if s.err != nil {
		s.putBuffer()
		s.err = fmt.Errorf("read: %w", s.err)
	}
	return true
}

func (s *stream) putBuffer() {
	s.buffers.put(s.buffer)
	s.buffer = nil
}

func (s *stream) moveByPipe() (int, error) {
	if err := s.source.Read(s.splice); err != nil {
		return 0, err
	}
	if s.err != nil {
		if errors.Is(s.err, errNoPipe) {
			s.spliced = false
			return s.move()
		}
		return 0, s.err
	}
	if s.n == 0 {
		s.putPipe()
		return 0, io.EOF
	}
	moved := s.n
	s.spliced = moved >= spliceWorth
	if err := s.sink.Write(s.unload); err != nil || s.err != nil {
		s.pipe.close() // something is left in it
		s.pipe = nil
		return moved - s.n, errors.Join(err, s.err)
	}
	s.putPipe()
	return moved, nil
}

// trySplice moves from the source into a pipe, if there is something.
func (s *stream) trySplice(fd uintptr) bool {
	if s.pipe, s.err = s.pipes.get(); s.err != nil {
		s.err = fmt.Errorf("%w: %w", errNoPipe, s.err)
		return true
	}
	s.n, s.err = ignoringEINTR(func() (int, error) {
		n, err := unix.Splice(int(fd), nil, s.pipe.in, nil, pipeSize, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		return int(n), err
	})
	if s.err == unix.EAGAIN {
		s.putPipe()
		return false
	}
	if s.err != nil {
		s.putPipe()
		s.err = fmt.Errorf("splice: %w", s.err)
	}
	return true
}

// tryUnload moves from the pipe to the destination. It counts n down.
func (s *stream) tryUnload(fd uintptr) bool {
	for s.n > 0 {
		n, err := ignoringEINTR(func() (int, error) {
			n, err := unix.Splice(s.pipe.out, nil, int(fd), nil, s.n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
			return int(n), err
		})
		if err == unix.EAGAIN {
			return false
		}
		if err != nil {
			s.err = fmt.Errorf("splice: %w", err)
			return true
		}
		s.n -= n
	}
	return true
}

func (s *stream) putPipe() {
	s.pipes.put(s.pipe)
	s.pipe = nil
}

func ignoringEINTR(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != unix.EINTR {
			return n, err
		}
	}
}

// pipeSize is how much a pipe holds.
const pipeSize = 256 << 10

// spliceWorth is how many bytes have to come at once for the pipe to be kept up.
const spliceWorth = 16 << 10

var errNoPipe = errors.New("no pipe")

// pipe is one of the kernel's, empty.
type pipe struct{ in, out int }

func newPipe() (*pipe, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	// A user who has many pipes already gets a smaller one, which does as well.
	unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize)
	return &pipe{in: fds[1], out: fds[0]}, nil
}

func (p *pipe) close() {
	unix.Close(p.in)
	unix.Close(p.out)
}

// pipes keeps pipes that nobody uses, a few. It is safe for concurrent use.
type pipes struct{ free chan *pipe }

func newPipes() *pipes { return &pipes{free: make(chan *pipe, 32)} }

func (p *pipes) get() (*pipe, error) {
	select {
	case pipe := <-p.free:
		return pipe, nil
	default:
		return newPipe()
	}
}

func (p *pipes) put(pipe *pipe) {
	select {
	case p.free <- pipe:
	default:
		pipe.close()
	}
}

// close closes the pipes that nobody uses.
func (p *pipes) close() {
	for {
		select {
		case pipe := <-p.free:
			pipe.close()
		default:
			return
		}
	}
}
