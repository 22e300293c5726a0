// SPDX-License-Identifier: Apache-2.0

// Package userspace is a backend that needs only sockets from the kernel. It listens at
// the addresses and ports of services. It copies bytes between clients and endpoints. It
// runs on every platform of Go, and is meant for hosts without nftables and HNS. Without
// [Options.Addresses] it needs no privileges.
//
//	b, err := userspace.New(userspace.Options{Addresses: userspace.LocalRoutes(userspace.RouteOptions{})})
//	…
//	app.Main(b)
//
// Package backends/program adds flags, metrics and health checks.
//
// # Addresses of services
//
// Usually the host does not have the cluster, external and load-balancer IPs of services.
// An implementation of [Addresses] makes them local to the host. It depends on the
// platform; LocalRoutes is the implementation for Linux. Without Addresses, the backend
// listens only at addresses that the host already has. A service with another address
// fails, but its other addresses work. Node ports are at the addresses of
// [Options.NodeAddresses]. To use other sockets, for example in another network
// namespace, set [Options.Sockets].
//
// # Connections
//
// Endpoints take turns. If an endpoint does not soon accept a TCP connection, the backend
// tries another one. The backend forwards the end of one direction and resets to the
// other side. On Linux the kernel moves the bytes of busy connections. Idle connections
// use no buffer.
//
// The UDP datagrams of a client address and port go to one endpoint, through a separate
// socket. This ends when both sides have been idle for [Options.UDPTimeout], or when the
// endpoint is removed.
//
// Established TCP connections continue when their endpoint is removed from the service,
// as with other service proxies. When their service is deleted or the backend stops, they
// drain for [Options.DrainTimeout].
//
// # Limits
//
// An endpoint sees the address of this host instead of the client's address. The backend
// sends no ICMP messages of its own. It supports neither SCTP nor all-ports services. It
// logs an error for unsupported frontends and serves the other frontends.
//
// Where the API requires to reject connections, the backend does not listen, so the host
// answers with a reset or port unreachable. Where connections must be dropped, the
// backend uses a socket filter on Linux. On other platforms it resets connections of TCP
// clients that are not admitted.
package userspace
