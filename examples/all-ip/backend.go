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

// backend is the sink: it keeps two tables, one a family, in step with the services.
type backend struct {
	name string // of both tables
	have state  // what is in them, unless the last Sync failed
	want state  // what the services delivered since the pass began need
	// uses says how many services need each element of want.
	uses map[element]int
	// flows are those of the services that changed since the last transaction.
	flows flows
	// passing says that a pass has begun and not ended.
	passing bool
}

// Start fails if the kernel does not do what all-ip needs.
func (b *backend) Start(context.Context) error { return b.probe() }

// Sync changes the tables in one transaction, at the end of a pass. If that fails, it is
// not known what is in them, and the next pass reads it.
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

// Verify notices if somebody else has changed the tables, as does a firewall
// that loads its rules again and flushes all others before.
func (b *backend) Verify(context.Context) error {
	have, err := b.read()
	if err == nil && !maps.Equal(have, b.have) {
		err = errors.New("somebody has changed their elements")
	}
	if err != nil {
		return fmt.Errorf("tables %q: %w: %w", b.name, err, sink.ErrStartOver)
	}
	return nil
}

// Cleanup removes the tables.
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

// logUnserved tells of what a service asks for in vain.
func logUnserved(ctx context.Context, c *sink.Change) {
	if c.New == nil {
		return
	}
	log := klog.FromContext(ctx).WithValues("service", c.Key)
	if !c.New.Service.AllPorts {
		log.Info("Not served, as whoever sends it does not make it an all-ports service")
	}
	for u := range nodeview.Unserved(c.New) {
		log.Info("Not served", "frontend", u.String())
	}
}
