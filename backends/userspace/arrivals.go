// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// change makes an address local for the service of an update. Without an update, it
// removes a user of the address.
type change struct {
	*update
	addr netip.Addr
	// again reports that the change failed before.
	again bool
	err   error
}

// coming is the error of a service whose address is not local yet.
type coming struct {
	addr netip.Addr
	last error // of the previous attempt
}

func (c *coming) Error() string {
	if c.last != nil {
		return fmt.Sprintf("%v; retrying", c.last)
	}
	return fmt.Sprintf("make %s local: in progress", c.addr)
}

func (c *coming) Unwrap() error { return c.last }

func isComing(err error) bool {
	_, ok := err.(*coming)
	return ok
}

// lacking makes the service use those addresses of its plan that are already local. It
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
	// addressPatience is how long await waits for the next change to complete.
	addressPatience = time.Second
	// addressPace is the interval at which await checks for new addresses, because many
	// complete in a burst.
	addressPace = 10 * time.Millisecond
)

// await makes changes concurrently, and opens listeners when their address is local. It
// returns when all changes are done. If no change completes for a while, or ctx ends, it
// leaves the rest to the background. It does not wait for changes that failed before. The
// changes run under the context work.
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

// arrive continues with a service when the change of an address is done or has failed.
func (b *Backend) arrive(ctx context.Context, c *change) {
	if c.update == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := c.service
	if s.waiting == nil || !slices.Contains(s.waiting.addresses, c.addr) {
		delete(s.addresses, c.addr)
		if c.err == nil { // the service no longer needs the address
			b.running.Go(func() { b.forgo(b.life, c.addr) })
		}
		return
	}
	s.addresses[c.addr] = c.err
	c.update.err = s.apply(ctx, s.waiting)
}
