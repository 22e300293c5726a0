// SPDX-License-Identifier: Apache-2.0

// Package conntrack deletes the kernel's connection-tracking entries that keep clients
// away from the present endpoints of services.
//
// The kernel chooses the endpoint of a connection once, with its first packet. A UDP
// client may use one source port forever, as some DNS resolvers do. Its packets then go
// forever to an endpoint that was removed, or bypass a service that had no endpoint when
// the client started. A TCP client that started to connect before its service was
// programmed sends its SYN to the cluster IP itself until it gives up. The package
// deletes the entries of these connections, so the client's next packet starts a new
// connection. It keeps all other TCP entries and all SCTP entries.
//
// A backend embeds a [Reconciler]: it starts and stops the Reconciler with itself, and
// passes on each Changes after it has programmed them:
//
//	func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
//		err := b.program(ctx, c)
//		if _, ok := sink.Acknowledged(err); ok {
//			b.connections.Sync(ctx, c)
//		}
//		return err
//	}
//
// Sync only records which flows may be stale. Its cost grows with the services in c. A
// goroutine reads the connection-tracking table, once for everything that was recorded
// since the last time, and not at all if nothing was recorded. It reads the table as a
// stream, after the kernel has filtered it as far as it can.
package conntrack
