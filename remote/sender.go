// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"sync/atomic"
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
	stalled *atomic.Uint64
}

// send sends one message.
func (s *sender) send(m any) error {
	stalled := time.AfterFunc(s.timeout, func() { s.caller.conn.Close() })
	err := s.stream.SendMsg(m)
	if !stalled.Stop() {
		s.stalled.Add(1)
		return status.Error(codes.DeadlineExceeded, "the client takes nothing")
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
