// SPDX-License-Identifier: Apache-2.0

// Package healthcheck serves the health-check node ports of services. Load balancers use
// these ports to check whether a node has endpoints.
//
// A service of type LoadBalancer with externalTrafficPolicy Local has a
// healthCheckNodePort. On this port every node answers HTTP requests for any path. The
// status is 200 if the node has ready endpoints of the service and the proxy of the node
// is healthy. In all other cases the status is 503.
//
// A [Server] is a separate sink. It runs beside the sink that programs the dataplane:
//
//	addrs, err := nodeaddrs.New(nodeaddrs.Options{})
//	…
//	defer addrs.Start(ctx)()
//	err = kpng.Run(ctx, opts, backend, healthcheck.New(healthcheck.Options{NodeAddresses: addrs}))
package healthcheck
