// SPDX-License-Identifier: Apache-2.0

// Package userspace is a backend that needs nothing of a kernel but sockets: it
// listens at the addresses and ports of services and copies what arrives to an
// endpoint and back. It runs wherever Go does, and is the backend to reach for
// where there is no nftables and no HNS. Without [Options.Addresses] it needs no
// privilege.
//
//	b, err := userspace.New(userspace.Options{Addresses: userspace.LocalRoutes(userspace.RouteOptions{})})
//	…
//	app.Main(b)
//
// Package backends/program has the same with flags, metrics and health
// checks.
//
// # Where services are reached
//
// A cluster, external or load-balancer IP is an address that the host does not
// have. [Addresses] makes it the host's own; what does that depends on the
// platform, and LocalRoutes does it on Linux. Without one, a service is served
// at those of its addresses that the host has already, and every other is an
// error of its service. Node ports are served at the addresses of
// [Options.NodeAddresses]. An embedder who has sockets from elsewhere, or in
// another network namespace, hands in [Sockets].
//
// # What happens to connections
//
// Endpoints take turns. A TCP connection that one of them does not take within
// a moment is tried at others; a half-closed one stays half open, and a reset
// comes out at the other side as a reset. On Linux the kernel moves the bytes of
// a connection that carries many, and an idle one holds no buffer.
//
// UDP datagrams of one client address and port go to one endpoint, through a
// socket of their own, until neither side has said anything for
// [Options.UDPTimeout] or the endpoint has gone.
//
// Established TCP connections outlive their endpoint's being taken out of
// service, as they do with every service proxy. When their service goes, or the
// backend stops, they have [Options.DrainTimeout] to end.
//
// # What it cannot do
//
// An endpoint sees this host's address as its client, never the client's. There
// is no ICMP but what the kernel sends, no SCTP, and no service that takes all
// ports of an address: what of a service cannot be served is logged as an error,
// and the rest of it served.
//
// What is refused is refused as the API says, with a reset or a port
// unreachable, as nobody listens there then. What is to be dropped is dropped on
// Linux by a filter on the listening socket; elsewhere, a TCP client that is not
// admitted is reset.
package userspace
