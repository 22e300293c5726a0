// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/sink"
)

// maxIdleReads limits the virtual servers that one call of removeIdle reads.
const maxIdleReads = 1000

// removeIdle deletes the destinations and virtual servers that get no new connections and
// whose connections have ended. It reads virtual servers only to count their connections:
// the record stays as it was, so that compare still finds changes by other programs.
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
			for at := range recorded.others {
				to, exists := s.destinations[at]
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
				delete(recorded.others, at)
			}
		}
		if !leaving {
			delete(d.leaving, id)
		}
	}
	for addr, ids := range d.departing {
		for id := range ids {
			if reads++; reads > maxIdleReads || ctx.Err() != nil {
				return errors.Join(append(errs, context.Cause(ctx))...)
			}
			s, err := d.conn.read(id)
			if err == nil && d.owns(id, s) {
				if s.hasConnections(id.protocol) {
					continue
				}
				err = d.conn.delete(id)
			}
			if err != nil {
				errs = append(errs, err)
				continue
			}
			delete(ids, id)
		}
		if len(ids) == 0 {
			if err := d.release(addr); err != nil {
				errs = append(errs, err)
				continue
			}
			delete(d.departing, addr)
		}
	}
	return errors.Join(errs...)
}

// release makes an address no longer local if only departing virtual servers needed it.
func (d *dataplane) release(addr netip.Addr) error {
	if !d.kept[addr] {
		return nil
	}
	if err := d.local.remove(addr); err != nil {
		return err
	}
	delete(d.routes, addr)
	if err := d.changeTable([]element{addressElement(addr)}, nil); err != nil {
		return err
	}
	delete(d.kept, addr)
	return nil
}

// checkLoss requests a new pass if another program has deleted the table or its rules, the
// interface or its routes. A reload of a firewall or of the network may do that. If another
// program has deleted virtual servers, checkLoss requests a comparison, and then a pass.
// checkLoss reads only one virtual server and one route, so it does not find the loss of
// other objects.
func (d *dataplane) checkLoss(ctx context.Context) error {
	generation, err := d.table.conn.Generation(ctx)
	if err != nil {
		return err
	}
	if generation == 0 || generation != d.checked {
		exists, err := d.table.hasRules()
		if err != nil {
			return err
		}
		if !exists {
			return d.changed("table inet " + d.table.conn.Table)
		}
		d.checked = generation
	}
	for addr := range d.routes {
		if lost, err := d.local.lostRoute(addr); err != nil {
			return err
		} else if lost || d.local.lost() {
			return d.changed("routes of interface " + d.opts.Interface)
		}
		break
	}
	for id, f := range d.servers {
		if !f.exists {
			continue
		}
		s, err := d.conn.read(id)
		if err != nil {
			return err
		}
		if lost := !d.owns(id, s); lost && d.serverLost {
			return d.changed("virtual servers")
		} else if d.serverLost = lost; lost {
			d.reconciler.Suspect()
		}
		break
	}
	return nil
}

// maxReads limits how often readElements reads the table.
const maxReads = 6

// readElements returns the elements of the table. It reads the table only if any program
// has changed nf_tables since the table was equal to the records. The kernel's listing of a
// set is incomplete while the kernel resizes the set, so readElements reads the table again
// if it differs from the records.
func (d *dataplane) readElements(ctx context.Context) (elements map[element]bool, err error) {
	generation, err := d.table.conn.Generation(ctx)
	if err != nil || generation == d.compared && generation != 0 {
		return d.elements, err
	}
	for attempt := range maxReads {
		time.Sleep(time.Millisecond * (1<<attempt - 1))
		elements, err = d.table.read(ctx)
		switch {
		case errors.Is(err, errChanged):
			return nil, d.changed("table inet " + d.table.conn.Table)
		case err != nil:
			return nil, err
		case maps.Equal(elements, d.elements):
			d.compared = generation
			return elements, nil
		}
	}
	return elements, nil
}

// changed returns an error that requests a new pass, because another program has changed
// an object.
func (d *dataplane) changed(object string) error {
	d.observer.Drifted(true)
	d.known = false
	return fmt.Errorf("another program changed %s (%w)", object, sink.ErrStartOver)
}
