// SPDX-License-Identifier: Apache-2.0

// Package sinktest tests sinks without a cluster and without a dataplane.
//
// A test sets the views of a [Source]. A [Recorder] between the driver and the sink
// records each Sync and keeps the acknowledged state. A script can make Syncs fail, panic
// or block. The recorder also checks what drivers guarantee about passes, the order of
// services, Old, Unsure and Failing. The test of a sink sets views, waits until they are
// applied, and compares dataplanes. To test failures, it adds them to the script:
//
//	src := sinktest.NewSource()
//	src.Set(view)
//	src.MarkSynced()
//	rec := sinktest.NewRecorder(t, mySink)
//	rec.Script(sinktest.Fail(errors.New("dataplane is locked")))
//	d := sink.NewDriver(src, rec, sink.Options{})
//	go d.Run(ctx)
//	err := d.WaitApplied(ctx, src.Revision())
//
// The most common bug of sinks is this: a service fails while its address moves to
// another service, and its retry removes the address from the new owner. Here web gives
// its address to dns and fails:
//
//	rec.Script(sinktest.FailServices(errors.New("no memory in map"), web))
//	src.Set(webElsewhere, dnsAtTheAddressOfWeb)
//	err := d.WaitApplied(ctx, src.Revision())
//
// Nothing in this package sleeps. In a bubble of testing/synctest, the driver's intervals
// and backoffs take no time either. All types are safe for concurrent use.
package sinktest
