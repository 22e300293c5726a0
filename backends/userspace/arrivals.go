// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// change makes an address local for the service of an update, or without one removes a user
// of it.
type change struct {
	*update
	addr netip.Addr
	// again says that it failed before.
	again bool
	err   error
}

// coming is why an address is not local yet: it is about to be.
type coming struct {
	addr netip.Addr
	last error // of the try before
}

func (c *coming) Error() string {
	if c.last != nil {
		return fmt.Sprintf("%v; trying again", c.last)
	}
	return fmt.Sprintf("making %s local: not done yet", c.addr)
}

func (c *coming) Unwrap() error { return c.last }

func isComing(err error) bool {
	_, ok := err.(*coming)
	return ok
}

// lacking makes the service use the addresses of its plan that are local already. It
// returns the changes that make the others local.
func (u *update) lacking() (changes []*change) {
	for _, addr := range u.plan.addresses {
		err, known := u.service.addresses[addr]
		switch {
		case known && err == nil, isComing(err):
		case u.local.share(addr):
			u.service.addresses[addr] = nil
		default:
			u.service.addresses[addr] = &coming{addr, err}
			changes = append(changes, &change{update: u, addr: addr, again: known})
		}
	}
	return changes
}

const (
	// addressPatience is how long await waits for the next change.
	addressPatience = time.Second
	// addressPace is how often await looks which addresses have come, as many come in a
	// burst.
	addressPace = 10 * time.Millisecond
)

// await makes changes, many at once, and opens what waits for an address when that has
// come. It returns when all is done; when no change has been for a while, or ctx ends, it
// leaves the rest to the background. What has failed before is no reason to wait. The
// changes are made under work.
func (b *Backend) await(ctx, work context.Context, changes []*change) {
	if len(changes) == 0 {
		return
	}
	done, all := make(chan *change, len(changes)), make(chan struct{})
	b.running.Go(func() {
		inParallel(b.local.room, changes, func(c *change) {
			c.make(work, b)
			done <- c
		})
		close(all)
	})
	expected := 0
	for _, c := range changes {
		if !c.again {
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
			b.arrive(ctx, c)
			left--
			if !c.again {
				expected--
			}
			last = time.Now()
		}
	}
	if left > 0 {
		b.running.Go(func() {
			for range left {
				b.arrive(work, <-done)
			}
		})
	}
}

func (c *change) make(ctx context.Context, b *Backend) {
	if c.update == nil {
		b.forgo(ctx, c.addr)
	} else {
		c.err = b.local.acquire(ctx, c.addr)
	}
}

// arrive goes on with a service whose address has come, or could not.
func (b *Backend) arrive(ctx context.Context, c *change) {
	if c.update == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := c.service
	if s.waiting == nil || !slices.Contains(s.waiting.addresses, c.addr) {
		delete(s.addresses, c.addr)
		if c.err == nil { // the service does not need it any more
			b.running.Go(func() { b.forgo(b.life, c.addr) })
		}
		return
	}
	s.addresses[c.addr] = c.err
	c.update.err = s.apply(ctx, s.waiting)
}
