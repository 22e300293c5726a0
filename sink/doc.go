// SPDX-License-Identifier: Apache-2.0

// Package sink delivers the services of one node to the code that programs its dataplane.
//
// You write a [Sink]. Its one method makes a dataplane agree with some [Changes]:
//
//	func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
//		b.pass.Begin(c) // a sink.Pass, which finds stale records at the end of a pass
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
// A [Source] provides the services as this node sees them. It is a feed of a cluster state
// in this process, or a client of a remote server. A [Driver] connects a source to a sink;
// [Run] creates one and runs it. Each of several sinks has its own driver and source.
//
// # Passes and changes
//
// When the source has all services, the driver makes its first pass. It delivers every
// service once, in key order, in batches of bounded size (Options.BatchSize).
// Changes.First begins a pass and Changes.Last ends it. At the end the sink prunes
// everything that belongs to no service. So a restart removes stale state and leaves
// correct state alone. If all services fit into one batch, the pass is a single Changes
// with both First and Last.
//
// After the pass, the sink receives the services that differ from what it acknowledged, each
// with its old and its new view; [Change.Endpoints] yields the changed endpoints. The driver
// makes a new pass when the source has lost the reader's position, when the sink returns
// [ErrStartOver], and after a call of [Driver.StartOver].
//
// Services that change during a pass are delivered before its next batch, even if the pass
// has not reached them. Each batch is acknowledged separately.
//
// During a Sync, and in the minimum interval after it, the source merges changes. The next
// Sync delivers each service once, from the acknowledged view to the current one. Changes
// that cancel each other out are not delivered. The driver's cost of a Sync depends on the
// number of changes, not on the number of services.
//
// # When programming fails
//
// A sink returns a [*Failed] to name the services that failed. The driver retries each of
// them with its own backoff. When a failed service changes, the driver delivers it
// immediately, because the change may remove the cause.
//
// Any other error, and a panic, acknowledges nothing. The driver delivers the same
// services once more. If that fails too, it delivers ever smaller halves, until a batch
// has only one service. A service that fails alone is isolated: it has its own backoff
// and is delivered alone from then on, so that it does not hold up the others. If nothing
// succeeds for some time, the backoff grows, because the dataplane itself may be at
// fault.
//
// A service without an acknowledgement may be half programmed. So the driver delivers it
// again and sets [Change.Unsure], even if the service was deleted or has its old view
// again. For an unsure service, the difference between Old and New is not enough: the
// sink has to read its dataplane or program the whole service.
//
// Two services never have the same claim ([api.Claim]) at the same time. If one update
// moves a claim between services, the driver delivers both in one Sync. Only after
// failures may it deliver one of them first. Once the sink has acknowledged a claim for
// its new owner, Old of the previous owner is nil. So a delete of the previous owner does
// not remove the claim from the new one.
//
// # More than Sync
//
// A sink may implement [Starter], [Stopper] or [Drainer], [Cleaner], and [Verifier] or [Poller].
// [FullState] makes a sink of a function that receives the whole state instead of changes.
// [Events] makes a sink of a [Handler] that receives single objects. A sink that wraps
// another one embeds a [Forwarder]. Package sinktest drives a sink in tests.
//
// # Health
//
// [Driver.WaitSynced] waits for the first complete pass; then a program is ready.
// [Status.StuckFor] reports whether a sink hangs. Each service that the sink reads from its
// Changes counts as progress, so a slow sink does not look stuck.
//
// # Concurrency and ownership
//
// A driver calls one method of its sink at a time, from the goroutine of [Driver.Run],
// and waits until it returns. So a sink must return when its context ends, and needs no
// locks against its driver. Views, services and endpoints are immutable and may be kept;
// a Changes may not. The other methods of a driver are safe for concurrent use.
package sink
