// SPDX-License-Identifier: Apache-2.0

// Package conntrack ends the UDP connections that the kernel's connection
// tracking keeps on a way that services no longer have.
//
// The kernel decides once where a flow goes. A UDP client that sends from one
// port for ever, such as a resolver, would stay for ever with an endpoint that
// has gone, or at a service that had no endpoints when it began. TCP and SCTP
// connections find out themselves and are left alone.
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
