// SPDX-License-Identifier: Apache-2.0

// Package api is kpng's data model: plain Go structs for the state of services in the
// cluster, and for one node's view of these services.
//
// [Service], [EndpointSlice] and [Node] are objects of the Kubernetes API, reduced to the
// needs of a service proxy. A [ServiceState] is the cluster's whole state of one service.
// [View] is one node's view of a service. The view has the endpoints that the
// node uses, the kinds of traffic for each endpoint, and the ports that reject
// connections. Package nodeview computes the view from a ServiceState.
//
// Published values are immutable. Code that passes a value to a store, a source or a sink
// must not modify it afterwards. Code that receives a value must not modify it or
// anything it points to. Therefore goroutines, snapshots and sinks can share values.
//
// Each type marshals to the JSON that kpng-json prints. The fields have the names and the
// meaning of the node-local wire form (proto package localv1). Fields with a zero value
// are omitted, except Service.IPs.ClusterIPs.
package api
