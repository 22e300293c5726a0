// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"time"
)

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
// a service with more addresses does not delay others. It is reported as failed until
// its addresses are local.
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

// makeChanges makes changes concurrently, with changeCtx as their context. When an
// address has become local, makeChanges opens the listeners at that address. It returns
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
