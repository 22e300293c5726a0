// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// change is the addition or removal of one user of an address. If update is not nil, the
// updated service becomes a user of the address. Otherwise the address loses one user.
type change struct {
	*update
	addr netip.Addr
	// isRetry is true if an earlier attempt at the same change has failed.
	isRetry bool
	err     error
}

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
			changes = append(changes, &change{update: u, addr: addr, isRetry: known})
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

// makeChanges makes changes concurrently, with changeCtx as their context. When an
// address has become local, makeChanges opens the listeners at that address. It returns
// when all changes except retries are completed. If no change is completed for a while,
// or if ctx ends, it returns earlier. The remaining changes continue in the background.
func (b *Backend) makeChanges(ctx, changeCtx context.Context, changes []*change) {
	if len(changes) == 0 {
		return
	}
	done, all := make(chan *change, len(changes)), make(chan struct{})
	b.running.Go(func() {
		inParallel(b.local.slots, changes, func(c *change) {
			c.make(changeCtx, b)
			done <- c
		})
		close(all)
	})
	expected := 0
	for _, c := range changes {
		if !c.isRetry {
			expected++
		}
	}
	left := len(changes)
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
			if !c.isRetry {
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

func (c *change) make(ctx context.Context, b *Backend) {
	if c.update == nil {
		b.releaseAddress(ctx, c.addr)
	} else {
		c.err = b.local.acquire(ctx, c.addr)
	}
}

// finishChange records the result of a change, and applies the plan of the service again.
func (b *Backend) finishChange(ctx context.Context, c *change) {
	if c.update == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := c.service
	if s.waiting == nil || !slices.Contains(s.waiting.addresses, c.addr) {
		delete(s.addresses, c.addr)
		if c.err == nil { // the address is local, but the service does not need it any more
			b.running.Go(func() { b.releaseAddress(b.life, c.addr) })
		}
		return
	}
	s.addresses[c.addr] = c.err
	c.update.err = s.apply(ctx, s.waiting)
}
