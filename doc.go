// SPDX-License-Identifier: Apache-2.0

// Package kpng is a library for writing Kubernetes service proxies.
//
// It watches Services, EndpointSlices and Nodes, works out what one node has to
// program, and hands that to a [sink.Sink] as small, ordered change sets. What a
// Service means on a node (traffic policies, topology, terminating endpoints,
// dual stack, conflicting claims) is decided once, by package nodeview. How to
// program it is the sink's business, and the only part left to write.
//
// A whole proxy that runs beside kube-proxy and serves the services labelled
// service.kubernetes.io/service-proxy-name: my-proxy:
//
//	err := kpng.Run(ctx, kpng.Options{
//		Services: watcher.Options{ServiceProxyName: "my-proxy"},
//	}, sink.FullState(func(ctx context.Context, services []*api.ServiceEndpoints) error {
//		return program(services)
//	}))
//
// # Sinks
//
// [sink.FullState] is the simplest one: it gets all services each time. A sink of your
// own gets what changed, with each service's view before and after; New is nil when the
// service is deleted. At the start it gets all services in a pass, and with Last it
// prunes what belongs to none:
//
//	func (m *frontendMap) Sync(_ context.Context, c *sink.Changes) error {
//		m.pass.Begin(c)
//		var failed sink.Failed
//		for s := range c.Services {
//			failed.Do(s.Key, func() error { return m.program(s) })
//		}
//		if c.Last {
//			for k, e := range m.entries {
//				if m.pass.Stale(e.owner) {
//					failed.Do(e.owner, func() error { return m.remove(k, e.owner) })
//				}
//			}
//		}
//		return failed.Err()
//	}
//
// The example "Frontends" of package sink has the rest of it, with what
// [nodeview.Frontends] says of each view. If Sync fails, nothing is lost: what was
// not acknowledged comes again, merged with what changed meanwhile, and marked as
// Unsure. [sink.Events] calls typed methods to set and delete services, frontends
// and endpoints, in an order in which no address is ever claimed twice, whatever
// fails. Package sinktest helps to test all of them.
//
// Several sinks, each with a driver and settings of its own, are given as options:
//
//	p, err := kpng.New(kpng.Options{Sinks: []kpng.Sink{
//		{Sink: tables, Options: sink.Options{Name: "tables", MinInterval: time.Second}},
//		{Sink: checks, Options: sink.Options{Name: "checks"}},
//	}})
//	mux.Handle("GET /healthz", health.Handler(p.Health))
//	err = p.Run(ctx)
//
// # Sources
//
// By default the API server is that of the pod or of the kubeconfig. An embedder
// hands in a rest.Config, or the informers that it runs anyway; a file or
// folder of manifests will do as well. See [Options].
//
// # Guarantees
//
// Sinks are told nothing until services, endpoint slices and nodes have all
// been read once. After that the loss of the API server changes nothing: the
// dataplane keeps its state, and on return is told the difference. What does not
// change this node's view of a service reaches no sink, and what does costs as
// much as that service, however many there are.
package kpng
