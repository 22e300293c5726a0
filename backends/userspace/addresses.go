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
)

// references counts who needs an address to be local. It is safe for concurrent
// use, and changes different addresses at once.
type references struct {
	addresses Addresses // nil: addresses have to be local already

	// mu is not held while an address is added or removed, which may take seconds.
	mu    sync.Mutex
	count map[netip.Addr]int
	// stuck are the addresses that nobody needs and that may be there still.
	stuck map[netip.Addr]struct{}
	// left are the addresses that a process before this one made local, until it is known
	// which of them are needed.
	left []netip.Addr
	// room has room for as many changes as there may be at once.
	room chan struct{}
	// changing are the addresses that are being added or removed; changed tells
	// that one is not any more.
	changing map[netip.Addr]struct{}
	changed  sync.Cond
}

func newReferences(a Addresses) *references {
	r := &references{
		addresses: a, count: map[netip.Addr]int{}, stuck: map[netip.Addr]struct{}{},
		changing: map[netip.Addr]struct{}{}, room: make(chan struct{}, 64),
	}
	r.changed.L = &r.mu
	return r
}

// change calls f while nobody else changes addr. It is called with the lock held,
// which it releases for that.
func (r *references) change(addr netip.Addr, f func() error) error {
	r.changing[addr] = struct{}{}
	r.mu.Unlock()
	err := f()
	r.mu.Lock()
	delete(r.changing, addr)
	r.changed.Broadcast()
	return err
}

// lock takes the lock at a moment when nobody changes addr.
func (r *references) lock(addr netip.Addr) {
	r.mu.Lock()
	for {
		if _, busy := r.changing[addr]; !busy {
			return
		}
		r.changed.Wait()
	}
}

// adopt learns the addresses that a process before this one made local, which counts as
// their user until they are abandoned.
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
	r.left = left
	return nil
}

// abandon returns the adopted addresses, for the caller to release.
func (r *references) abandon() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := r.left
	r.left = nil
	return left
}

// counts reports whether the users of addr are counted, as it is made local for them.
func (r *references) counts(addr netip.Addr) bool {
	return r.addresses != nil && !addr.IsLoopback()
}

// acquire makes addr local for one more user.
func (r *references) acquire(ctx context.Context, addr netip.Addr) error {
	if !r.counts(addr) {
		return nil
	}
	r.lock(addr)
	defer r.mu.Unlock()
	if r.count[addr] == 0 {
		if err := r.change(addr, func() error { return r.addresses.Add(ctx, addr) }); err != nil {
			r.stuck[addr] = struct{}{} // it may have come all the same
			return fmt.Errorf("making %s local: %w", addr, err)
		}
		delete(r.stuck, addr)
	}
	r.count[addr]++
	return nil
}

// share adds a user of an address that is local already. It returns false if addr is not.
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

// release takes one user of addr away, and with the last one the address. If that
// fails it is tried again by sweep.
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

// sweep removes what could not be removed before.
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

// restore makes those addresses local again that somebody needs and that somebody
// else took away. It goes on with other ones next time if ctx ends.
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
		// An Add that is cut short would take the address back.
		if err := r.change(addr, func() error { return r.addresses.Add(context.WithoutCancel(ctx), addr) }); err != nil {
			return fmt.Errorf("making %s local: %w", addr, err)
		}
		return nil
	})
}

// remove removes an address that is stuck. The caller holds the lock.
func (r *references) remove(ctx context.Context, addr netip.Addr) error {
	if err := r.change(addr, func() error { return r.addresses.Remove(ctx, addr) }); err != nil {
		return fmt.Errorf("removing %s from this host: %w", addr, err)
	}
	delete(r.stuck, addr)
	return nil
}

// has reports whether addr is local for somebody's sake.
func (r *references) has(addr netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count[addr] > 0
}

// inParallel calls f with each item, at most 64 at the same time for all callers, and
// returns when all calls have returned.
func inParallel[T any](room chan struct{}, items []T, f func(T)) {
	var all sync.WaitGroup
	for _, item := range items {
		room <- struct{}{}
		all.Go(func() {
			f(item)
			<-room
		})
	}
	all.Wait()
}

// errorsOf calls f with each address, many at the same time, and returns the errors
// joined.
func (r *references) errorsOf(addrs []netip.Addr, f func(netip.Addr) error) error {
	var mu sync.Mutex
	var errs []error
	inParallel(r.room, addrs, func(addr netip.Addr) {
		if err := f(addr); err != nil {
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		}
	})
	return errors.Join(errs...)
}
