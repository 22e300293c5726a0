// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api/clusterv1"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// clusterServer serves the state of the cluster to other servers.
type clusterServer struct {
	clusterv1.UnimplementedClusterServer
	*Server
}

// Watch implements clusterv1.ClusterServer.
func (s clusterServer) Watch(stream grpc.BidiStreamingServer[clusterv1.WatchRequest, clusterv1.WatchResponse]) error {
	c, err := callerOf(stream.Context())
	if err != nil {
		return err
	}
	if err := s.mayReadCluster(c); err != nil {
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
	r := relay{Server: s.Server, sender: sender{stream, c, s.opts.Limits.SendTimeout, &s.peers.stalled}}
	r.revision, r.positioned = s.readToken(req.GetResume())
	for {
		if err := r.answer(stream.Context()); err != nil {
			return err
		}
		if _, err := stream.Recv(); err != nil {
			return endOf(err)
		}
	}
}

func (s *Server) mayReadCluster(c caller) error {
	if s.opts.TLS == nil {
		return nil
	}
	for _, name := range s.opts.ClusterReaders {
		if c.cert != nil && (c.cert.Subject.CommonName == name || slices.Contains(c.cert.Subject.Organization, name)) {
			return nil
		}
	}
	return status.Errorf(codes.PermissionDenied, "%s may not read the state of the cluster", c.name)
}

// relay is the position of a client that follows the cluster's state.
type relay struct {
	*Server
	sender   sender
	answered bool
	// revision is that of what the client has, if positioned.
	revision   diffRevision
	positioned bool

	part *clusterv1.WatchResponse
	size int // of part, about
}

// answer waits until the state is another than the client's, and tells it.
func (r *relay) answer(ctx context.Context) error {
	for {
		snapshot, next := r.published.get()
		if snapshot != nil && (!r.answered || snapshot.Revision != r.revision) {
			return r.tell(snapshot)
		}
		select {
		case <-next:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-r.stopping:
			return status.Error(codes.Unavailable, "the server stops")
		}
	}
}

// tell brings the client to the snapshot.
func (r *relay) tell(snapshot *cluster.Snapshot) error {
	services, a := since(snapshot.Services, r)
	slices, b := since(snapshot.Slices, r)
	nodes, c := since(snapshot.Nodes, r)
	reset := !a || !b || !c
	if reset {
		services, slices, nodes = snapshot.Services.All(), snapshot.Slices.All(), snapshot.Nodes.All()
	}
	r.part, r.size = &clusterv1.WatchResponse{Reset_: reset}, 0
	for key, s := range services {
		var m proto.Message
		if s == nil {
			m = appendTo(&r.part.DeletedServices, clusterv1.FromKey(key))
		} else {
			m = appendTo(&r.part.Services, localv1.FromService(s))
		}
		if err := r.grow(proto.Size(m)); err != nil {
			return err
		}
	}
	for key, s := range slices {
		var m proto.Message
		if s == nil {
			m = appendTo(&r.part.DeletedSlices, clusterv1.FromKey(key))
		} else {
			m = appendTo(&r.part.Slices, clusterv1.FromSlice(s))
		}
		if err := r.grow(proto.Size(m)); err != nil {
			return err
		}
	}
	for name, n := range nodes {
		size := len(name)
		if n == nil {
			r.part.DeletedNodes = append(r.part.DeletedNodes, name)
		} else {
			size = proto.Size(appendTo(&r.part.Nodes, localv1.FromNode(n)))
		}
		if err := r.grow(size); err != nil {
			return err
		}
	}
	r.part.Token = r.newToken(snapshot.Revision)
	if err := r.flush(); err != nil {
		return err
	}
	r.answered, r.revision, r.positioned = true, snapshot.Revision, true
	return nil
}

// since yields what changed after the position of r, the zero value for what is
// gone. It returns false if that is not known.
func since[K, V any](s *diffstore.Snapshot[K, V], r *relay) (iter.Seq2[K, V], bool) {
	if !r.positioned {
		return nil, false
	}
	changes, ok := s.Since(r.revision)
	return func(yield func(K, V) bool) {
		for c := range changes {
			if !yield(c.Key, c.Value) {
				return
			}
		}
	}, ok
}

func appendTo[M proto.Message](list *[]M, m M) M {
	*list = append(*list, m)
	return m
}

// grow notes that the part has grown, and sends it if it is large enough.
func (r *relay) grow(by int) error {
	if r.size += by; r.size < batchBytes {
		return nil
	}
	return r.flush()
}

// flush sends the part, and begins the next one.
func (r *relay) flush() error {
	m := &raw{mem.BufferSlice{mem.SliceBuffer(localv1.Marshal(r.part))}}
	r.part, r.size = &clusterv1.WatchResponse{}, 0
	return r.sender.send(m)
}
