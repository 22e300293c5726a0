// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// sender sends messages to one client, and closes its connection if that does not
// take them.
type sender struct {
	stream  grpc.ServerStream
	caller  caller
	timeout time.Duration
	peers   *peers      // where what was sent, and who stalled, is counted
	stalled *time.Timer // closes the connection while a message is sent
}

func (s *Server) newSender(stream grpc.ServerStream, c caller) sender {
	return sender{stream: stream, caller: c, timeout: s.opts.Limits.SendTimeout, peers: s.peers}
}

// send sends one message.
func (s *sender) send(m *raw) error {
	size := m.bytes.Len()
	if s.stalled == nil {
		s.stalled = time.AfterFunc(s.timeout, func() { s.caller.conn.Close() })
	} else {
		s.stalled.Reset(s.timeout)
	}
	err := s.stream.SendMsg(m)
	if !s.stalled.Stop() {
		s.peers.stalled.Add(1)
		return status.Error(codes.DeadlineExceeded, "the client takes nothing")
	}
	if err == nil {
		s.peers.sent.Add(uint64(size))
	}
	return err
}

// batchBytes is about how large a batch gets.
const batchBytes = 64 << 10

// opSender sends operations: one a message or, to clients that take them, in
// batches.
type opSender struct {
	sender
	batches bool

	batch mem.BufferSlice
	size  int
}

// op sends one operation, with those that follow perhaps.
func (s *opSender) op(f frame) error {
	if !s.batches {
		return s.send(&raw{mem.BufferSlice{mem.SliceBuffer(f.item())}})
	}
	if s.batch == nil {
		s.batch = make(mem.BufferSlice, 0, 4) // most answers are short
	}
	s.batch = append(s.batch, mem.SliceBuffer(f))
	s.size += len(f)
	if s.size < batchBytes {
		return nil
	}
	return s.flush()
}

// flush sends what is left.
func (s *opSender) flush() error {
	if s.size == 0 {
		return nil
	}
	err := s.send(&raw{s.batch})
	s.batch, s.size = nil, 0
	return err
}
