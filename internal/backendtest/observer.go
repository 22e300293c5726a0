// SPDX-License-Identifier: Apache-2.0

//go:build linux

package backendtest

// Observer is a backends.Observer that calls functions. A field may be nil.
type Observer struct {
	OnWrote               func(size int, err error)
	OnHolds               func(kind string, n int)
	OnDrifted, OnRepaired func()
}

// Wrote calls OnWrote.
func (o *Observer) Wrote(size int, err error) {
	if o.OnWrote != nil {
		o.OnWrote(size, err)
	}
}

// Holds calls OnHolds.
func (o *Observer) Holds(kind string, n int) {
	if o.OnHolds != nil {
		o.OnHolds(kind, n)
	}
}

// Drifted calls OnDrifted or, if now is false, OnRepaired.
func (o *Observer) Drifted(now bool) {
	f := o.OnRepaired
	if now {
		f = o.OnDrifted
	}
	if f != nil {
		f()
	}
}
