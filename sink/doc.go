// SPDX-License-Identifier: Apache-2.0

// Package sink delivers what one node has to program to what programs it.
//
// You write a [Sink], one method that makes a dataplane agree with some
// [Changes]:
//
//	func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
//		b.pass.Begin(c) // a sink.Pass, which knows what is stale at the end of a pass
//		var failed sink.Failed
//		for s := range c.Services {
//			failed.Do(s.Key, func() error { return b.program(s.Key, s.New) }) // nil: delete
//		}
//		if c.Last {
//			for key := range b.services {
//				if b.pass.Stale(key) {
//					failed.Do(key, func() error { return b.program(key, nil) })
//				}
//			}
//		}
//		return failed.Err()
//	}
//
// A [Source] has the services as this node sees them: a feed of a cluster state
// in this process, or a client of a server elsewhere. A [Driver] is between the
// two; [Run] makes one and runs it. Several sinks have a driver and a source
// each.
//
// # Passes and changes
//
// At the start the driver makes a pass, once the source has all services: it delivers
// every service once, in key order, in batches of bounded size (Options.BatchSize).
// Changes.First begins a pass. Changes.Last ends it: then the sink prunes what belongs
// to no service. So a restart leaves nothing stale behind and disturbs nothing that is
// right. A small state is one Changes with First and Last.
//
// After that the sink gets what differs from what it acknowledged, with the old view
// beside the new one; [Change.Endpoints] narrows that down to single endpoints. A new
// pass comes when the source has lost the reader's position, when the sink returns
// [ErrStartOver], and when somebody calls [Driver.StartOver].
//
// Services that change during a pass come before its next batch, those included that
// the pass has not reached. Each batch is acknowledged by itself.
//
// While a Sync runs, and in the minimum interval after it, changes gather in the
// source: the next Sync gets each service once, from what was acknowledged to what is
// now. Changes that cancel each other out do not come at all. What a Sync costs the
// driver depends on what changed, not on how many services there are.
//
// # When programming fails
//
// A sink names the services that failed by returning [*Failed], and the driver delivers
// these again, each with its own backoff. A failed service that changes comes
// immediately, as the change may be what it needs.
//
// Any other error, and a panic, acknowledges nothing. The driver delivers the same
// services once more, and if that fails, half of them, until a service is alone. A
// service that fails alone counts as failing, has its own backoff, and comes alone from
// then on, so that all others get through. If nothing succeeds for some time, the
// backoff grows: the dataplane itself may be at fault.
//
// What was delivered and not acknowledged may be half programmed. That is why it comes
// again even if it was deleted or is as it was before, and why [Change.Unsure] marks
// it. A sink that programs the difference of Old and New then has to look at what there
// is, or to program the whole service.
//
// Two services never have the same claim ([api.Claim]) at the same time, and a change
// of both is never split over two Syncs. After failures one of them may come first. So
// that its delete does not remove what the other one has by then, Old is nil if another
// service was acknowledged for one of its claims.
//
// # More than Sync
//
// A sink may implement [Starter], [Stopper] or [Drainer], [Cleaner] and [Verifier]. If
// it wants the whole state instead of changes, [FullState] makes a sink of a function;
// if it wants single objects, [Events] makes one of a [Handler]. A sink that wraps
// another one embeds a [Forwarder]. Package sinktest drives a sink in tests.
//
// # Health
//
// [Driver.WaitSynced] waits for the first complete pass, which makes a program ready.
// [Status.StuckFor] says whether a sink hangs: each service that the sink reads from its
// Changes counts as progress, so a slow sink does not look stuck.
//
// # Concurrency and ownership
//
// A driver calls one method of its sink at a time, from the goroutine of
// [Driver.Run], which waits for it to return: a sink heeds its context and needs
// no locks against its driver. Views, services and endpoints are immutable and may
// be kept; a Changes may not. The other methods of a driver may be called from any
// goroutine at any time.
package sink
