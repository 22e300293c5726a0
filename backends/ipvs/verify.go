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
	"k8s.io/klog/v2"
)

const (
	// minPause is the shortest time between two comparisons with the kernel. A comparison is
	// followed by a pause of at least pauseFactor times its duration, so that comparisons
	// use at most 2 % of a CPU.
	minPause    = 10 * time.Second
	pauseFactor = 50
)

// maxIdleReads limits the virtual servers that one call of removeIdle reads.
const maxIdleReads = 1000

// removeIdle deletes the destinations that get no new connections and have no connections
// any more.
func (d *dataplane) removeIdle(ctx context.Context) error {
	var errs []error
	reads := 0
	for id := range d.leaving {
		if reads++; reads > maxIdleReads {
			break // the order of a map is random, so later calls read the others
		}
		if ctx.Err() != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		s, err := d.conn.read(id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		delete(d.leaving, id)
		if s == nil {
			continue // compare creates the virtual server again
		}
		d.servers[id] = s
		for at, to := range s.destinations {
			switch {
			case d.claims[id].has(at):
			case to.connections > 0:
				d.leaving[id] = true
			default:
				if err := d.conn.deleteDestination(id, at); err != nil {
					errs = append(errs, err)
				} else {
					delete(s.destinations, at)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// checkTable requests a new pass if another program has deleted the table. A reload of a
// firewall may do that.
func (d *dataplane) checkTable() error {
	exists, err := d.table.exists()
	if err == nil && !exists {
		d.known = false
		err = fmt.Errorf("another program deleted table inet %s (%w)", d.table.name, sink.ErrStartOver)
	}
	return err
}

// compare compares the kernel with the records, and repairs virtual servers and addresses.
// If another program has changed the table, it requests a new pass.
func (d *dataplane) compare(ctx context.Context) error {
	log := klog.FromContext(ctx)
	elements, err := d.table.read()
	if err != nil && !errors.Is(err, errChanged) {
		return err
	}
	if err != nil || !maps.Equal(elements, d.elements) {
		d.known = false
		return fmt.Errorf("another program changed table inet %s (%w)", d.table.name, sink.ErrStartOver)
	}
	routes, err := d.local.list()
	if err != nil {
		return err
	}
	if !maps.Equal(routes, d.routes) {
		d.known = false
		return fmt.Errorf("another program changed routes of interface %s (%w)", d.local.name, sink.ErrStartOver)
	}
	servers, err := d.readServers(ctx, elements)
	if err != nil {
		return err
	}
	var errs []error
	for id := range d.claims {
		if ctx.Err() != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		if equalServers(servers[id], d.servers[id]) {
			continue
		}
		log.Info("Virtual server was changed by another program; repairing it", "server", id.String())
		d.setServer(id, servers[id])
		errs = append(errs, d.programServer(id))
	}
	return errors.Join(errs...)
}

// equalServers reports whether two virtual servers are equal, except for the numbers of
// connections.
func equalServers(a, b *server) bool {
	if a == nil || b == nil {
		return a == b
	}
	weights := func(s *server) map[netip.AddrPort]uint32 {
		w := make(map[netip.AddrPort]uint32, len(s.destinations))
		for at, to := range s.destinations {
			w[at] = to.weight
		}
		return w
	}
	return a.settings == b.settings && maps.Equal(weights(a), weights(b))
}
