// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"container/heap"
	"container/list"
	"fmt"
	"sync"
)

// descriptors counts the file descriptors of this process. It is safe for
// concurrent use.
type descriptors struct {
	mu   sync.Mutex
	free int
	// maxListeners is the number of descriptors that the listeners of all services may use.
	// reserved is the number that they have reserved.
	maxListeners, reserved int
	// waiting has the accounts for which goroutines wait in takeUnless.
	waiting waitingAccounts
}

// newDescriptors returns the descriptors of a process that may use at most max descriptors.
// Listeners may use three quarters of them, so that a quarter remains for connections.
func newDescriptors(max int) *descriptors { return &descriptors{free: max, maxListeners: max / 4 * 3} }

// adjust takes n descriptors, even if fewer are free. If n is negative, it gives back -n
// descriptors.
func (d *descriptors) adjust(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free -= n
	d.grant()
}

// grant gives descriptors to waiting goroutines. It first serves the service that has the
// fewest descriptors: if that service may not take more, no other service may. The caller
// holds the lock.
func (d *descriptors) grant() {
	for len(d.waiting) > 0 {
		a := d.waiting[0]
		first := a.waiters.Front()
		w := first.Value.(*waiter)
		if !a.fits(w.n) {
			return
		}
		a.waiters.Remove(first)
		a.add(w.n)
		if a.waiters.Len() == 0 {
			heap.Remove(&d.waiting, a.at)
		}
		close(w.granted)
	}
}

// maxDescriptors limits the descriptors if the system allows more. So a service with too
// many connections cannot use all memory.
const maxDescriptors = 1 << 18

// maxShare limits the descriptors of a service to four times the number of free ones. So
// one busy service gets at most four fifths of all descriptors. Two busy services get at
// most four ninths each. Some descriptors are always free for other services.
const maxShare = 4

// listenerShare limits the listeners of a service to a quarter of the listeners that the
// other services leave. So there is room for more services, however many services have
// reached their share.
const listenerShare = 4

// account counts the descriptors of one service. It is safe for concurrent use.
// descriptors.mu guards its fields.
type account struct {
	*descriptors
	has       int // for connections, pipes and UDP clients
	listeners int // reserved for listeners

	waiters list.List // of *waiter
	at      int       // position in descriptors.waiting
}

// waiter is a goroutine that waits for n descriptors.
type waiter struct {
	n       int
	granted chan struct{} // closed when the goroutine has the descriptors
}

// fits reports whether the service may take n more descriptors. A service without
// descriptors may always take n, even if fewer are free.
func (a *account) fits(n int) bool { return a.has == 0 || a.has+n <= maxShare*(a.free-n) }

// add takes n descriptors, or gives back -n. The caller holds the lock.
func (a *account) add(n int) {
	a.free -= n
	a.has += n
	if a.waiters.Len() > 0 {
		heap.Fix(&a.waiting, a.at)
	}
}

// take takes n descriptors if the service may have them, or returns false.
func (a *account) take(n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.fits(n) {
		return false
	}
	a.add(n)
	return true
}

// maxWaiting limits the number of goroutines that wait for descriptors of one service. Each
// of them has an accepted connection, which is not counted.
const maxWaiting = 64

// takeUnless waits until the service may take n descriptors, and takes them. If the
// channel "ended" is closed before that, or maxWaiting other goroutines wait, takeUnless
// takes none and returns false.
func (a *account) takeUnless(n int, ended <-chan struct{}) bool {
	a.mu.Lock()
	if a.fits(n) {
		a.add(n)
		a.mu.Unlock()
		return true
	}
	if a.waiters.Len() == maxWaiting {
		a.mu.Unlock()
		return false
	}
	w := &waiter{n, make(chan struct{})}
	at := a.waiters.PushBack(w)
	if a.waiters.Len() == 1 {
		heap.Push(&a.waiting, a)
	}
	a.mu.Unlock()
	select {
	case <-w.granted:
		return true
	case <-ended:
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-w.granted:
		return true
	default:
	}
	if a.waiters.Remove(at); a.waiters.Len() == 0 {
		heap.Remove(&a.waiting, a.at)
	}
	return false
}

// give gives back n descriptors.
func (a *account) give(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.add(-n)
	a.grant()
}

// reserve reserves descriptors for n listeners. This reservation replaces the earlier one
// of the service. If n is above the share of the service, reserve changes nothing and
// returns an error. A service may always reserve fewer than before.
func (a *account) reserve(n int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	others := a.reserved - a.listeners
	if share := (a.maxListeners - others) / listenerShare; n > a.listeners && n > share {
		return fmt.Errorf("open %d listeners: one service may have %d at present: %s", n, share, raiseTheLimit)
	}
	a.reserved, a.listeners = others+n, n
	return nil
}

// waitingAccounts is a heap of accounts, the one with the fewest descriptors first.
type waitingAccounts []*account

func (h waitingAccounts) Len() int           { return len(h) }
func (h waitingAccounts) Less(i, j int) bool { return h[i].has < h[j].has }

func (h waitingAccounts) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

func (h *waitingAccounts) Push(x any) {
	a := x.(*account)
	a.at = len(*h)
	*h = append(*h, a)
}

func (h *waitingAccounts) Pop() any {
	last := len(*h) - 1
	a := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return a
}
