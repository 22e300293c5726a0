// SPDX-License-Identifier: Apache-2.0

// Package healthcheck serves the health-check node ports of services, on which load
// balancers check whether a node has endpoints.
//
// A service of type LoadBalancer with externalTrafficPolicy Local has a
// healthCheckNodePort. On this port every node answers HTTP requests for any path. The
// status is 200 if the node has ready endpoints of the service and its proxy is healthy,
// else 503.
//
// A [Server] is a sink of its own. It runs beside the sink that programs the dataplane:
//
//	addrs, err := nodeaddr.New(nodeaddr.Options{})
//	…
//	proxy.Run(ctx, backend, healthcheck.New(healthcheck.Options{Addrs: addrs}))
package healthcheck
