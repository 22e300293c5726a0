// SPDX-License-Identifier: Apache-2.0

// Package conntrack deletes the entries of the kernel's connection tracking that keep
// connections away from the present endpoints of services.
//
// The kernel decides once where a connection goes. A UDP client that sends from one port
// forever, such as a resolver, would stay forever with a removed endpoint, or at a service
// that had no endpoints when the client began. A TCP client that began to connect before
// its service was programmed would send its SYN to the cluster IP itself until it gives
// up. The package ends these connections. The client's next packet begins a new one. All
// other TCP connections, and those of SCTP, are left alone.
//
// A backend makes a [Reconciler] a part of itself: it starts and stops with it,
// and is told the same changes, after these were programmed:
//
//	func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
//		err := b.program(ctx, c)
//		if _, ok := sink.Acknowledged(err); ok {
//			b.connections.Sync(ctx, c)
//		}
//		return err
//	}
//
// Sync only notes what may have become stale, which costs as much as the services
// of c. The table of connections is read apart from it: once for all that
// was noted meanwhile, as a stream of what the kernel cannot sort out itself,
// and not at all where nothing was noted.
package conntrack
