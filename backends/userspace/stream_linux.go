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

// stream moves the bytes of one direction of a connection. It copies small amounts of
// bytes through a buffer, with three system calls. It splices large amounts through a
// pipe. The kernel then moves pages and does not copy bytes. A waiting stream has neither
// buffer nor pipe, because a backend often has ten thousand idle connections.
type stream struct {
	source, sink syscall.RawConn
	buffers      *buffers
	pipes        *pipes
	account      *account
	buffer       *[]byte
	rest         []byte // those bytes in the buffer that are not written yet
	pipe         *pipe
	n            int   // number of bytes in the pipe
	end          error // what follows the bytes that were read: io.EOF, an error, or nil if unknown
	err          error
	spliced      bool // true if the next call of move uses a pipe, because the last call moved enough bytes
	unconfirmed  bool // true if dialControl still delays the handshake with the endpoint, because nothing was written yet

	fill, empty, splice, unload func(fd uintptr) bool
}

// newStream returns a stream from source to destination. If dialed is true, destination
// is a new connection to an endpoint, and nothing was written to it yet.
func newStream(source, destination *net.TCPConn, dialed bool, b *buffers, p *pipes, a *account) (*stream, error) {
	from, err := source.SyscallConn()
	if err != nil {
		return nil, err
	}
	to, err := destination.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stream{source: from, sink: to, buffers: b, pipes: p, account: a, unconfirmed: dialed}
	// Create each method value only once, because each creation allocates memory.
	s.fill, s.empty, s.splice, s.unload = s.tryFill, s.tryEmpty, s.trySplice, s.tryUnload
	return s, nil
}

// move waits for bytes and moves them. It returns the number of moved bytes.
// At the end of the source, the error is io.EOF.
func (s *stream) move() (int, error) {
	if s.spliced {
		return s.moveByPipe()
	}
	if err := s.source.Read(s.fill); err != nil {
		return 0, err
	}
	if s.buffer == nil {
		return 0, s.end
	}
	defer s.putBuffer()
	n := len(s.rest)
	s.spliced = n == len(*s.buffer)
	if err := s.sink.Write(s.empty); err != nil || s.err != nil {
		return n - len(s.rest), errors.Join(err, s.err)
	}
	return n, s.end
}

// tryFill reads all available bytes, and the end of the stream if it follows these bytes.
// So the last bytes and the end can be sent together. Without available bytes, the stream
// keeps no buffer.
func (s *stream) tryFill(fd uintptr) bool {
	s.buffer = s.buffers.get()
	filled := 0
	for filled < len(*s.buffer) && s.end == nil {
		n, err := ignoringEINTR(func() (int, error) { return unix.Read(int(fd), (*s.buffer)[filled:]) })
		if err == unix.EAGAIN {
			break
		}
		switch {
		case err != nil:
			s.end = fmt.Errorf("read: %w", err)
		case n == 0:
			s.end = io.EOF
		default:
			filled += n
		}
	}
	if s.unconfirmed && filled == 0 && s.end == nil {
		confirm(s.sink) // ignore an error; a write would also report it
	}
	s.unconfirmed = false
	if filled == 0 {
		s.putBuffer()
		return s.end != nil
	}
	s.rest = (*s.buffer)[:filled]
	return true
}

// tryEmpty writes the bytes of the buffer to the sink.
func (s *stream) tryEmpty(fd uintptr) bool {
	flags := 0
	if s.end == io.EOF {
		flags = unix.MSG_MORE // so that the end of the stream is sent in the same packet as the last bytes
	}
	for len(s.rest) > 0 {
		n, err := ignoringEINTR(func() (int, error) { return unix.SendmsgN(int(fd), s.rest, nil, nil, flags) })
		if err == unix.EAGAIN {
			return false
		}
		if err != nil {
			s.err = fmt.Errorf("write: %w", err)
			return true
		}
		s.rest = s.rest[n:]
	}
	return true
}

func (s *stream) putBuffer() {
	s.buffers.put(s.buffer)
	s.buffer, s.rest = nil, nil
}

func (s *stream) moveByPipe() (int, error) {
	if err := s.source.Read(s.splice); err != nil {
		return 0, err
	}
	if s.err != nil {
		if errors.Is(s.err, errNoPipe) {
			s.spliced, s.err = false, nil
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
		s.pipe.close() // a pipe with bytes cannot be reused
		s.pipe = nil
		s.account.give(descriptorsPerPipe)
		return moved - s.n, errors.Join(err, s.err)
	}
	s.putPipe()
	return moved, nil
}

// trySplice moves available bytes from the source into a pipe.
func (s *stream) trySplice(fd uintptr) bool {
	if !s.account.take(descriptorsPerPipe) {
		s.err = errNoPipe
		return true
	}
	if s.pipe, s.err = s.pipes.get(); s.err != nil {
		s.account.give(descriptorsPerPipe)
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

// tryUnload moves the bytes in the pipe to the sink.
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
	s.account.give(descriptorsPerPipe)
}

func ignoringEINTR(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != unix.EINTR {
			return n, err
		}
	}
}

const pipeSize = 1 << 20

// descriptorsPerPipe is the number of descriptors of a pipe. While a service uses a pipe,
// they count as descriptors of the service.
const descriptorsPerPipe = 2

// spliceWorth is the minimum number of bytes per read for which a pipe is used.
const spliceWorth = 16 << 10

var errNoPipe = errors.New("no pipe")

// pipe is a pipe of the kernel.
type pipe struct{ in, out int }

func newPipe() (*pipe, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	// If a user has many pipes, the kernel makes that user's new pipes smaller. Then a
	// splice usually moves fewer bytes than spliceWorth, so the stream no longer uses a
	// pipe.
	unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize)
	return &pipe{in: fds[1], out: fds[0]}, nil
}

func (p *pipe) close() {
	unix.Close(p.in)
	unix.Close(p.out)
}

// pipes keeps a few unused pipes. It is safe for concurrent use.
type pipes struct {
	free chan *pipe
	open func() (*pipe, error)
}

func newPipes() *pipes { return &pipes{make(chan *pipe, 32), newPipe} }

func (p *pipes) get() (*pipe, error) {
	select {
	case pipe := <-p.free:
		return pipe, nil
	default:
		return p.open()
	}
}

func (p *pipes) put(pipe *pipe) {
	select {
	case p.free <- pipe:
	default:
		pipe.close()
	}
}

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
