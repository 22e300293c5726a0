// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// BareGRPC returns a gRPC server without services and with the same gRPC options as s.
func (s *Server) BareGRPC() *grpc.Server {
	return grpc.NewServer(s.grpcOptions(insecure.NewCredentials())...)
}

// TokenFor returns the token of a client that follows the view of node, requests all
// endpoints, and has received the current state.
func (s *Server) TokenFor(node *api.Node) []byte {
	w := &watch{name: node.Name, who: complete}
	return s.newToken(s.state.Snapshot().Revision, w.newTarget(node).facts)
}

// RelayToken returns the token of a relay that has received the current state.
func (s *Server) RelayToken() []byte { return s.newToken(s.state.Snapshot().Revision, nil) }

// DigestsFor returns the digests of a client that follows the view of node, requests all
// endpoints, and has received the given state. The salt is zero.
func (s *Server) DigestsFor(snapshot *cluster.Objects, node *api.Node) *localv1.Digests {
	w := &watch{server: s, name: node.Name, who: complete}
	w.sender.snapshot = snapshot
	to := w.newTarget(node)
	x := s.beginnings.of(snapshot)
	sums := x.sumsFor(packKind{who: complete, zone: to.zone})
	d := digestsOf(make([]byte, saltSize), sums.services)
	h, here := newBucketHash(d.Salt), sums.at(node.Name, w.different(x, sums, nil, &to), complete)
	for bucket, services := range here.buckets(bucketCount(d)) {
		copy(d.Buckets[bucket*bucketDigest:], h.of(services))
	}
	return d
}

// Digests returns the client's digests with a salt.
func (c *Client) Digests(salt []byte) *localv1.Digests {
	state, _ := c.get()
	return digestsOf(salt, state.digested())
}

// AgeLoss makes the loss of the client's connection appear older. It returns false while
// the client is connected.
func (c *Client) AgeLoss(by time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost.IsZero() {
		return false
	}
	c.lost = c.lost.Add(-by)
	return true
}

// Views returns all views, or nil before the first answer.
func (c *Client) Views() *updates.Update { return updates.Read(c.Source()) }

// Quick returns options whose backoff is short.
func Quick(o DialOptions) DialOptions {
	o.minBackoff, o.maxBackoff = time.Millisecond, 20*time.Millisecond
	return o
}

// Batching returns options of a server that waits for changes for the given time.
func Batching(interval time.Duration, o ServerOptions) ServerOptions {
	o.batchInterval = interval
	return o
}

// HoldTurns takes all turns, so that no client begins until release is called.
func (s *Server) HoldTurns() (release func()) {
	s.beginnings.turns.Acquire(context.Background(), maxTurns) // cannot fail
	return func() { s.beginnings.turns.Release(maxTurns) }
}
