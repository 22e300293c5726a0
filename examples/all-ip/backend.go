// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// backend is a sink that maintains two nftables tables, one per IP family.
type backend struct {
	name string // name of both tables
	have state  // content of the tables; unknown if the last Sync failed
	want state  // wanted content, from the services delivered since the pass began
	// The map uses counts, for each wanted element, the services that need it.
	uses map[element]int
	// flows contains the external IPs whose connections the next transaction may affect.
	flows flows
	// True while a pass is in progress.
	passing bool
}

// Start fails if the kernel lacks a feature that all-ip needs.
func (b *backend) Start(context.Context) error { return b.probe() }

// Outside a pass, each Sync changes the tables in one transaction. A pass changes them
// only in its last Sync, also in one transaction. If Sync fails, the next pass reads the
// tables again.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	if err := b.sync(ctx, c); err != nil {
		return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
	}
	return nil
}

func (b *backend) sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		b.want, b.uses, b.flows, b.passing = state{}, map[element]int{}, flows{}, true
	}
	changed := state{}
	for change := range c.Services {
		logUnserved(ctx, &change)
		for e := range elements(change.Old) {
			b.uses[e]--
			changed[e] = ""
		}
		for e, value := range elements(change.New) {
			b.uses[e]++
			b.want[e] = value
			changed[e] = ""
		}
		b.flows.add(change.Old, change.New)
	}
	for e := range changed {
		if b.uses[e] == 0 {
			delete(b.uses, e)
			delete(b.want, e)
		}
	}
	if b.passing && !c.Last {
		return nil
	}
	tx, err := b.begin()
	if err != nil {
		return err
	}
	if c.Last {
		b.passing = false
		b.have, err = b.read()
		if errors.Is(err, errNotIntact) {
			b.have, err = state{}, tx.create()
		}
		if err != nil {
			return err
		}
		maps.Copy(changed, b.have)
		maps.Copy(changed, b.want)
		b.flows.addAddressesOf(b.have)
	}
	for e := range changed {
		if value, ok := b.want[e]; ok {
			tx.set(b.have, e, value)
		} else {
			tx.remove(b.have, e)
		}
	}
	if err := tx.commit(); err != nil {
		return err
	}
	done := b.flows
	b.flows = flows{}
	return done.forgetOthers()
}

// Verify detects changes by other programs, for example a firewall that flushes all rules
// when it reloads.
func (b *backend) Verify(context.Context) error {
	have, err := b.read()
	if err == nil && !maps.Equal(have, b.have) {
		err = errors.New("another program changed their elements")
	}
	if err != nil {
		return fmt.Errorf("tables %q: %w: %w", b.name, err, sink.ErrStartOver)
	}
	return nil
}

// Cleanup deletes the tables.
func (b *backend) Cleanup(context.Context) error {
	if err := b.probe(); err != nil {
		return err
	}
	tx, err := b.begin()
	if err != nil {
		return err
	}
	tx.drop()
	return tx.commit()
}

// logUnserved logs the unsupported parts of a service.
func logUnserved(ctx context.Context, c *sink.Change) {
	if c.New == nil {
		return
	}
	log := klog.FromContext(ctx).WithValues("service", c.Key)
	if !c.New.Service.AllPorts {
		log.Error(nil, "Service not served: it is not an all-ports service; start the kpng server with --all-ports")
	}
	for frontend, why := range nodeview.Unserved(c.New) {
		log.Info("Frontend not supported", "frontend", frontend.String(), "reason", why)
	}
}
