// SPDX-License-Identifier: Apache-2.0

// Package sinktest helps to test sinks without a cluster and without a dataplane.
//
// A test sets the views of a [Source]. A [Recorder] between the driver and the sink
// records each Sync and the acknowledged state. It also checks the driver's guarantees
// about passes, the order of services, and the fields Old, Unsure and Failing. A test
// sets views, waits until they are applied, and examines the dataplane:
//
//	node := sinktest.Node("node-1", "192.168.0.1")
//	web := sinktest.Service("web", "10.96.0.1 80>8080")
//	src := sinktest.NewSource()
//	src.Set(sinktest.View(node, web, "10.1.0.1@node-1 10.1.0.2@node-2"))
//	src.MarkSynced()
//	rec := sinktest.NewRecorder(t, mySink)
//	d := sink.NewDriver(src, rec, sink.Options{})
//	go d.Run(ctx)
//	err := d.WaitApplied(ctx, src.Revision())
//
// The most common bug of sinks is the following. A service fails while its address
// moves to another service, and the retry of the first service removes the address from
// its new owner. [TestHistories] finds this bug, and other bugs after failures and
// restarts. A test of a single failure wraps the sink. This wrapper reports once that a
// service failed:
//
//	var once sync.Once
//	flaky := sink.Func(func(ctx context.Context, c *sink.Changes) error {
//		err := mySink.Sync(ctx, c)
//		once.Do(func() { err = (&sink.Failed{web.Key(): errors.New("no memory in map")}).Err() })
//		return err
//	})
//
// Nothing in this package sleeps. The driver waits for intervals and backoffs, which take
// no time in a bubble of testing/synctest. All types are safe for concurrent use.
package sinktest
