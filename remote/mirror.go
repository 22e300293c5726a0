// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"iter"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Watch keeps state equal to the state of another kpng server until ctx ends. Then it
// returns context.Cause(ctx). The server needs the option ServeCluster. The state contains
// the services that the server's own source selects. In a chain of servers, only the first
// server connects to the API server.
//
// The state is synced when the first answer is complete. Each answer is one commit. The
// state must have no other writer.
//
// While the other server is down, state keeps its content. When the server is back, Watch
// receives only changes. If a different server answers, or the outage was long, Watch
// receives the whole state and commits the differences. With FailFast, Watch returns an
// error if it cannot connect to any address.
func Watch(ctx context.Context, state *cluster.State, opts DialOptions) error {
	dialer, err := opts.dialer()
	if err != nil {
		return err
	}
	m := &mirror{state: state}
	return dialer.Stay(ctx, m.follow)
}

// mirror copies the state of servers, one server at a time.
type mirror struct {
	state *cluster.State
	token []byte    // token of the last complete answer
	lost  time.Time // when the connection was lost; only connections that delivered an answer count
}

// follow copies the state of the server at the other end of conn until the connection
// fails.
func (m *mirror) follow(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		if ctx.Err() == nil {
			m.state.SetSourceError(err)
		}
	}()
	answered := false
	defer func() {
		if answered {
			m.lost = time.Now()
		} else if m.token != nil && time.Since(m.lost) >= staleAfter {
			m.state.Update(func(tx *cluster.Tx) { tx.SetStale(true) })
		}
	}()
	stream, err := clusterv1.NewClusterClient(conn).Watch(ctx)
	if err != nil {
		return err
	}
	log := klog.FromContext(ctx)
	req := &clusterv1.WatchRequest{Resume: m.token}
	for {
		if err := stream.Send(req); err != nil {
			_, err = stream.Recv() // the error of Send has no details; Recv returns the server's error
			return err
		}
		a := clusterAnswer{had: m.state.Objects(), log: log}
		for a.token == nil {
			part, err := stream.Recv()
			if err != nil {
				return err
			}
			a.take(part)
			if err := heard(a.token != nil, a.stale); err != nil {
				return err
			}
		}
		m.state.SetSourceError(nil)
		m.state.Update(a.write)
		m.state.SetSynced()
		m.token, answered = a.token, true
		req = &clusterv1.WatchRequest{}
		if a.reset {
			log.Info("Received full state from server", "services", len(a.services.set), "slices", len(a.slices.set), "nodes", len(a.nodes.set))
		}
	}
}

// clusterAnswer collects the parts of an answer with the state of the cluster. If an
// object is unreadable, clusterAnswer logs an error and uses the object's previous
// version from the field had.
type clusterAnswer struct {
	had      *cluster.Objects
	log      klog.Logger
	reset    bool
	services objectsOf[types.NamespacedName, api.Service]
	slices   objectsOf[types.NamespacedName, api.EndpointSlice]
	nodes    objectsOf[string, api.Node]
	token    []byte // nil until the answer is complete
	stale    bool
}

// objectsOf contains the objects of one kind in an answer.
type objectsOf[K, V any] struct {
	set     []*V
	deleted []K
}

func (a *clusterAnswer) take(part *clusterv1.WatchResponse) {
	if part.GetReset_() {
		*a = clusterAnswer{had: a.had, log: a.log, reset: true}
	}
	name := func(name string) string { return name }
	addObjects(a, &a.services, part.GetServices(), keyOf, (*localv1.Service).ToService, a.had.Services.Get, part.GetDeletedServices(), (*clusterv1.Key).ToKey)
	addObjects(a, &a.slices, part.GetSlices(), keyOf, (*clusterv1.EndpointSlice).ToSlice, a.had.Slices.Get, part.GetDeletedSlices(), (*clusterv1.Key).ToKey)
	addObjects(a, &a.nodes, part.GetNodes(), (*localv1.Node).GetName, (*localv1.Node).ToNode, a.had.Nodes.Get, part.GetDeletedNodes(), name)
	if len(part.GetToken()) > 0 {
		a.token, a.stale = part.GetToken(), part.GetStale()
	}
}

func keyOf[M interface {
	GetNamespace() string
	GetName() string
}](m M) types.NamespacedName {
	return types.NamespacedName{Namespace: m.GetNamespace(), Name: m.GetName()}
}

// addObjects adds the objects of one kind from a part of the answer.
func addObjects[K, V, M, D any](a *clusterAnswer, o *objectsOf[K, V], set []M, key func(M) K, object func(M) (*V, error), had func(K) (*V, bool), deleted []D, deletedKey func(D) K) {
	for _, m := range set {
		v, err := object(m)
		if err != nil {
			a.log.Error(err, "Ignored an unreadable object from the server")
			v, _ = had(key(m))
		}
		if v != nil {
			o.set = append(o.set, v)
		}
	}
	for _, d := range deleted {
		o.deleted = append(o.deleted, deletedKey(d))
	}
}

// write applies the answer to the state.
func (a *clusterAnswer) write(tx *cluster.Tx) {
	a.services.write(a.reset, tx.ReplaceServices, tx.SetService, tx.DeleteService)
	a.slices.write(a.reset, tx.ReplaceSlices, tx.SetSlice, tx.DeleteSlice)
	a.nodes.write(a.reset, tx.ReplaceNodes, tx.SetNode, tx.DeleteNode)
	tx.SetStale(a.stale)
}

// write applies objects of one kind. If all is true, they replace all existing objects.
func (o *objectsOf[K, V]) write(all bool, replace func(iter.Seq[*V]), set func(*V), remove func(K)) {
	if all {
		replace(slices.Values(o.set))
		return
	}
	for _, v := range o.set {
		set(v)
	}
	for _, key := range o.deleted {
		remove(key)
	}
}
