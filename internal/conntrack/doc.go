// SPDX-License-Identifier: Apache-2.0

// Package conntrack deletes the kernel's connection-tracking entries of stale
// connections. Because of such an entry, a client's packets do not reach the present
// endpoints of a service.
//
// The kernel chooses the endpoint of a connection once, for the first packet. Some UDP
// clients, such as DNS resolvers, always use the same source port. When the endpoint of
// such a client is removed, the kernel still sends the client's packets to the removed
// endpoint. If the service had no endpoint when the client started, the kernel does not
// send the packets to endpoints that are added later. A TCP client may start to connect
// before its service is programmed. The kernel then sends all SYN packets of the
// connection to the cluster IP itself. The package deletes the entries of such UDP and
// TCP connections, so that the next packet starts a new connection. It keeps all other
// TCP entries and all SCTP entries.
//
// A backend embeds a [Reconciler]. When the backend starts or stops, it also starts or
// stops the Reconciler. After the backend has programmed changes, it passes them to the
// Reconciler:
//
//	func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
//		err := b.program(ctx, c)
//		if _, ok := sink.Acknowledged(err); ok {
//			b.connections.Sync(ctx, c)
//		}
//		return err
//	}
//
// Sync only records which flows may be stale. For a service whose endpoints changed, its
// cost grows with ports × endpoints, but not with the number of addresses. If any flow
// may be stale, a goroutine reads the connection-tracking table once for all such flows.
// It processes the table as a stream. The kernel filters the entries as far as it can.
package conntrack
