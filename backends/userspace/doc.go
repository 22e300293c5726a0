// SPDX-License-Identifier: Apache-2.0

// Package userspace is a dataplane that needs only sockets from the kernel. It listens at
// the addresses and ports of services, and copies bytes between clients and endpoints. It
// is meant for hosts without nftables and without HNS.
//
//	b, err := userspace.New(userspace.Options{AddAddresses: true})
//	…
//	app.Main(b)
//
// With [Options.OnlyNodePorts], the backend serves node ports at loopback addresses beside
// any other dataplane. The kernel does not forward packets to loopback addresses, but a
// socket can listen there:
//
//	localhost, err := nodeaddr.Watch(ctx, nodeaddr.Options{Selection: nodeaddr.Selection{"localhost"}})
//	…
//	b, err := userspace.New(userspace.Options{OnlyNodePorts: true, Options: backends.Options{NodeAddresses: localhost}})
//
// Package node does this if its node addresses have loopback addresses.
//
// Package app/program adds flags, metrics and health checks to a dataplane.
//
// # Addresses of services
//
// Usually a host does not have the cluster, external and load-balancer IPs of services.
// [Options.AddAddresses] makes them local to the host, on Linux and Windows. Without it,
// the backend needs no privileges, and listens only at addresses that the host already has.
// If the host lacks an address of a service, Sync reports an error for that service, but
// the service works at its other addresses.
//
// On Windows, the backend adds each address with the prefix length 32 or 128 to a network
// interface. Before that, it records the address in a file, so that the next process can
// use or remove the address after a crash.
//
// # Connections
//
// New connections use the endpoints of a service in turn. If an endpoint does not accept
// a TCP connection soon, the backend tries another endpoint. The backend forwards resets,
// and the end of each direction, between the client and the endpoint. On Linux, the
// kernel moves the bytes of busy connections. Idle connections use no buffer.
//
// All UDP datagrams from one address and port of a client go to one endpoint. The backend
// opens a separate socket for them. The backend closes that socket when both sides have
// been idle for [Options.UDPTimeout], or when the endpoint is removed.
//
// If an endpoint is removed from a service, its established TCP connections continue, as
// with other service proxies. If the service is deleted or the backend stops, connections
// may continue for [Options.DrainTimeout].
//
// # Limits
//
// An endpoint sees an address of this host instead of the client's address. The backend
// sends no ICMP messages of its own. It supports neither SCTP nor all-ports services: it
// logs an error for such frontends, and handles all other frontends.
//
// If all connections to a frontend must be rejected, the backend does not listen there.
// So the host answers with a TCP reset or with ICMP port unreachable. If connections must
// be dropped, the backend uses a socket filter on Linux. On other platforms, it resets
// TCP connections from clients that are not admitted.
package userspace
