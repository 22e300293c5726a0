// SPDX-License-Identifier: Apache-2.0

// Package sink delivers a node's services to the code that programs the node's dataplane.
//
// You write a [Sink]. It has one method, Sync, which applies [Changes] to a dataplane:
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
// A [Source] provides the services as this node sees them. It is a feed in this process,
// or a client of a remote server. A [Driver] connects a source to a sink. [Run] creates a
// driver and runs it. Each sink needs its own driver and its own source.
//
// # Passes and changes
//
// When the source has all services, the driver makes its first pass. A pass delivers
// every service once, in key order, in batches of bounded size (Options.BatchSize). Each
// batch is a value of type Changes. First is set in the first batch, and Last in the last
// batch. A single batch has both. At the end of a pass, the sink prunes everything that
// belongs to no service. So a restart removes stale state and keeps correct state.
//
// After the pass, the sink receives only services that have changed since it acknowledged
// them. It receives the old and the new view of each service; [Change.Endpoints] yields
// the changed endpoints. The driver makes a new pass when the source has lost the
// driver's position, when the sink returns [ErrStartOver], and after [Driver.StartOver].
//
// If services change during a pass, the driver delivers them before the next batch, even
// if the pass has not reached them. The sink acknowledges each batch separately. If the
// source loses the driver's position during a pass, or StartOver is called, the pass
// continues from its present key, and another pass follows. So every pass ends, however
// fast services change.
//
// During a Sync, and in the minimum interval after it, the source merges changes. The
// next Sync delivers each changed service once, with the acknowledged view and the
// present view. If later changes undo earlier changes, nothing is delivered. The driver's
// time for a Sync depends on the number of changes, not on the number of services.
//
// # When programming fails
//
// If some services fail, Sync returns a [*Failed], which names them. The driver retries
// each of these services with its own backoff: after 100 ms, then after twice the last
// wait, up to 30 s. A random time of at most a tenth of the wait is added to each wait.
// When a failed service changes, the driver delivers it immediately, because the change
// may remove the cause.
//
// If Sync returns another error or panics, nothing is acknowledged. The driver delivers
// the same services once more. If that Sync fails too, the driver halves the batch
// again and again, until only one service is left. If a Sync of one service fails, the
// driver isolates this service. From then on, it delivers the service alone and with
// its own backoff, so that other services are not delayed. If all Syncs fail for some
// time, the dataplane itself may be the cause. Then the driver also waits longer and
// longer between Syncs.
//
// A service that was not acknowledged may be half programmed. So the driver delivers it
// again and sets [Change.Unsure], even if the service was deleted or has its old view
// again. For such a service, the difference between Old and New is not enough: the sink
// has to read its dataplane or program the whole service.
//
// In the source, two services never have the same claim ([api.Claim]) at the same time.
// If one update moves a claim between services, the driver delivers both services in one
// Sync. During a pass and after failures, they may be in two Syncs, in either order.
// After the sink has acknowledged the new owner, the driver delivers the previous owner
// with a nil Old. Otherwise the sink could use Old to remove the claim of the new owner.
//
// If the sink refuses the Node object, it receives the services with the Node that it
// acknowledged last. So a Node does not delay services.
//
// # More than Sync
//
// A sink may also implement [Starter], [Stopper], [Verifier] and [Cleaner]. [FullState]
// turns a function that receives the whole state into a sink. [Events] turns a [Handler]
// of single objects into a sink. A sink that wraps another sink has a method Unwrap, see
// [As]. Package sinktest helps to test sinks.
//
// # Health
//
// A program is ready when the first pass is complete. [Driver.WaitSynced] waits for this.
// [Status.StuckFor] reports whether a sink hangs. A slow sink does not look stuck,
// because each service that it reads from Changes counts as progress. The log names each
// method of a sink that makes no progress for about eight seconds.
//
// # Concurrency and ownership
//
// A driver calls one method of its sink at a time, from the goroutine of [Driver.Run]. So
// the sink needs no lock for these calls. Its methods must return when their context
// ends. A sink may keep views, services and endpoints, which are immutable. It must not
// keep the [Changes]. All methods of a driver except Run are safe for concurrent use.
package sink
