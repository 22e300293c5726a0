// SPDX-License-Identifier: Apache-2.0

// Package sinktest tests sinks without a cluster and without a dataplane.
//
// A test sets the views of a [Source]. A [Recorder] stands between the driver and a sink:
// it records each Sync, keeps the state that the sink acknowledged, makes Syncs fail,
// panic or block as a script says, and checks what drivers promise: passes, order, each
// service once, Old as it was acknowledged, Unsure and Failing. The test of a sink sets
// views, waits until they are applied and compares dataplanes. To see how the sink
// handles failures, it scripts some.
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
// Sinks most easily go wrong when a service fails that gives an address to another one:
// its retry must not remove the address from the other one.
// Here web gives its address to dns, and fails:
//
//	rec.Script(sinktest.FailServices(errors.New("no memory in map"), web))
//	src.Set(webElsewhere, dnsAtTheAddressOfWeb)
//	err := d.WaitApplied(ctx, src.Revision())
//
// Nothing here sleeps; run in a bubble of testing/synctest, the driver's
// intervals and backoffs take no time either. All types are safe for concurrent
// use.
package sinktest
