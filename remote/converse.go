// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"io"

	"github.com/kpng-project/kpng/cluster"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// listener is the client of a stream and what it was told so far.
type listener[Request any] interface {
	// tell brings the client to the snapshot, and reports whether there was
	// anything to tell.
	tell(snapshot *cluster.Snapshot) (bool, error)
	// hear takes a request that is not the first.
	hear(req *Request) error
	close()
}

// converse is the life of a stream: requests and answers in turn. What follows the
// first request is with the listener that begin returns.
func converse[Request, Response any](s *Server, stream grpc.BidiStreamingServer[Request, Response], begin func(caller, *Request) (listener[Request], error)) error {
	c, err := callerOf(stream.Context())
	if err != nil {
		return err
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
	defer l.close()
	at := diffRevision(0)
	for {
		if at, err = s.answer(stream.Context(), at, l.tell); err != nil {
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

// answer waits until there is another snapshot than the one at a revision, with
// something in it to tell, and tells it. It returns the revision it has come to.
func (s *Server) answer(ctx context.Context, at diffRevision, tell func(*cluster.Snapshot) (bool, error)) (diffRevision, error) {
	for {
		snapshot, next := s.published.get()
		if snapshot != nil && snapshot.Revision != at {
			told, err := tell(snapshot)
			if at = snapshot.Revision; told || err != nil {
				return at, err
			}
		}
		select {
		case <-next:
		case <-ctx.Done():
			return at, status.FromContextError(ctx.Err()).Err()
		case <-s.stopping:
			return at, status.Error(codes.Unavailable, "the server stops")
		}
	}
}
