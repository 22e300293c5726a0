// SPDX-License-Identifier: Apache-2.0

package userspace

import "sync"

// The struct descriptors counts the unused file descriptors of this process. It is safe
// for concurrent use.
type descriptors struct {
	mu   sync.Mutex
	free int
	// freeCond is signaled when descriptors become free and when wake is called.
	freeCond sync.Cond
}

func newDescriptors(max int) *descriptors {
	d := &descriptors{free: max}
	d.freeCond.L = &d.mu
	return d
}

// adjust takes n descriptors, even if fewer are free. If n is negative, it gives back -n
// descriptors.
func (d *descriptors) adjust(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free -= n
	if n < 0 {
		d.freeCond.Broadcast()
	}
}

// wake wakes all goroutines that wait in takeUnless. Then they call hasEnded again.
func (d *descriptors) wake() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.freeCond.Broadcast()
}

// maxDescriptors limits the descriptors if the system allows more. So a service with too
// many connections cannot use all memory.
const maxDescriptors = 1 << 18

// maxShare limits the descriptors of a service to four times the number of free ones. So
// one busy service gets at most four fifths of all descriptors. Two busy services get at
// most four ninths each. Some descriptors are always free for other services.
const maxShare = 4

// account counts the descriptors that one service has taken. It is safe for concurrent
// use.
type account struct {
	*descriptors
	has int // descriptors.mu guards it
}

// fits reports whether the service may take n more descriptors. A service without
// descriptors may always take n, even if fewer are free.
func (a *account) fits(n int) bool { return a.has == 0 || a.has+n <= maxShare*(a.free-n) }

// The method take takes n descriptors if the service may have them, or returns false.
func (a *account) take(n int) bool {
	return a.takeUnless(n, func() bool { return true })
}

// takeUnless waits until the service may take n descriptors, and takes them. If hasEnded
// returns true before that, takeUnless takes none and returns false. When hasEnded begins
// to return true, another goroutine must call wake.
func (a *account) takeUnless(n int, hasEnded func() bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for !a.fits(n) {
		if hasEnded() {
			return false
		}
		a.freeCond.Wait()
	}
	a.free -= n
	a.has += n
	return true
}

// The method give gives back n descriptors.
func (a *account) give(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.free += n
	a.has -= n
	a.freeCond.Broadcast()
}
