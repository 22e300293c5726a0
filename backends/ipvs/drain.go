// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"k8s.io/klog/v2"
)

// The pause between two counts of connections is kernelnode.PauseFactor times the duration
// of a count, but at least minDrainPause and at most maxDrainPause.
const (
	minDrainPause = time.Second
	maxDrainPause = 10 * time.Second
)

// drain leaves new connections to another backend. Then it waits until the established
// connections that need this instance have ended, at most for the time Options.Drain. If
// ctx ends first, drain returns an error.
func (d *dataplane) drain(ctx context.Context) error {
	if err := d.leaveNewConnections(ctx); err != nil {
		return err
	}
	log := klog.FromContext(ctx)
	log.Info("Waiting until connections have ended", "limit", d.opts.Drain)
	deadline := time.Now().Add(d.opts.Drain)
	logged := time.Now()
	for pause := minDrainPause; ; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until connections have ended: %w", context.Cause(ctx))
		case <-time.After(min(pause, time.Until(deadline))):
		}
		begin := time.Now()
		connections, err := d.establishedConnections()
		if err != nil {
			return err
		}
		sockets, err := d.local.connectedSockets()
		if err != nil {
			return err
		}
		if connections+sockets == 0 {
			return nil
		}
		if !time.Now().Before(deadline) {
			log.Info("Not all connections have ended in time", "connections", connections, "sockets", sockets)
			return nil
		}
		if time.Since(logged) >= maxDrainPause {
			logged = time.Now()
			log.Info("Still waiting until connections have ended", "connections", connections, "sockets", sockets, "left", time.Until(deadline).Round(time.Second))
		}
		pause = min(max(minDrainPause, kernelnode.PauseFactor*time.Since(begin)), maxDrainPause)
	}
}

// leaveNewConnections makes the instance ignore the connections that another backend
// translates.
func (d *dataplane) leaveNewConnections(ctx context.Context) error {
	t := *d.table
	elements, err := t.read(ctx)
	if err != nil && !errors.Is(err, errChanged) {
		return err
	}
	t.draining = true
	if err := t.create(elements); err != nil {
		return err
	}
	return d.local.useNodeSource()
}

// establishedConnections returns the number of established connections through the virtual
// servers of the instance. It does not count UDP.
func (d *dataplane) establishedConnections() (n int, err error) {
	servers, err := d.conn.list()
	if errors.Is(err, errNoIPVS) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for id, s := range servers {
		if !d.owns(id, s) || id.protocol == api.UDP {
			continue
		}
		if err := d.conn.readDestinations(id, s); err != nil {
			return 0, err
		}
		for _, to := range s.destinations {
			n += int(to.established)
		}
	}
	return n, nil
}
