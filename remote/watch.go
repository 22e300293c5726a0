// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
)

// watch is one client's position, and how it wants to be told.
type watch struct {
	server *Server
	sender opSender
	name   string
	who    audience
	// ownNode is whether the client is told of the node itself, and tokens
	// whether it resumes.
	ownNode, tokens bool
	// frontends is whether the client wants frontends in place of services and
	// endpoints.
	frontends bool

	// resume is the token that the client came with, until it is answered.
	resume []byte

	// The rest is what the client has: synced is whether anything, token the revision of its
	// last token, and renewed when it got that.
	synced, stale bool
	token         diffstore.Revision
	renewed       time.Time
	cursor        *statesCursor
	node          *api.Node
}

// setsServer serves views of nodes.
type setsServer struct {
	localv1.UnimplementedSetsServer
	*Server
}

// Watch implements localv1.SetsServer.
func (s setsServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	return converse(s.Server, stream, func(c caller, req *localv1.WatchReq) (listener[localv1.WatchReq], error) {
		if err := s.mayWatch(c, req.GetNodeName()); err != nil {
			return nil, err
		}
		return s.newWatch(stream, c, req), nil
	})
}

// nodeCertificate is what the common name of a node's certificate begins with.
const nodeCertificate = "system:node:"

func (s *Server) mayWatch(c caller, node string) error {
	if !s.opts.NodeCertificates || c.cert != nil && node != "" && c.cert.Subject.CommonName == nodeCertificate+node {
		return nil
	}
	return status.Errorf(codes.PermissionDenied, "%s may not watch node %q", c.name, node)
}

func (s *Server) newWatch(stream grpc.ServerStream, c caller, req *localv1.WatchReq) *watch {
	w := &watch{
		server: s,
		sender: opSender{
			sender:  sender{server: s, stream: stream, caller: c},
			batches: req.GetBatches(),
		},
		name:      req.GetNodeName(),
		ownNode:   req.GetOwnNode(),
		frontends: req.GetFrontends(),
		tokens:    req.GetResumption() != nil,
		resume:    req.GetResume(),
		cursor:    s.state.NewCursor(),
	}
	if req.GetAllEndpoints() {
		w.who = askers
	}
	context.AfterFunc(stream.Context(), w.cursor.Close)
	return w
}

// staleToken is how many changes in the cluster make a token stale: a client that
// has not been told anything meanwhile gets a new one, for it would be told too
// much if it came back with the old one.
const staleToken = 1000

// hear implements listener.
func (w *watch) hear(req *localv1.WatchReq) error {
	if name := req.GetNodeName(); name != "" && name != w.name {
		return status.Errorf(codes.InvalidArgument, "this stream is for node %q, open another one for node %q", w.name, name)
	}
	return nil
}

// tell implements listener.
func (w *watch) tell(snapshot *cluster.Snapshot) (bool, error) {
	node, _ := snapshot.Nodes.Get(w.name)
	w.sender.begin(snapshot)
	w.operations(snapshot, node)
	told := w.sender.sent > 0 || w.sender.size > 0 || !w.synced || w.tokens && w.mayExpire(snapshot) || w.stale != snapshot.Stale
	if told {
		w.sync(snapshot, node)
	}
	w.cursor.Advance(snapshot.States)
	w.node = node
	return told, w.sender.err
}

// mayExpire reports whether the client's token may soon be void.
func (w *watch) mayExpire(snapshot *cluster.Snapshot) bool {
	behind := snapshot.Revision - w.token
	return behind > staleToken || behind > 0 && time.Since(w.renewed) >= renewTokens
}

// sync ends an answer.
func (w *watch) sync(snapshot *cluster.Snapshot, node *api.Node) {
	var token []byte
	if w.tokens {
		token = w.server.newToken(snapshot.Revision, w.depends(node)...)
		w.token, w.renewed = snapshot.Revision, time.Now()
	}
	w.sender.ops(syncFrame(token, snapshot.Stale))
	w.sender.flush()
	w.synced, w.stale, w.resume = true, snapshot.Stale, nil
}

// A token says where a client was: which server told it, up to which revision, and
// of what else the views depend that it was told. It is the server's alone to
// read; a client hands it back.

// newToken returns the token for a revision. What follows are strings on which the
// told depends, such as the node and its zone.
func (s *Server) newToken(revision diffstore.Revision, depends ...string) []byte {
	b := append(make([]byte, 0, 128), s.instance...)
	b = binary.AppendUvarint(b, uint64(revision))
	for _, d := range depends {
		b = append(binary.AppendUvarint(b, uint64(len(d))), d...)
	}
	return b
}

// readToken returns the revision of a token, 0 if it is of another server or depends on
// something else.
func (s *Server) readToken(token []byte, depends ...string) diffstore.Revision {
	rest, _ := bytes.CutPrefix(token, s.instance)
	revision, _ := binary.Uvarint(rest)
	if !bytes.Equal(token, s.newToken(diffstore.Revision(revision), depends...)) {
		return 0
	}
	return diffstore.Revision(revision)
}

// depends is what makes the views of this client what they are, besides the
// cluster's state.
func (w *watch) depends(node *api.Node) []string {
	return []string{w.name, node.Zone(), fmt.Sprint(w.who, w.frontends)}
}

// operations sends what leads from what the client has to the snapshot, but for
// the Sync.
func (w *watch) operations(snapshot *cluster.Snapshot, node *api.Node) {
	d := w.cursor.Until(snapshot.States)
	if !d.Full() {
		if !node.Equal(w.node) {
			w.sendNode(node)
		}
		w.phases(slices.Values(w.deltas(d, node)))
		return
	}
	if changes, ok := snapshot.States.Since(w.server.readToken(w.resume, w.depends(node)...)); ok {
		w.sendNode(node)
		w.wholes(changes, node, true)
		return
	}
	w.sender.ops(resetFrame())
	if node != nil {
		w.sendNode(node)
	}
	if w.tokens {
		w.wholes(d.New.All(), node, false)
	} else {
		w.phases(w.additions(d.New, node))
	}
}

// sendNode sends the node to a client that wants to know it.
func (w *watch) sendNode(node *api.Node) {
	switch {
	case !w.ownNode:
	case node == nil:
		w.sender.ops(deleteFrame(localv1.Set_NodesSet, w.name))
	default:
		w.sender.ops(setFrame(localv1.Set_NodesSet, w.name, localv1.Marshal(localv1.FromNode(node))))
	}
}

// wholes sends services, each as a whole, and perhaps deletes those that the node does not see.
func (w *watch) wholes(states iter.Seq2[types.NamespacedName, *api.ServiceState], node *api.Node, deletions bool) {
	set := localv1.Set_ServicesSet
	if w.frontends {
		set = localv1.Set_FrontendsSet
	}
	for key, state := range states {
		if view := w.view(state, node); view != nil {
			w.sender.ops(view.whole(w.who)...)
		} else if deletions {
			w.sender.ops(deleteFrame(set, servicePath(key)))
		}
		if w.sender.err != nil {
			return
		}
	}
}

// phases sends the operations of deltas in the order in which clients need them:
// a service comes before its endpoints and goes after them.
func (w *watch) phases(deltas iter.Seq[*wireDelta]) {
	for phase := range len(wireDelta{}) {
		for d := range deltas {
			if w.sender.ops(d[phase]...); w.sender.err != nil {
				return
			}
		}
	}
}

// additions yields how each service comes to be, from nothing.
func (w *watch) additions(s *states, node *api.Node) iter.Seq[*wireDelta] {
	return func(yield func(*wireDelta) bool) {
		for _, state := range s.All() {
			if view := w.view(state, node); view != nil && !yield(delta(nil, view, w.who)) {
				return
			}
		}
	}
}

// deltas returns what changes in this node's views.
func (w *watch) deltas(d statesDelta, node *api.Node) []*wireDelta {
	changes := slices.Values(w.server.published.changes(d))
	if node.Zone() != w.node.Zone() {
		changes = d.All()
	}
	var list []*wireDelta
	for c := range changes {
		old, new := w.view(c.Old, w.node), w.view(c.New, node)
		if old != new {
			list = append(list, delta(old, new, w.who))
		}
	}
	return list
}

// view returns how the client's node, as it is or was, sees a service.
func (w *watch) view(state *api.ServiceState, node *api.Node) *wireView {
	return w.server.views.of(state, w.name, node.Zone(), w.frontends)
}
