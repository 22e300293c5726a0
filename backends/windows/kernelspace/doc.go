// SPDX-License-Identifier: Apache-2.0

// Package kernelspace is a sink for Windows nodes. It programs services as load balancers
// of the Host Networking Service (HNS), which the kernel's virtual switch implements.
//
//	backend, err := kernelspace.New(kernelspace.Options{Network: "l2bridge"})
//	…
//	err = sink.Run(ctx, source, backend, sink.Options{})
//
// The backend works with or without kube-proxy on the same node. It changes no objects of
// other owners, with one exception: if this backend itself serves all frontends of
// another owner's load balancer, it replaces that load balancer.
//
// # Method
//
// The backend plans the load balancers from this node's views of services, without calling
// HNS. Then it compares the planned load balancers by value with the state of HNS. The
// backend lists endpoints and load balancers before the first changes, when it retries a
// service after a failure, and twice a minute while idle (see [sink.Verifier]). It
// processes changes of other services without a listing. The network plug-in owns the
// endpoints of this node's pods. For other addresses, the backend creates endpoints whose
// names begin with Options.Instance. It removes these endpoints when no load balancer uses
// them.
//
// HNS stores neither a name nor an owner of a load balancer. So the backend records the
// IDs of its own load balancers in Options.StateFile.
//
// If a service has the annotation "preserve-destination" with the value "true", packets to
// a load-balancer address keep this destination on the way to local pods. Sources of
// services drop annotations by default: see KeepAnnotations in package watcher.
//
// # Limits of HNS
//
//   - Traffic is neither rejected nor dropped: a frontend without endpoints has no load
//     balancer, and its packets are routed as if there were no service.
//   - Traffic of this node cannot be distinguished from other traffic: with
//     externalTrafficPolicy Local, a pod on a node without endpoints cannot
//     reach the external addresses.
//   - Source ranges: addresses and node ports to which source ranges of the service apply
//     are not served, and the backend logs it.
//   - Traffic parameters: algorithms, weights and resets of connections are not honoured.
//     An endpoint of weight zero gets no new connections.
//   - The timeout of session affinity is fixed by HNS.
//   - SCTP and all-ports services are not served, and the backend logs it.
//   - If endpoints of one service have several numbers for a named target port,
//     only the endpoints with the most common number get traffic. The backend
//     logs the others.
//   - IPv6 on overlay networks is not served, and the backend logs it.
//   - Pods in this node's host network get no traffic, unless HNS has an endpoint for the
//     node's address. The backend logs this.
//
// Some features depend on the version of Windows: direct server return for frontends with
// externalTrafficPolicy Local, IPv6, session affinity, and changing load balancers in
// place. The backend reads the list of features once, and works even if some are missing.
package kernelspace
