// SPDX-License-Identifier: Apache-2.0

// Package kube fills a cluster.State from a Kubernetes API server.
//
//	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
//	…
//	err = kube.Watch(ctx, state, kube.Options{Config: config, NodeName: node})
//
// Services and endpoint slices are filtered on the server, so that a proxy for
// some services pays for these only, however large the cluster is. Objects are
// converted as they arrive and go straight into the state: there is no second
// cache, and no object of the API is kept. A program that has informers anyway
// hands them in instead of a Config (see [Informers]).
//
// Readers see nothing before all kinds have been listed once. From then on a
// lost server changes nothing; when it is back, only what was missed is
// written.
//
// # Permissions
//
// The verbs list and watch on services, on endpointslices of API group
// discovery.k8s.io, and on nodes, all of them cluster-wide. Where one is missing
// an [Error] names it.
//
// # Services without a selector
//
// The endpoint-slice controller copies a service's labels to its slices, which
// is what lets the server filter slices by service.kubernetes.io/service-proxy-name.
// Slices of a service without a selector are made by somebody else and may lack
// the label. With a ServiceProxyName each such service therefore has a watch of
// its own for the slices that the common watch leaves out, and a new one shows
// up in the state together with its first list, or after five seconds. Once there
// are more than 32 such services, those that come share one watch, for good. It
// follows what the common watch leaves out in the whole cluster, which costs as
// much as the slices of everybody.
//
// A slice that several watches show counts in its latest version, by resource
// version.
//
// # Label flips
//
// A service whose service-proxy-name label changes is added and deleted like any
// other. Its slices follow when the endpoint-slice controller has relabelled
// them; until then it has no endpoints.
package kube
