// SPDX-License-Identifier: Apache-2.0

// Package userspace is a backend that needs only sockets from the kernel. It listens at the
// addresses and ports of services and copies bytes to an endpoint and back. It runs wherever
// Go does, and is for hosts without nftables and HNS. Without [Options.Addresses] it needs no
// privilege.
//
//	b, err := userspace.New(userspace.Options{Addresses: userspace.LocalRoutes(userspace.RouteOptions{})})
//	…
//	app.Main(b)
//
// Package backends/program adds flags, metrics and health checks.
//
// # Addresses of services
//
// A cluster, external or load-balancer IP is an address that the host does not have.
// [Addresses] makes it local to the host. The implementation depends on the platform;
// LocalRoutes is the one for Linux. Without Addresses, the backend serves a service at those
// of its addresses that the host already has. Every other address is an error of its service.
// Node ports are served at the addresses of [Options.NodeAddresses]. An embedder with other
// sockets, or with sockets in another network namespace, passes [Sockets].
//
// # Connections
//
// Endpoints take turns. If an endpoint does not accept a TCP connection within a moment, the
// backend tries others. A half-closed connection stays half closed, and a reset arrives as a
// reset at the other side. On Linux the kernel moves the bytes of a connection that carries
// many, and an idle connection uses no buffer.
//
// UDP datagrams of one client address and port go to one endpoint, through a socket of their
// own, until both sides are idle for [Options.UDPTimeout] or the endpoint is removed.
//
// Established TCP connections survive the removal of their endpoint from the service, as with
// every service proxy. When their service is deleted or the backend stops, they drain for
// [Options.DrainTimeout].
//
// # Limits
//
// An endpoint sees this host's address as its client, never the client's. The backend sends
// no ICMP messages of its own. It supports neither SCTP nor services that take all ports of
// an address. It logs an error for unsupported frontends and serves the others.
//
// The backend rejects as the API requires, with a reset or port unreachable, because it does
// not listen at such an address. To drop, it uses a filter on the listening socket on Linux.
// On other platforms it resets a TCP client that is not admitted.
package userspace
