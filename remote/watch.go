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
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
)

// watch represents a client that receives the views of one node.
type watch struct {
	server *Server
	sender opSender
	name   string
	who    audience
	// If ownNode is true, the client requested its own Node. If tokens is true, the
	// client requested tokens.
	ownNode, tokens bool
	// The client requested frontends instead of services and endpoints.
	frontends bool

	// The client accepts packed operations. It also requested batches and tokens.
	packed bool

	// The client's token and its digests, until the first answer.
	resume []byte
	have   *localv1.Digests

	// The client's position. If synced is true, the client has received an answer. The
	// field token is the revision of the client's last token, and renewed is the time when
	// this token was sent.
	synced, stale bool
	token         uint64
	renewed       time.Time
	cursor        *statesCursor
	target        target
	nodes         uint64 // the revision of the nodes from which target was read
}

// target is a client's node, with the facts that affect the node's views.
type target struct {
	node  *api.Node // nil if the node does not exist
	zone  string
	facts []byte // for tokens
}

func (w *watch) newTarget(node *api.Node) target {
	return target{node, node.Zone(), tokenFacts(w.name, node.Zone(), fmt.Sprint(w.who, w.frontends))}
}

// setsServer sends views to nodes.
type setsServer struct {
	localv1.UnimplementedSetsServer
	*Server
}

// Watch implements localv1.SetsServer.
func (s setsServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	return serveStream(s.Server, stream, func(c caller, req *localv1.WatchReq) (subscriber[localv1.WatchReq], error) {
		if err := s.mayWatch(c, req.GetNodeName()); err != nil {
			return nil, err
		}
		return s.newWatch(stream, c, req), nil
	})
}

// The common name of a node's certificate begins with nodeCertificate.
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
		packed:    req.GetPacked() && req.GetBatches() && req.GetResumption() != nil,
		resume:    req.GetResume(),
		have:      req.GetHave(),
		cursor:    statesOf(s.state.Snapshot()).NewCursor(),
	}
	if req.GetAllEndpoints() {
		w.who = complete
	}
	context.AfterFunc(stream.Context(), w.cursor.Close)
	return w
}

// After staleToken changes in the cluster, an idle client gets a new token. The answer to
// an older token would contain too many changes.
const staleToken = 1000

// request implements subscriber.
func (w *watch) request(req *localv1.WatchReq) error {
	if name := req.GetNodeName(); name != "" && name != w.name {
		return status.Errorf(codes.InvalidArgument, "this stream is for node %q; open another one for node %q", w.name, name)
	}
	return nil
}

// nodeName implements subscriber.
func (w *watch) nodeName() string { return w.name }

// send implements subscriber.
func (w *watch) send(snapshot *cluster.Objects) (bool, error) {
	target := w.targetIn(snapshot)
	var x *beginning
	if w.packed && w.startsOver(snapshot, &target) {
		end, err := w.server.beginnings.turn(w.sender.stream.Context(), w.sender.caller.turns, func() error {
			w.sender.begin(snapshot)
			return w.sender.send(&raw{})
		})
		if err != nil {
			return false, err
		}
		defer end()
		if w.server.published.stopped.Load() {
			return false, errStopping
		}
		snapshot = w.server.published.get() // the published snapshot may be newer now
		if x = w.server.beginnings.of(snapshot); x.snapshot.Revision > snapshot.Revision {
			snapshot = x.snapshot
		}
		target = w.targetIn(snapshot)
	}
	w.sender.begin(snapshot)
	if x != nil {
		w.sendAll(x, snapshot, &target)
	} else {
		w.sendDifference(snapshot, &target)
	}
	sent := w.sender.sent > 0 || w.sender.size > 0 || !w.synced || w.tokens && w.mayExpire(snapshot) || w.stale != snapshot.Stale
	if sent {
		w.sync(snapshot, &target)
	}
	w.cursor.Advance(statesOf(snapshot.Snapshot))
	w.target, w.nodes = target, nodesOf(snapshot).Revision()
	return sent, w.sender.err
}

// targetIn returns the client's node in a snapshot.
func (w *watch) targetIn(snapshot *cluster.Objects) target {
	if w.synced && nodesOf(snapshot).Revision() == w.nodes {
		return w.target
	}
	node, _ := snapshot.Nodes.Get(w.name)
	return w.newTarget(node)
}

// startsOver reports whether the server does not know the client's present views.
func (w *watch) startsOver(snapshot *cluster.Objects, to *target) bool {
	if !w.cursor.Until(statesOf(snapshot.Snapshot)).Full() {
		return false
	}
	_, ok := statesOf(snapshot.Snapshot).Since(w.server.readToken(w.resume, to.facts))
	return !ok
}

// mayExpire reports whether the client's token may soon be invalid.
func (w *watch) mayExpire(snapshot *cluster.Objects) bool {
	behind := snapshot.Revision - w.token
	return behind > staleToken || behind > 0 && time.Since(w.renewed) >= renewTokens
}

// sync sends the Sync that ends an answer, with a new token.
func (w *watch) sync(snapshot *cluster.Objects, to *target) {
	var token []byte
	if w.tokens {
		token = w.server.newToken(snapshot.Revision, to.facts)
		w.token, w.renewed = snapshot.Revision, w.sender.started
	}
	w.sender.ops(syncFrame(token, snapshot.Stale))
	w.sender.flush()
	w.synced, w.stale, w.resume, w.have = true, snapshot.Stale, nil, nil
}

// A token records a client's position: the server, the revision, and other facts that
// affect the client's views. Only the server reads the token. A client returns it
// unchanged.

// tokenFacts encodes all facts that affect a client's views, except the cluster's state.
func tokenFacts(facts ...string) []byte {
	var b []byte
	for _, f := range facts {
		b = append(binary.AppendUvarint(b, uint64(len(f))), f...)
	}
	return b
}

// newToken returns the token for a revision and for the given facts.
func (s *Server) newToken(revision uint64, facts []byte) []byte {
	b := make([]byte, 0, len(s.instance)+binary.MaxVarintLen64+len(facts))
	b = append(b, s.instance...)
	b = binary.AppendUvarint(b, revision)
	return append(b, facts...)
}

// readToken returns the revision in a token. It returns 0 if another server made the
// token, or if one of the facts in the token has changed.
func (s *Server) readToken(token, facts []byte) uint64 {
	rest, _ := bytes.CutPrefix(token, s.instance)
	revision, _ := binary.Uvarint(rest)
	if !bytes.Equal(token, s.newToken(revision, facts)) {
		return 0
	}
	return revision
}

// sendDifference sends the operations that change the client's state to the state in the
// snapshot. It does not send the Sync.
func (w *watch) sendDifference(snapshot *cluster.Objects, to *target) {
	d := w.cursor.Until(statesOf(snapshot.Snapshot))
	if !d.Full() {
		if !to.node.Equal(w.target.node) {
			w.sendNode(to.node)
		}
		switch {
		case to.zone != w.target.zone:
			w.sendPhases(slices.Values(w.deltas(d.All(), to)))
		case d.Old.Revision() != d.New.Revision():
			w.sendStep(w.server.published.step(d, w.server.views), to)
		}
		return
	}
	if changes, ok := statesOf(snapshot.Snapshot).Since(w.server.readToken(w.resume, to.facts)); ok {
		w.sendNode(to.node)
		w.sendWholes(changes, to, true)
		return
	}
	w.sender.ops(resetFrame())
	if to.node != nil {
		w.sendNode(to.node)
	}
	if w.tokens {
		w.sendWholes(d.New.All(), to, false)
	} else {
		w.sendPhases(w.additions(d.New, to))
	}
}

func (w *watch) sendNode(node *api.Node) {
	switch {
	case !w.ownNode:
	case node == nil:
		w.sender.ops(deleteFrame(localv1.Set_NodesSet, w.name))
	default:
		w.sender.ops(setFrame(localv1.Set_NodesSet, w.name, localv1.Marshal(localv1.FromNode(node))))
	}
}

// sendWholes sends whole services. If the argument deletions is true, it sends a deletion
// for each service without a view.
func (w *watch) sendWholes(states iter.Seq2[types.NamespacedName, *api.ServiceState], to *target, deletions bool) {
	for key, state := range states {
		if w.sendWhole(key, w.view(state, to), deletions); w.sender.err != nil {
			return
		}
	}
}

// sendWhole sends a view or, if view is nil and deletions is true, a deletion.
func (w *watch) sendWhole(key types.NamespacedName, view *wireView, deletions bool) {
	set := localv1.Set_ServicesSet
	if w.frontends {
		set = localv1.Set_FrontendsSet
	}
	if view != nil {
		w.sender.ops(view.whole(w.who)...)
	} else if deletions {
		w.sender.ops(deleteFrame(set, servicePath(key)))
	}
}

// sendPhases sends the operations of all deltas, phase by phase.
func (w *watch) sendPhases(deltas iter.Seq[*wireDelta]) {
	for phase := range len(wireDelta{}) {
		for d := range deltas {
			if w.sender.ops(d[phase]...); w.sender.err != nil {
				return
			}
		}
	}
}

// additions yields deltas that create all services.
func (w *watch) additions(s *states, to *target) iter.Seq[*wireDelta] {
	return func(yield func(*wireDelta) bool) {
		for _, state := range s.All() {
			if view := w.view(state, to); view != nil && !yield(delta(nil, view, w.who)) {
				return
			}
		}
	}
}

// deltas returns the changes of the node's views.
func (w *watch) deltas(changes iter.Seq[stateChange], to *target) []*wireDelta {
	var list []*wireDelta
	for c := range changes {
		old, new := w.view(c.Old, &w.target), w.view(c.New, to)
		if old != new {
			list = append(list, delta(old, new, w.who))
		}
	}
	return list
}

// view returns the view that the client's node has of a service, before or after a
// change.
func (w *watch) view(state *api.ServiceState, to *target) *wireView {
	return w.server.views.viewFor(w.sender.snapshot.Snapshot, state, w.name, to.zone, w.frontends)
}
