// SPDX-License-Identifier: Apache-2.0

// Package remote fills a cluster.State from another kpng, which serves the state
// it has (remote.ServerOptions.ServeCluster). So a server is served by a server,
// and the API server is asked once for all of them.
//
// The services are those that the other kpng was told to serve.
package remote

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/clusterv1"
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
// of which state records what is different. With FailFast, Watch returns the first
// error.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	dialer, err := transport.NewDialer(opts.DialOptions)
	if err != nil {
		return err
	}
	f := &follower{state: state}
	return dialer.Stay(ctx, f.follow)
}

// follower follows one server after the other.
type follower struct {
	state *cluster.State
	token []byte // of the last complete answer
}

// follow follows the server at the other end of conn for as long as it goes.
func (f *follower) follow(ctx context.Context, conn *grpc.ClientConn, good func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := clusterv1.NewClusterClient(conn).Watch(ctx)
	if err != nil {
		return err
	}
	req := &clusterv1.WatchRequest{Resume: f.token}
	for {
		if err := stream.Send(req); err != nil {
			_, err = stream.Recv() // which says why
			return err
		}
		var a answer
		for a.token == nil {
			part, err := stream.Recv()
			if err != nil {
				return err
			}
			if err := a.take(part); err != nil {
				f.token = nil
				return err
			}
		}
		f.state.Update(a.write)
		f.state.SetSynced()
		f.token = a.token
		good()
		req = &clusterv1.WatchRequest{}
		if a.reset {
			klog.FromContext(ctx).Info("The server told everything", "services", len(a.services), "slices", len(a.slices), "nodes", len(a.nodes))
		}
	}
}

// answer gathers the parts of an answer.
type answer struct {
	reset    bool
	services []*api.Service
	slices   []*api.EndpointSlice
	nodes    []*api.Node

	deletedServices, deletedSlices []types.NamespacedName
	deletedNodes                   []string

	token []byte // not nil when the answer is complete
}

// take adds a part.
func (a *answer) take(part *clusterv1.WatchResponse) error {
	if part.GetReset_() {
		*a = answer{reset: true}
	}
	for _, m := range part.GetServices() {
		s, err := m.ToService()
		if err != nil {
			return err
		}
		a.services = append(a.services, s)
	}
	for _, m := range part.GetSlices() {
		s, err := m.ToSlice()
		if err != nil {
			return err
		}
		a.slices = append(a.slices, s)
	}
	for _, m := range part.GetNodes() {
		n, err := m.ToNode()
		if err != nil {
			return err
		}
		a.nodes = append(a.nodes, n)
	}
	for _, key := range part.GetDeletedServices() {
		a.deletedServices = append(a.deletedServices, key.ToKey())
	}
	for _, key := range part.GetDeletedSlices() {
		a.deletedSlices = append(a.deletedSlices, key.ToKey())
	}
	a.deletedNodes = append(a.deletedNodes, part.GetDeletedNodes()...)
	if len(part.GetToken()) > 0 {
		a.token = part.GetToken()
	}
	return nil
}

// write makes the state what the answer says.
func (a *answer) write(tx *cluster.Tx) {
	if a.reset {
		tx.ReplaceServices(0, slices.Values(a.services))
		tx.ReplaceSlices(0, slices.Values(a.slices))
		tx.ReplaceNodes(0, slices.Values(a.nodes))
		return
	}
	for _, s := range a.services {
		tx.SetService(0, s)
	}
	for _, s := range a.slices {
		tx.SetSlice(0, s)
	}
	for _, n := range a.nodes {
		tx.SetNode(0, n)
	}
	for _, key := range a.deletedServices {
		tx.DeleteService(0, key)
	}
	for _, key := range a.deletedSlices {
		tx.DeleteSlice(0, key)
	}
	for _, name := range a.deletedNodes {
		tx.DeleteNode(0, name)
	}
}
