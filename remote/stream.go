// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// listener is the client of a stream and what it was sent so far.
type listener[Request any] interface {
	// tell brings the client to the snapshot, and reports whether there was anything to send.
	tell(snapshot *cluster.Snapshot) (bool, error)
	// hear takes a request that is not the first.
	hear(req *Request) error
}

// renewTokens is how long a client has a token at most that is not of the latest revision. A
// store remembers deletions for 10 minutes.
const renewTokens = 5 * time.Minute

// errExpired ends a stream whose client would not be admitted any more.
var errExpired = status.Error(codes.Unauthenticated, "the client's certificate has expired")

// converse is the life of a stream: requests and answers in turn. What follows the
// first request is with the listener that begin returns.
func converse[Request, Response any](s *Server, stream grpc.BidiStreamingServer[Request, Response], begin func(caller, *Request) (listener[Request], error)) error {
	ctx := stream.Context()
	c, err := callerOf(ctx, !s.opts.NodeCertificates)
	if err != nil {
		return err
	}
	if c.cert != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, c.cert.NotAfter, errExpired)
		defer cancel()
	}
	done, err := s.peers.admit(c)
	if err != nil {
		return err
	}
	defer done()
	req, err := stream.Recv()
	if err != nil {
		return endOf(err)
	}
	l, err := begin(c, req)
	if err != nil {
		return err
	}
	for {
		if err = s.answer(ctx, l.tell); err != nil {
			return err
		}
		if req, err = stream.Recv(); err != nil {
			return endOf(err)
		}
		if err := l.hear(req); err != nil {
			return err
		}
	}
}

// endOf is how a stream ends whose client is heard no more.
func endOf(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// answer waits until a snapshot has something to tell, and tells it.
func (s *Server) answer(ctx context.Context, tell func(*cluster.Snapshot) (bool, error)) error {
	renew := time.NewTicker(renewTokens)
	defer renew.Stop()
	for {
		snapshot, next := s.published.get()
		if snapshot != nil {
			if told, err := tell(snapshot); told || err != nil {
				return err
			}
		}
		select {
		case <-next:
		case <-renew.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.stopping:
			return status.Error(codes.Unavailable, "the server stops")
		}
	}
}

// sender sends messages to one client, and closes its connection if that does not
// take them.
type sender struct {
	server *Server
	stream grpc.ServerStream
	caller caller

	// The answer that is being sent.
	snapshot *cluster.Snapshot
	started  time.Time
	sent     int // bytes
}

// begin begins an answer that brings the client to a snapshot.
func (s *sender) begin(snapshot *cluster.Snapshot) {
	s.snapshot, s.started, s.sent = snapshot, time.Now(), 0
}

// send sends one message. The client has SendTimeout for it and, of all the answer, for each
// 64 KB. An answer that takes longer ends when its snapshot is too old.
func (s *sender) send(m *raw) error {
	size, timeout, elapsed := m.bytes.Len(), s.server.opts.Limits.SendTimeout, time.Since(s.started)
	peers := s.server.peers
	if elapsed > timeout && s.server.published.lags(s.snapshot) {
		peers.stalled.Add(1)
		return status.Error(codes.Aborted, "the cluster changes faster than the client takes it")
	}
	patience := min(timeout, time.Duration(1+s.sent/batchBytes)*timeout-elapsed)
	stalled := time.AfterFunc(patience, func() { s.caller.conn.Close() })
	err := s.stream.SendMsg(m)
	if !stalled.Stop() {
		peers.stalled.Add(1)
		return status.Error(codes.DeadlineExceeded, "the client takes too little")
	}
	if err == nil {
		s.sent += size
		peers.sent.Add(uint64(size))
	}
	return err
}

// batchBytes is about how large a batch gets.
const batchBytes = 64 << 10

// opSender sends operations: one a message or, to clients that take them, in
// batches. After an error it sends nothing.
type opSender struct {
	sender
	batches bool

	batch mem.BufferSlice
	size  int
	err   error
}

// ops sends operations, with those that follow perhaps.
func (s *opSender) ops(frames ...frame) {
	for _, f := range frames {
		switch {
		case s.err != nil:
			return
		case !s.batches:
			s.err = s.send(&raw{mem.BufferSlice{mem.SliceBuffer(f.item())}})
			continue
		case s.batch == nil:
			s.batch = make(mem.BufferSlice, 0, 4) // most answers are short
		}
		s.batch = append(s.batch, mem.SliceBuffer(f))
		if s.size += len(f); s.size >= batchBytes {
			s.flush()
		}
	}
}

// flush sends what is left.
func (s *opSender) flush() {
	if s.size > 0 && s.err == nil {
		s.err = s.send(&raw{s.batch})
		s.batch, s.size = nil, 0
	}
}
