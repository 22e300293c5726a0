// SPDX-License-Identifier: Apache-2.0

// Package api is kpng's model: plain Go structs for what a cluster says about
// its services, and for what one node has to do about them.
//
// There are two halves. [Service], [EndpointSlice] and [Node] are what sources
// read from the Kubernetes API, reduced to what a service proxy needs; a
// [ServiceState] is everything the cluster says about one service.
// [ServiceEndpoints] is one node's view of a service: the service, the
// endpoints this node balances to, each with the lists it is on, and what a
// backend has to know where a list is empty. Package nodeview turns the one
// into the other.
//
// Values are immutable once they are published: whoever hands one to a store,
// a source or a sink gives it away, and whoever receives one must not change
// it, nor anything it points to. That is why they may be shared between
// goroutines, snapshots and sinks without copying.
//
// Each type marshals to the JSON that kpng-json prints. Names and meaning of
// the fields follow the node-local wire form (proto package localv1); fields
// with a zero value are left out, except Service.IPs.ClusterIPs, which is
// always there.
package api
