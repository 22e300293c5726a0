// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

// Observer is told what a Backend does, for metrics. A field may be nil. They are
// called by one goroutine at a time, and must not call the Backend.
type Observer struct {
	// Transacted is called after each attempt at a transaction, with the error if the
	// kernel refused it.
	Transacted func(error)
	// Holds is told after each Sync how many elements the maps and sets of the table
	// have.
	Holds func(elements int)
	// Drifted is called when a Verify, or a Sync that the kernel refuses, finds that
	// the table is not as it was left. Mended is called after that when the table is as it
	// should be: at the end of a pass that programs everything, or of a Verify that finds
	// nothing. Until then, Drifted is not called again.
	Drifted, Mended func()
}

// complete puts something that does nothing in place of what is nil.
func (o *Observer) complete() {
	if o.Transacted == nil {
		o.Transacted = func(error) {}
	}
	if o.Holds == nil {
		o.Holds = func(int) {}
	}
	if o.Drifted == nil {
		o.Drifted = func() {}
	}
	if o.Mended == nil {
		o.Mended = func() {}
	}
}
