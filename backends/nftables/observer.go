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
	// the table is not as it was left; Mended at the end of the first pass after that
	// which programs everything. Until then, Drifted is not called again.
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

// observe tells how much the table has, if that is known.
func (b *Backend) observe() {
	if b.state != nil {
		b.opts.Observer.Holds(b.state.elements())
	}
}

// drift notes that the table is not as it was left.
func (b *Backend) drift() {
	if !b.drifted {
		b.drifted = true
		b.opts.Observer.Drifted()
	}
}

// mended notes that a Sync has succeeded.
func (b *Backend) mended() {
	if b.drifted {
		b.drifted = false
		b.opts.Observer.Mended()
	}
}
