// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"fmt"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// clusterServer sends the state of the cluster to other servers.
type clusterServer struct {
	clusterv1.UnimplementedClusterServer
	*Server
}

// Watch implements clusterv1.ClusterServer.
func (s clusterServer) Watch(stream grpc.BidiStreamingServer[clusterv1.WatchRequest, clusterv1.WatchResponse]) error {
	return serveStream(s.Server, stream, func(c caller, req *clusterv1.WatchRequest) (subscriber[clusterv1.WatchRequest], error) {
		if err := s.mayReadCluster(c); err != nil {
			return nil, err
		}
		r := &relay{server: s.Server, sender: sender{server: s.Server, stream: stream, caller: c}}
		r.revision = s.readToken(req.GetResume(), nil)
		return r, nil
	})
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
	server   *Server
	sender   sender
	revision uint64 // the client's revision; 0 if unknown
	synced   bool   // an answer was sent

	part clusterv1.WatchResponse
	size int // approximate size of part, in bytes
}

// send implements subscriber.
func (r *relay) send(snapshot *cluster.Objects) (bool, error) {
	if r.synced && r.revision == snapshot.Revision {
		return false, nil
	}
	r.sender.begin(snapshot)
	services, a := (*revstore.Snapshot[types.NamespacedName, *api.Service])(snapshot.Services).Since(r.revision)
	slices, b := (*revstore.Snapshot[types.NamespacedName, *api.EndpointSlice])(snapshot.Slices).Since(r.revision)
	nodes, c := nodesOf(snapshot).Since(r.revision)
	if r.part.Reset_ = !a || !b || !c; r.part.Reset_ {
		services, slices, nodes = snapshot.Services.All(), snapshot.Slices.All(), snapshot.Nodes.All()
	}
	name := func(name string) string { return name }
	if err := add(r, services, &r.part.Services, localv1.FromService, &r.part.DeletedServices, clusterv1.FromKey); err != nil {
		return true, err
	}
	if err := add(r, slices, &r.part.Slices, clusterv1.FromSlice, &r.part.DeletedSlices, clusterv1.FromKey); err != nil {
		return true, err
	}
	if err := add(r, nodes, &r.part.Nodes, localv1.FromNode, &r.part.DeletedNodes, name); err != nil {
		return true, err
	}
	r.part.Token, r.part.Stale = r.server.newToken(snapshot.Revision, nil), snapshot.Stale
	r.revision, r.synced = snapshot.Revision, true
	return true, r.flush()
}

// request implements subscriber. A request after the first says only that the client is
// ready.
func (r *relay) request(*clusterv1.WatchRequest) error { return nil }

// nodeName implements subscriber.
func (r *relay) nodeName() string { return "" }

// deletionSize is the approximate size of a deletion on the wire.
const deletionSize = 64

// add adds objects of one kind to r.part, and calls flush whenever r.part is large
// enough. A nil object means that the object was deleted. An object that is too large for a
// message counts as deleted.
func add[K, V any, M proto.Message, D any](r *relay, objects iter.Seq2[K, *V], set *[]M, message func(*V) M, deleted *[]D, name func(K) D) error {
	for key, object := range objects {
		var m M
		size := 0
		if object != nil {
			m = message(object)
			size = proto.Size(m)
		}
		if size > maxObject {
			klog.Background().Error(errTooLarge, "Object too large for a message; the client does not receive it", "kind", fmt.Sprintf("%T", object), "object", key)
		}
		if object == nil || size > maxObject {
			*deleted = append(*deleted, name(key))
			r.size += deletionSize
		} else {
			*set = append(*set, m)
			r.size += size
		}
		if r.size < batchBytes {
			continue
		}
		if err := r.flush(); err != nil {
			return err
		}
	}
	return nil
}

// flush sends r.part and empties it.
func (r *relay) flush() error {
	m := &raw{mem.BufferSlice{mem.SliceBuffer(localv1.Marshal(&r.part))}}
	r.part.Reset()
	r.size = 0
	return r.sender.send(m)
}
