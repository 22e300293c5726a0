// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// references has a reference count for each local address. The users of an
// address are services, draining listeners, and leftovers of an earlier process.
// Concurrent calls can add or remove different addresses at the same time.
type references struct {
	addresses addresses // nil if only addresses that are already local can be used

	// mu is not held while an address is added or removed, because that may take seconds.
	mu    sync.Mutex
	count map[netip.Addr]int
	// stuck has unused addresses that may be local, because adding or removing them failed.
	stuck map[netip.Addr]struct{}
	// leftovers has the addresses that an earlier process made local. After the first pass,
	// it is empty.
	leftovers []netip.Addr
	// slots limits the number of concurrent calls of addresses.Add and addresses.Remove.
	slots chan struct{}
	// changing has the addresses that are being added or removed. changeCond is signaled
	// when an addition or removal ends.
	changing   map[netip.Addr]struct{}
	changeCond sync.Cond
}

func newReferences(a addresses) *references {
	r := &references{
		addresses: a, count: map[netip.Addr]int{}, stuck: map[netip.Addr]struct{}{},
		changing: map[netip.Addr]struct{}{}, slots: make(chan struct{}, 64),
	}
	r.changeCond.L = &r.mu
	return r
}

// change calls f while no other goroutine adds or removes addr. The caller holds the lock
// mu, but change releases it during the call of f.
func (r *references) change(addr netip.Addr, f func() error) error {
	r.changing[addr] = struct{}{}
	r.mu.Unlock()
	err := f()
	r.mu.Lock()
	delete(r.changing, addr)
	r.changeCond.Broadcast()
	return err
}

// lock waits until no goroutine adds or removes addr, and takes the lock mu.
func (r *references) lock(addr netip.Addr) {
	r.mu.Lock()
	for {
		if _, busy := r.changing[addr]; !busy {
			return
		}
		r.changeCond.Wait()
	}
}

// adopt reads the addresses that an earlier process made local. It adds one user to each
// address, so that the address stays local until the caller of abandon releases it.
func (r *references) adopt(ctx context.Context) error {
	if r.addresses == nil {
		return nil
	}
	left, err := r.addresses.Left(ctx)
	if err != nil {
		return fmt.Errorf("list addresses left on this host: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, addr := range left {
		r.count[addr]++
	}
	r.leftovers = left
	return nil
}

// abandon returns the addresses that adopt has read. The caller must release them all.
func (r *references) abandon() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := r.leftovers
	r.leftovers = nil
	return left
}

// counts returns true if users of addr are counted. Users of loopback
// addresses are not counted. Without Options.AddAddresses, no users are counted.
func (r *references) counts(addr netip.Addr) bool {
	return r.addresses != nil && !addr.IsLoopback()
}

// acquire adds a user of addr. If addr had no users before, acquire makes addr local.
func (r *references) acquire(ctx context.Context, addr netip.Addr) error {
	if !r.counts(addr) {
		return nil
	}
	r.lock(addr)
	defer r.mu.Unlock()
	if r.count[addr] == 0 {
		if err := r.change(addr, func() error { return r.addresses.Add(ctx, addr) }); err != nil {
			r.stuck[addr] = struct{}{} // addr may be local despite the error
			return fmt.Errorf("make %s local: %w", addr, err)
		}
		delete(r.stuck, addr)
	}
	r.count[addr]++
	return nil
}

// share adds a user of addr if addr already has users. If addr has none, share returns
// false. If users of addr are not counted, share does nothing and returns true.
func (r *references) share(addr netip.Addr) bool {
	if !r.counts(addr) {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count[addr] == 0 {
		return false
	}
	r.count[addr]++
	return true
}

// release removes one user of addr. If it was the last user, release removes the address
// from the host. If that fails, sweep tries again.
func (r *references) release(ctx context.Context, addr netip.Addr) error {
	if !r.counts(addr) {
		return nil
	}
	r.lock(addr)
	defer r.mu.Unlock()
	if r.count[addr]--; r.count[addr] > 0 {
		return nil
	}
	delete(r.count, addr)
	r.stuck[addr] = struct{}{}
	return r.remove(ctx, addr)
}

// sweep tries again to remove addresses whose removal failed.
func (r *references) sweep(ctx context.Context) error {
	r.mu.Lock()
	stuck := slices.Collect(maps.Keys(r.stuck))
	r.mu.Unlock()
	return r.errorsOf(stuck, func(addr netip.Addr) error {
		r.lock(addr)
		defer r.mu.Unlock()
		if _, still := r.stuck[addr]; !still {
			return nil
		}
		return r.remove(ctx, addr)
	})
}

// restore calls addresses.Add again for all addresses with users, in case another process
// removed some of them. It stops when ctx ends.
func (r *references) restore(ctx context.Context) error {
	r.mu.Lock()
	needed := slices.Collect(maps.Keys(r.count))
	r.mu.Unlock()
	return r.errorsOf(needed, func(addr netip.Addr) error {
		if ctx.Err() != nil {
			return nil
		}
		r.lock(addr)
		defer r.mu.Unlock()
		if r.count[addr] == 0 {
			return nil
		}
		// Add must not be interrupted, because an interrupted Add removes the address.
		if err := r.change(addr, func() error { return r.addresses.Add(context.WithoutCancel(ctx), addr) }); err != nil {
			return fmt.Errorf("make %s local: %w", addr, err)
		}
		return nil
	})
}

// remove removes a stuck address from the host. The caller holds the lock mu.
func (r *references) remove(ctx context.Context, addr netip.Addr) error {
	if err := r.change(addr, func() error { return r.addresses.Remove(ctx, addr) }); err != nil {
		return fmt.Errorf("remove %s from this host: %w", addr, err)
	}
	delete(r.stuck, addr)
	return nil
}

func (r *references) hasUsers(addr netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count[addr] > 0
}

// inParallel calls f for all items concurrently, and returns when all calls have
// returned. All callers with the same slots together run at most cap(slots) calls.
func inParallel[T any](slots chan struct{}, items []T, f func(T)) {
	var all sync.WaitGroup
	for _, item := range items {
		slots <- struct{}{}
		all.Go(func() {
			f(item)
			<-slots
		})
	}
	all.Wait()
}

// errorsOf calls f for all addresses concurrently, and returns the joined errors.
func (r *references) errorsOf(addrs []netip.Addr, f func(netip.Addr) error) error {
	var mu sync.Mutex
	var errs []error
	inParallel(r.slots, addrs, func(addr netip.Addr) {
		if err := f(addr); err != nil {
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		}
	})
	return errors.Join(errs...)
}

// change is the addition or removal of one user of an address. If service is not nil, it
// becomes a user of the address. Otherwise the address loses one user.
type change struct {
	*service
	addr netip.Addr
	// unawaited is true if makeChanges need not wait for the change: if an earlier attempt
	// at the same change has failed, or if the service has many changes.
	unawaited bool
	err       error
}

// maxAwaited limits the number of addresses of one service for which makeChanges waits. So
// a service with more addresses does not delay other services. Until its addresses are
// local, the service is reported as failed.
const maxAwaited = 256

// pendingError is the error of a service that waits until an address is local.
type pendingError struct {
	addr netip.Addr
	last error // error of the previous attempt
}

func (c *pendingError) Error() string {
	if c.last != nil {
		return fmt.Sprintf("%v; retrying", c.last)
	}
	return fmt.Sprintf("make %s local: in progress", c.addr)
}

func (c *pendingError) Unwrap() error { return c.last }

func isPending(err error) bool {
	_, ok := err.(*pendingError)
	return ok
}

// missingAddresses returns changes that make addresses of the plan local. An address that
// is already local needs no change: the service becomes its user immediately.
func (u *update) missingAddresses() (changes []*change) {
	for _, addr := range u.plan.addresses {
		err, known := u.service.addresses[addr]
		switch {
		case known && err == nil, isPending(err):
		case u.local.share(addr):
			u.service.addresses[addr] = nil
		default:
			u.service.addresses[addr] = &pendingError{addr, err}
			changes = append(changes, &change{service: u.service, addr: addr, unawaited: known || len(changes) >= maxAwaited})
		}
	}
	return changes
}

const (
	// addressPatience limits how long makeChanges waits for the next completed change.
	addressPatience = time.Second
	// addressPace is the interval at which makeChanges processes completed changes. So it
	// processes the changes of a burst together.
	addressPace = 10 * time.Millisecond
)

// makeChanges makes changes concurrently, with changeCtx as their context. When an address
// has become local, makeChanges opens the listeners at that address. makeChanges returns
// when all awaited changes are completed. If no change is completed for a while, or if ctx
// ends, it returns earlier. The remaining changes continue in the background.
func (b *backend) makeChanges(ctx, changeCtx context.Context, changes []*change) {
	if len(changes) == 0 {
		return
	}
	var awaited, others []*change
	for _, c := range changes {
		if c.unawaited {
			others = append(others, c)
		} else {
			awaited = append(awaited, c)
		}
	}
	done, all := make(chan *change, len(changes)), make(chan struct{})
	b.running.Go(func() {
		inParallel(b.local.slots, append(awaited, others...), func(c *change) {
			c.make(changeCtx, b)
			done <- c
		})
		close(all)
	})
	expected, left := len(awaited), len(changes)
	pace := time.NewTicker(addressPace)
	defer pace.Stop()
	for last := time.Now(); expected > 0 && time.Since(last) < addressPatience && ctx.Err() == nil; {
		select {
		case <-all:
		case <-pace.C:
		case <-ctx.Done():
		}
		for range len(done) {
			c := <-done
			b.finishChange(ctx, c)
			left--
			if !c.unawaited {
				expected--
			}
			last = time.Now()
		}
	}
	if left > 0 {
		b.running.Go(func() {
			for range left {
				b.finishChange(changeCtx, <-done)
			}
		})
	}
}

func (c *change) make(ctx context.Context, b *backend) {
	if c.service == nil {
		b.releaseAddress(ctx, c.addr)
	} else {
		c.err = b.local.acquire(ctx, c.addr)
	}
}

// finishChange records the result of a change, and opens the listeners at the address.
func (b *backend) finishChange(ctx context.Context, c *change) {
	if c.service == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := c.service; s.waiting != nil {
		if _, needed := s.waiting.at[c.addr]; needed {
			s.arrive(ctx, c.addr, c.err)
			return
		}
	}
	delete(c.service.addresses, c.addr)
	if c.err == nil { // the address is local, but the service does not need it any more
		b.running.Go(func() { b.releaseAddress(b.life, c.addr) })
	}
}
