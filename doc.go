// SPDX-License-Identifier: Apache-2.0

// Package kpng is a library for writing Kubernetes service proxies.
//
// It watches Services, EndpointSlices and Nodes. It computes what one node has to
// program, and delivers the result to a [sink.Sink] as small, ordered change sets.
// Package nodeview decides what a Service means on a node. It handles traffic policies,
// topology, terminating endpoints, dual stack and conflicting claims. A sink only
// programs the dataplane. You write only the sink.
//
// This is a complete proxy. It runs beside kube-proxy and serves the services whose label
// service.kubernetes.io/service-proxy-name has the value my-proxy:
//
//	err := kpng.Run(ctx, kpng.Options{
//		Services: watcher.Options{ServiceProxyName: "my-proxy"},
//	}, sink.FullState(func(ctx context.Context, services []*api.View) error {
//		return program(services)
//	}))
//
// # Packages
//
// Package app makes a command of a sink. Package node builds the whole proxy of a Linux node
// around one of the backends. Package reconcile makes a sink of three functions: plan,
// list and apply. Package sink/sinktest tests sinks without packets, and package
// conformance tests them with packets. Package remote connects a sink to a source in another
// process. Packages health, metrics and status show the state of a proxy.
//
// # Sinks
//
// [sink.FullState] returns the simplest sink, which receives all services in each call. A
// sink that implements Sync receives only the changed services, each with its view before
// and after the change. For a deleted service, the view after the change is nil. At the
// start, a pass delivers all services. If Changes.Last is true, the pass ends, and the
// sink prunes the entries of all services that the pass did not deliver:
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
// The example "Frontends" of package sink is a complete sink. It programs the frontends
// that nodeview.Frontends computes from each view. If Sync fails, no change is lost.
// The driver delivers unacknowledged services again, merged with later changes and marked
// as Unsure. [sink.Events] calls typed methods that set and delete services, frontends
// and endpoints. The order of its calls ensures that no two services claim an address at
// the same time, even after failures. Package sinktest helps to test all kinds of sinks.
//
// [Options] may list several sinks. Each sink has its own driver and settings:
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
// By default, kpng uses the API server of the pod's cluster. Outside a pod, it uses the
// API server in the kubeconfig. An embedder can pass a rest.Config or the informers that
// it already runs. A file or folder of manifests also works as a source. See [Options].
//
// # Guarantees
//
// Sinks receive nothing until services, endpoint slices and nodes have all been read
// once. If the API server becomes unreachable after that, the dataplane keeps its state.
// When the API server is back, the sinks receive the differences. Sinks receive only
// changes that affect this node's view of a service. The cost of a change depends on the
// services that it affects, not on the total number of services.
package kpng
