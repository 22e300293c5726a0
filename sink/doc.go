// SPDX-License-Identifier: Apache-2.0

// Package sink brings what one node has to program to what programs it.
//
// You write a [Sink], one method that makes a dataplane agree with some
// [Changes]:
//
//	func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
//		if c.Full {
//			b.forgetAllBut(c.Services) // what is not in it goes
//		}
//		var failed sink.Failed
//		for s := range c.Services {
//			failed.Add(s.Key, b.program(s.Key, s.New)) // nil: the service goes
//		}
//		return failed.Err()
//	}
//
// A [Source] has the services as this node sees them: a feed of a cluster state
// in this process, or a client of a server elsewhere. A [Driver] is between the
// two; [Run] makes one and runs it. Several sinks have a driver and a source
// each.
//
// # What a sink is told
//
// The first Changes is full: everything this node must have, once the source has
// all of it. Sinks prune what else they find, so that a restart leaves nothing
// behind and disturbs nothing that is right. The following ones are what differs
// from what the sink acknowledged, with the old view beside the new one;
// [Change.Endpoints] narrows that down to single endpoints. A full one comes
// again when the source has lost count, or the sink has and says so with
// [ErrStartOver].
//
// While a Sync runs, and in the minimum interval after it, changes pile up in
// the source, coalesced: the next Sync gets each service once, from what was
// acknowledged to what is now, and what cancelled itself out not at all. What a
// Sync costs the driver depends on what changed, not on how many services there
// are.
//
// A full Sync may take long. A sink that can let changes through while it is under
// way asks for them with [Changes.Meanwhile]. That is a preview and acknowledges
// nothing, so that sinks which share a driver need not know of each other: the next
// Sync tells all of it again, as retries.
//
// # When programming fails
//
// A sink says which services failed by returning [*Failed], and the driver tells
// these again, each with its own backoff, together with whatever else there is to
// tell then. A failed service that changes is told at once, as the change may be
// what it needs. Any other error means that nothing was acknowledged, and
// everything comes again after the driver's backoff, merged with what changed
// meanwhile. A panic is such an error; it takes no other sink down.
//
// What was told and not acknowledged may be half programmed. That is why it comes
// again even if it has gone or is as it was before, and why [Change.Retry] marks
// it: a sink that programs the difference of Old and New must then look at what
// there is, or program the whole service.
//
// # More than Sync
//
// A sink may implement [Starter], [Stopper] or [Drainer], [Cleaner] and [Verifier]. If it wants
// the whole state instead of changes, [FullState] makes a sink of a function; if
// it wants single objects, [Events] makes one of a [Handler]. Package sinktest
// drives a sink in tests.
//
// # Concurrency and ownership
//
// A driver calls one method of its sink at a time, from the goroutine of
// [Driver.Run], which waits for it to return: a sink heeds its context and needs
// no locks against its driver. Views, services and endpoints are immutable and may
// be kept; a Changes may not. The other methods of a driver may be called by
// anybody at any time.
package sink
