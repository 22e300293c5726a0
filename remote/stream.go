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

// subscriber represents the client of a stream. It knows which state the client has.
type subscriber[Request any] interface {
	// send sends the changes between the client's position and the snapshot. It returns
	// false if there were no changes to send.
	send(snapshot *cluster.Objects) (bool, error)
	// request handles every request of the stream except the first.
	request(req *Request) error
	// nodeName returns the client's node, or "" for a reader of the whole cluster.
	nodeName() string
}

// After the time renewTokens, a client gets a new token even if nothing changes for the
// client. After 10 minutes, a store drops deletions that an older token would need.
const renewTokens = 5 * time.Minute

var (
	errExpired  = status.Error(codes.Unauthenticated, "the client's certificate has expired")
	errStopping = status.Error(codes.Unavailable, "server is stopping")
)

// serveStream handles a stream. It receives a request, answers it, and then receives the
// next request. newSubscriber handles the first request and returns the subscriber.
func serveStream[Request, Response any](s *Server, stream grpc.BidiStreamingServer[Request, Response], newSubscriber func(caller, *Request) (subscriber[Request], error)) error {
	ctx := stream.Context()
	c, err := callerOf(ctx, s.opts.NodeCertificates)
	if err != nil {
		return err
	}
	if c.cert != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, c.cert.NotAfter, errExpired)
		defer cancel()
	}
	done, err := s.peers.admit(&c)
	if err != nil {
		return err
	}
	defer done()
	req, err := stream.Recv()
	if err != nil {
		return endOf(err)
	}
	l, err := newSubscriber(c, req)
	if err != nil {
		return err
	}
	open := &openStream{peer: c.name, node: l.nodeName(), since: time.Now()}
	defer s.peers.opened(open)()
	waker := newWaker()
	defer context.AfterFunc(ctx, waker.wake)()
	for {
		sent, err := s.answer(ctx, waker, l.send, open)
		if err != nil {
			return err
		}
		if req, err = stream.Recv(); err != nil {
			return endOf(err)
		}
		open.revision.Store(sent)
		if err := l.request(req); err != nil {
			return err
		}
	}
}

// endOf returns the result of a stream on which Recv returned err.
func endOf(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// answer calls send for each new snapshot, until send reports that it sent something. It
// returns the revision of the sent snapshot. If a snapshot has no changes to send, the
// client counts as having its revision.
func (s *Server) answer(ctx context.Context, w waker, send func(*cluster.Objects) (bool, error), open *openStream) (uint64, error) {
	for {
		snapshot := s.published.get()
		if snapshot != nil {
			if sent, err := send(snapshot); sent || err != nil {
				return snapshot.Revision, err
			}
			open.revision.Store(snapshot.Revision)
		}
		s.published.wait(snapshot, w)
		switch {
		case ctx.Err() != nil:
			return 0, context.Cause(ctx)
		case s.published.stopped.Load():
			return 0, errStopping
		}
	}
}

// sender sends messages to one client. If the client does not read the messages, sender
// closes the connection.
type sender struct {
	server *Server
	stream grpc.ServerStream
	caller caller

	// The fields below describe the answer in progress.
	snapshot *cluster.Objects
	started  time.Time
	sent     int // bytes

	// The timer stalled closes the connection. It runs while a message is sent.
	stalled *time.Timer
}

func (s *sender) begin(snapshot *cluster.Objects) {
	s.snapshot, s.started, s.sent = snapshot, time.Now(), 0
}

// send sends one message. The client must read the message, and on average 64 KB of the
// answer, within SendTimeout. If an answer takes longer than SendTimeout, and
// publisher.lags reports that the snapshot is too old, the stream ends.
func (s *sender) send(m *raw) error {
	size, timeout, elapsed := m.bytes.Len(), s.server.opts.SendTimeout, time.Since(s.started)
	peers := s.server.peers
	if elapsed > timeout && s.server.published.lags(s.snapshot) {
		peers.stalled.Add(1)
		return status.Error(codes.Aborted, "the cluster changes faster than the client reads")
	}
	patience := min(timeout, time.Duration(1+s.sent/batchBytes)*timeout-elapsed)
	if s.stalled == nil {
		s.stalled = time.AfterFunc(patience, func() { s.caller.conn.Close() })
	} else {
		s.stalled.Reset(patience)
	}
	err := s.stream.SendMsg(m)
	if !s.stalled.Stop() {
		peers.stalled.Add(1)
		return status.Error(codes.DeadlineExceeded, "the client reads too slowly")
	}
	if err == nil {
		s.sent += size
		peers.sent.Add(uint64(size))
	}
	return err
}

// A batch is sent when it has batchBytes bytes or more.
const batchBytes = 64 << 10

// opSender sends operations. If the client supports batches, a message contains several
// operations. Otherwise it contains one operation. After an error, opSender sends nothing
// more.
type opSender struct {
	sender
	batches bool

	batch mem.BufferSlice
	size  int
	err   error
}

// ops sends operations, or adds them to the batch.
func (s *opSender) ops(frames ...frame) {
	for _, f := range frames {
		switch {
		case s.err != nil:
			return
		case !s.batches:
			s.err = s.send(&raw{mem.BufferSlice{mem.SliceBuffer(f.item())}})
			continue
		case s.batch == nil:
			s.batch = make(mem.BufferSlice, 0, 2) // most answers have shared operations and a Sync
		}
		s.batch = append(s.batch, mem.SliceBuffer(f))
		if s.size += len(f); s.size >= batchBytes {
			s.flush()
		}
	}
}

// flush sends the batch, if any.
func (s *opSender) flush() {
	if s.size > 0 && s.err == nil {
		s.err = s.send(&raw{s.batch})
		s.batch, s.size = nil, 0
	}
}
