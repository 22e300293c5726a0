// SPDX-License-Identifier: Apache-2.0

// Package gateway fills a cluster.State with Gateways of the Gateway API, so that backends
// serve them like Services. The TCPRoutes and UDPRoutes of a Gateway divide its connections
// among Services by weight.
//
//	err := gateway.Watch(ctx, state, gateway.Options{Config: config, NodeName: node, Controller: "example.com/gateway"})
//
// Each Gateway has a Service without a selector, with the name of the Gateway, a hyphen
// and the name of its GatewayClass. The API server gives this Service its cluster IPs,
// and the cluster's DNS gives it a name. Its label
// service.kubernetes.io/service-proxy-name makes kube-proxy ignore it. In the state,
// the Gateway has the cluster IPs of this Service, and the endpoints of the backends of
// its routes. A state is for one node, because connections to backends without endpoints go to
// an address of this node. The node refuses them (see [weights.Divide]).
//
// The Gateway API must have version 1.6 or later, with TCPRoute and UDPRoute in v1.
//
// # Permissions
//
// Watch needs the verbs list and watch, cluster-wide, on gatewayclasses, gateways,
// tcproutes, udproutes and referencegrants of API group gateway.networking.k8s.io, on
// namespaces, and on the resources that kube.Watch needs. With WriteStatus, it also
// needs the verbs get and create on services, and patch on the subresource status of
// gatewayclasses, gateways, tcproutes and udproutes.
package gateway

import (
	"context"
	"errors"
	"iter"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/kpng-project/kpng/watcher/objects"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// proxyName is the value of the label by which kube-proxy ignores the Services of Gateways.
const proxyName = "gateway"

// Options configures Watch. Config, NodeName and Controller are required.
type Options struct {
	// Config configures connections to the API server. Watch uses a copy without a client-side
	// rate limit.
	Config *rest.Config
	// NodeName is the name of the Node whose proxy reads the state.
	NodeName string
	// Controller selects the GatewayClasses with this controllerName.
	Controller string
	// WriteStatus makes Watch create the Services of Gateways, and write the status of
	// GatewayClasses, Gateways and routes. Set it in exactly one process of the cluster.
	WriteStatus bool
}

// source reads gateways and their routes, and writes a service for each gateway.
type source struct {
	Options
	client   dynamic.Interface
	objects  *objects.Store[object]
	backends *cluster.State // the Services to which routes lead
	own      *cluster.State // the Services of gateways
	out      *cluster.State
}

// Watch keeps state equal to the Gateways with a class of the controller until ctx ends. It
// then returns nil. It calls state.SetSynced when it has read all objects. Requests that fail
// are logged and repeated. Watch returns an error only if options are invalid.
//
// A state may be passed to Watch only once, and must have no other writer.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	if opts.Config == nil || opts.NodeName == "" || opts.Controller == "" {
		return errors.New("gateway: Config, NodeName and Controller are required")
	}
	s := &source{Options: opts, backends: cluster.New(cluster.Options{}), own: cluster.New(cluster.Options{}), out: state}
	s.Config = rest.CopyConfig(opts.Config)
	s.Config.QPS = -1 // the API server has limits of its own
	var err error
	if s.client, err = dynamic.NewForConfig(s.Config); err != nil {
		return err
	}
	s.objects = objects.New(s.client, resources, references)
	backends := kube.Options{Config: s.Config, NodeName: s.NodeName}
	own := backends
	own.ServiceProxyName = proxyName
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return kube.Watch(ctx, s.backends, backends) })
	group.Go(func() error { return kube.Watch(ctx, s.own, own) })
	for _, state := range []*cluster.State{s.backends, s.own} {
		select {
		case <-state.Changed(0):
		case <-ctx.Done():
			return group.Wait()
		}
		group.Go(func() error { s.follow(ctx, state); return nil })
	}
	group.Go(func() error { s.objects.Run(ctx, s.process, state.SetSynced); return nil })
	return group.Wait()
}

// follow processes the gateways that depend on changed services, or on the changed Node.
func (s *source) follow(ctx context.Context, state *cluster.State) {
	var node *api.Node
	state.Follow(ctx, func(snapshot *cluster.Snapshot, changes iter.Seq[cluster.Change]) {
		if now, _ := snapshot.Nodes.Get(s.NodeName); state == s.backends {
			s.out.Update(func(tx *cluster.Tx) {
				tx.SetStale(snapshot.Stale)
				if now == nil {
					tx.DeleteNode(s.NodeName)
				} else {
					tx.SetNode(now)
				}
			})
			if now != node {
				s.objects.Changed(thisNode)
			}
			node = now
		}
		for change := range changes {
			s.objects.Changed(objects.Key{Kind: "Service", NamespacedName: change.Key})
		}
	})
}
