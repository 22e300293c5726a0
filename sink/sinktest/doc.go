// SPDX-License-Identifier: Apache-2.0

// Package sinktest tests sinks without a cluster and without a dataplane.
//
// A [Source] is set by hand and drives a sink as a cluster would. A [Recorder]
// stands between the driver and a sink: it records what the sink is told, keeps
// the state that it acknowledged, makes Syncs fail, panic or block as a script
// says, and checks what drivers promise: order, each service once, and Old as it
// was acknowledged. The test of a sink sets views, waits until they are applied
// and compares dataplanes; to see how the sink takes failures, it scripts some.
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
// What sinks get wrong most easily is a failure while an address goes from one
// service to another: told again, the first one must not take it from the second.
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
