// SPDX-License-Identifier: Apache-2.0

// Package healthcheck answers load balancers that ask whether a node has
// endpoints of a service.
//
// A service of type LoadBalancer with externalTrafficPolicy Local has a
// healthCheckNodePort. On it every node answers HTTP requests of any path: with
// 200 where it has ready endpoints of the service itself and its proxy is well,
// else with 503.
//
// A [Server] is a sink of its own. It runs beside the one that programs the
// dataplane, whatever that is:
//
//	addrs, err := nodeaddr.New(nodeaddr.Options{})
//	…
//	proxy.Run(ctx, backend, healthcheck.New(healthcheck.Options{Addrs: addrs}))
package healthcheck
