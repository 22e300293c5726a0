// SPDX-License-Identifier: Apache-2.0

// Package remote fills a cluster.State from another kpng, which serves the state
// it has (remote.ServerOptions.ServeCluster). So a server is served by a server,
// and the API server is asked once for all of them.
//
// The services are those that the other kpng was told to serve.
package remote

import (
	"context"
	"iter"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/clusterv1"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote/transport"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Options say where the other kpng is.
type Options struct {
	transport.DialOptions
}

// Watch fills state, which has synced when the first answer is complete, and
// follows the other kpng until ctx ends; it returns the cause of that. Each answer
// is one commit. Nobody else may write to state.
//
// While the other kpng is away, state keeps what it has. After that only what
// changed comes or, if another one answers or it was away for long, everything,
// of which state records what is different. With FailFast, Watch returns an error
// instead when no address is any good.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	dialer, err := transport.NewDialer(opts.DialOptions)
	if err != nil {
		return err
	}
	f := &follower{state: state}
	return dialer.Stay(ctx, f.follow)
}

// staleAfter is how long the other kpng may be away until the state is stale.
const staleAfter = 3 * time.Minute

// follower follows one server after the other.
type follower struct {
	state *cluster.State
	token []byte    // of the last complete answer
	lost  time.Time // when the last server that answered was lost
}

// follow follows the server at the other end of conn for as long as it goes.
func (f *follower) follow(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answered := false
	defer func() {
		if answered {
			f.lost = time.Now()
		} else if f.token != nil && time.Since(f.lost) >= staleAfter {
			f.state.Update(func(tx *cluster.Tx) { tx.SetStale(true) })
		}
	}()
	stream, err := clusterv1.NewClusterClient(conn).Watch(ctx)
	if err != nil {
		return err
	}
	log := klog.FromContext(ctx)
	req := &clusterv1.WatchRequest{Resume: f.token}
	for {
		if err := stream.Send(req); err != nil {
			_, err = stream.Recv() // which says why
			return err
		}
		a := answer{had: f.state.Snapshot(), log: log}
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
		f.state.Update(a.write)
		f.state.SetSynced()
		f.token, answered = a.token, true
		req = &clusterv1.WatchRequest{}
		if a.reset {
			log.Info("The server sent everything", "services", len(a.services.set), "slices", len(a.slices.set), "nodes", len(a.nodes.set))
		}
	}
}

// answer gathers the parts of an answer. Objects that cannot be read are logged, and stay as
// they are in had.
type answer struct {
	had      *cluster.Snapshot
	log      klog.Logger
	reset    bool
	services objects[types.NamespacedName, api.Service]
	slices   objects[types.NamespacedName, api.EndpointSlice]
	nodes    objects[string, api.Node]
	token    []byte // not nil when the answer is complete
	stale    bool
}

// objects are those of one kind that an answer names.
type objects[K, V any] struct {
	set     []*V
	deleted []K
}

// take adds a part.
func (a *answer) take(part *clusterv1.WatchResponse) {
	if part.GetReset_() {
		*a = answer{had: a.had, log: a.log, reset: true}
	}
	name := func(name string) string { return name }
	add(a, &a.services, part.GetServices(), keyOf, (*localv1.Service).ToService, a.had.Services.Get, part.GetDeletedServices(), (*clusterv1.Key).ToKey)
	add(a, &a.slices, part.GetSlices(), keyOf, (*clusterv1.EndpointSlice).ToSlice, a.had.Slices.Get, part.GetDeletedSlices(), (*clusterv1.Key).ToKey)
	add(a, &a.nodes, part.GetNodes(), (*localv1.Node).GetName, (*localv1.Node).ToNode, a.had.Nodes.Get, part.GetDeletedNodes(), name)
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

// add adds what a part says of one kind.
func add[K, V, M, D any](a *answer, o *objects[K, V], set []M, key func(M) K, object func(M) (*V, error), had func(K) (*V, bool), deleted []D, deletedKey func(D) K) {
	for _, m := range set {
		v, err := object(m)
		if err != nil {
			a.log.Error(err, "Left out an object of the server that cannot be read")
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

// write makes the state what the answer says.
func (a *answer) write(tx *cluster.Tx) {
	a.services.write(a.reset, tx.ReplaceServices, tx.SetService, tx.DeleteService)
	a.slices.write(a.reset, tx.ReplaceSlices, tx.SetSlice, tx.DeleteSlice)
	a.nodes.write(a.reset, tx.ReplaceNodes, tx.SetNode, tx.DeleteNode)
	tx.SetStale(a.stale)
}

// write makes those of one kind what the answer says: all of them, if all is new.
func (o *objects[K, V]) write(all bool, replace func(iter.Seq[*V]), set func(*V), remove func(K)) {
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
