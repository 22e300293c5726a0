// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// list is the list of servers that a dialer uses. The order is random, so that clients
// spread over servers, even after one of the servers has ended.
//
// With Discover, the list is read only before a new connection, and only at the start,
// after all addresses have failed, or if the list is old. A permanent watch of the list
// would cost the API server a stream for each client.
type list struct {
	dialer    *Dialer
	addresses []Address
	next      int
	read      time.Time
	outdated  bool
}

const (
	// If the list is older than listAge, it is read again before the next connection. This
	// age is shorter than the lifetime of connections, so that all clients find new
	// servers.
	listAge = 10 * time.Minute
	// listTimeout limits the time to read the list.
	listTimeout = 10 * time.Second
	// maxListed limits the servers that a client tries.
	maxListed = 1000
)

func (d *Dialer) newList() *list {
	l := &list{dialer: d, addresses: slices.Clone(d.addresses), outdated: true}
	l.shuffle()
	return l
}

func (l *list) shuffle() {
	rand.Shuffle(len(l.addresses), func(i, j int) { l.addresses[i], l.addresses[j] = l.addresses[j], l.addresses[i] })
	l.next = 0
}

// take returns the next address. The list must not be empty.
func (l *list) take() Address {
	a := l.addresses[l.next]
	l.next = (l.next + 1) % len(l.addresses)
	return a
}

// refresh reads the list if necessary. If some addresses are invalid, it may replace the
// list and also return an error. If it can read no address, it keeps the list.
func (l *list) refresh(ctx context.Context) error {
	d := l.dialer
	if d.opts.Discover == nil || len(l.addresses) > 0 && !l.outdated && time.Since(l.read) < listAge {
		return nil
	}
	l.read, l.outdated = time.Now(), false
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	found, err := d.opts.Discover(ctx)
	if err != nil {
		return fmt.Errorf("find servers: %w", err)
	}
	rand.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	addresses := slices.Clone(d.addresses)
	var invalid []error
	for _, s := range found[:min(len(found), maxListed)] {
		if a, err := d.parse(s); err != nil {
			invalid = append(invalid, err)
		} else if !slices.Contains(addresses, a) {
			addresses = append(addresses, a)
		}
	}
	if len(invalid) > 10 {
		invalid = append(invalid[:10], fmt.Errorf("%d more", len(invalid)-10))
	}
	if len(addresses) > 0 {
		l.addresses = addresses
		l.shuffle()
	} else if len(invalid) == 0 {
		return errors.New("find servers: there are none")
	}
	return errors.Join(invalid...)
}
