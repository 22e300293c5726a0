// SPDX-License-Identifier: Apache-2.0

package userspace

import "sync"

// descriptors are the file descriptors that this process may use. It is safe for
// concurrent use.
type descriptors struct {
	mu   sync.Mutex
	free int
	// returned is signalled when some were returned, and by wake.
	returned sync.Cond
}

func newDescriptors(max int) *descriptors {
	d := &descriptors{free: max}
	d.returned.L = &d.mu
	return d
}

// use takes n descriptors for what the process cannot do without, or returns -n.
func (d *descriptors) use(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free -= n
	if n < 0 {
		d.returned.Broadcast()
	}
}

// wake lets those who wait look at what ends their wait.
func (d *descriptors) wake() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.returned.Broadcast()
}

// maxDescriptors is the limit where the system has none, or a larger one: a service that
// uses too many should not use all memory first.
const maxDescriptors = 1 << 18

// maxShare is how many times as many descriptors as are free a service may have. So one
// service gets four fifths of all, two get four ninths each, and some are always free for
// others.
const maxShare = 4

// account counts the descriptors that the connections of a service have. It is safe for
// concurrent use.
type account struct {
	*descriptors
	has int // guarded by descriptors.mu
}

// fits reports whether the service may have n more. It may always have n.
func (a *account) fits(n int) bool { return a.has == 0 || a.has+n <= maxShare*(a.free-n) }

// take takes n descriptors, and reports whether the service may have them.
func (a *account) take(n int) bool {
	return a.takeUnless(n, func() bool { return true })
}

// takeUnless waits until the service may have n descriptors, and takes them. It returns
// false without them if ended does. After a change of what ended returns, call wake.
func (a *account) takeUnless(n int, ended func() bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for !a.fits(n) {
		if ended() {
			return false
		}
		a.returned.Wait()
	}
	a.free -= n
	a.has += n
	return true
}

// give returns n descriptors.
func (a *account) give(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.free += n
	a.has -= n
	a.returned.Broadcast()
}
