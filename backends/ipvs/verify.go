// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// minPause is the shortest time between two comparisons with the kernel. After a
// comparison or a call of removeIdle, there is a pause of at least kernelnode.PauseFactor
// times its duration.
const minPause = 10 * time.Second

// maxIdleReads limits the virtual servers that one call of removeIdle reads.
const maxIdleReads = 1000

// removeIdle deletes the destinations that get no new connections and have no connections
// any more. From a virtual server that it reads, it uses only the connection counts, so
// that compare still finds changes by other programs.
func (d *dataplane) removeIdle(ctx context.Context) error {
	var errs []error
	reads := 0
	for id := range d.leaving {
		if reads++; reads > maxIdleReads {
			break // the order of a map is random, so later calls read the other virtual servers
		}
		if ctx.Err() != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		s, err := d.conn.read(id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		leaving := false
		if recorded := d.servers[id]; s != nil && recorded != nil {
			for at := range recorded.destinations {
				to, exists := s.destinations[at]
				if d.claims[id].has(at) {
					continue
				}
				if to.connections > 0 {
					leaving = true
					continue
				}
				if exists {
					if err := d.conn.deleteDestination(id, at); err != nil {
						errs, leaving = append(errs, err), true
						continue
					}
				}
				delete(recorded.destinations, at)
			}
		}
		if !leaving {
			delete(d.leaving, id)
		}
	}
	return errors.Join(errs...)
}

// checkLoss requests a new pass if another program has deleted the table or its rules, the
// interface or its routes. A reload of a firewall or of the network may do that. It
// returns true if another program has deleted virtual servers. It reads only one virtual
// server and one route, so it does not find the loss of a part of them.
func (d *dataplane) checkLoss(ctx context.Context) (lostServers bool, err error) {
	generation, err := d.nft.Generation(ctx)
	if err != nil {
		return false, err
	}
	if generation == 0 || generation != d.checked {
		exists, err := d.table.hasRules()
		if err != nil {
			return false, err
		}
		if !exists {
			return false, d.changed("table inet " + d.table.name)
		}
		d.checked = generation
	}
	for addr := range d.routes {
		if lost, err := d.local.lostRoute(addr); err != nil {
			return false, err
		} else if lost || d.local.lost() {
			return false, d.changed("routes of interface " + d.opts.Interface)
		}
		break
	}
	for id := range d.claims {
		if d.servers[id] == nil {
			continue
		}
		s, err := d.conn.read(id)
		return err == nil && !d.owns(id, s), err
	}
	return false, nil
}

// compare compares the kernel with the records, and repairs virtual servers. If another
// program has changed the table or the routes, or if a repair fails, compare requests a
// new pass. If ctx ends while compare reads virtual servers, the next call continues
// there. When d.unchecked is empty, the comparison is complete or has failed.
func (d *dataplane) compare(ctx context.Context) error {
	if len(d.unchecked) == 0 {
		tableCtx := ctx
		if d.interrupted >= maxInterrupted {
			tableCtx = context.WithoutCancel(ctx)
		}
		err := d.compareTable(tableCtx)
		if err != nil && tableCtx.Err() != nil {
			d.interrupted++
			return err
		}
		d.interrupted = 0
		if err != nil {
			return err
		}
		if err := d.compareRoutes(); err != nil {
			return err
		}
		d.unchecked = slices.Collect(maps.Keys(d.claims))
	}
	for len(d.unchecked) > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		id := d.unchecked[len(d.unchecked)-1]
		d.unchecked = d.unchecked[:len(d.unchecked)-1]
		s, err := d.conn.read(id)
		if err != nil {
			d.unchecked = nil
			return err
		}
		if !d.owns(id, s) {
			s = nil
		}
		if _, needed := d.claims[id]; !needed || equalServers(s, d.servers[id]) {
			continue
		}
		klog.FromContext(ctx).Info("Virtual server was changed by another program; repairing it", "server", id.String())
		d.observer.Drifted(true)
		d.setServer(id, s)
		if err := d.programServer(id); err != nil {
			d.known = false
			return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
		}
	}
	d.observer.Drifted(false)
	return nil
}

const (
	// maxReads limits how often compareTable reads the table.
	maxReads = 6
	// After maxInterrupted consecutive comparisons of the table that were interrupted, the
	// next one ignores its context. Therefore the table is compared even while services
	// constantly change.
	maxInterrupted = 2
)

// compareTable requests a new pass if another program has changed the table. It reads the
// table only if any program has changed nf_tables since compareTable last found the table
// equal to the records. The kernel's listing of a set is incomplete while the kernel
// resizes the set, so compareTable reads the table again before it reports a change.
func (d *dataplane) compareTable(ctx context.Context) error {
	generation, err := d.nft.Generation(ctx)
	if err != nil || generation == d.compared && generation != 0 {
		return err
	}
	for attempt := range maxReads {
		time.Sleep(time.Millisecond * (1<<attempt - 1))
		elements, err := d.table.read(ctx)
		switch {
		case errors.Is(err, errChanged):
			return d.changed("table inet " + d.table.name)
		case err != nil:
			return err
		case maps.Equal(elements, d.elements):
			d.compared = generation
			return nil
		}
	}
	return d.changed("table inet " + d.table.name)
}

// compareRoutes requests a new pass if another program has changed the routes.
func (d *dataplane) compareRoutes() error {
	routes, err := d.local.list()
	if err != nil {
		return err
	}
	if !maps.Equal(routes, d.routes) {
		return d.changed("routes of interface " + d.opts.Interface)
	}
	return nil
}

// changed returns an error that requests a new pass, because another program has changed
// an object.
func (d *dataplane) changed(object string) error {
	d.observer.Drifted(true)
	d.known = false
	return fmt.Errorf("another program changed %s (%w)", object, sink.ErrStartOver)
}

// equalServers reports whether two virtual servers are equal, except for the numbers of
// connections.
func equalServers(a, b *server) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.settings == b.settings && maps.EqualFunc(a.destinations, b.destinations, func(a, b destination) bool {
		return a.weight == b.weight && a.edited == b.edited
	})
}
