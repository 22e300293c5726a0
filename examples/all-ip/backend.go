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

// backend is the sink: it keeps two tables, one a family, in step with what it
// is told.
type backend struct {
	name string // of both tables
	have state  // what is in them, unless the last Sync failed
	// uses says how often each element of have is asked for.
	uses map[element]int
}

// Start fails if the kernel does not do what all-ip needs.
func (b *backend) Start(context.Context) error { return b.probe() }

// Sync changes the tables in one transaction. If that fails, nobody knows what is
// in them, and a full Sync reads it.
func (b *backend) Sync(ctx context.Context, c *sink.Changes) error {
	if err := b.sync(ctx, c); err != nil {
		return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
	}
	return nil
}

func (b *backend) sync(ctx context.Context, c *sink.Changes) error {
	tx, err := b.begin()
	if err != nil {
		return err
	}
	// old is what may have to go, want what has to be there.
	old, want, flows := state{}, state{}, flows{}
	if c.Full {
		b.have, err = b.read()
		if errors.Is(err, errNotIntact) {
			b.have, err = state{}, tx.create()
		}
		if err != nil {
			return err
		}
		b.uses = map[element]int{}
		maps.Copy(old, b.have)
		flows.addAddressesOf(b.have)
	}
	for change := range c.Services {
		logUnserved(ctx, &change)
		for e, value := range elements(change.Old) {
			old[e] = value
			b.uses[e]--
		}
		for e, value := range elements(change.New) {
			want[e] = value
			b.uses[e]++
		}
		flows.add(change.Old, change.New)
	}
	for e := range old {
		if b.uses[e] == 0 {
			delete(b.uses, e)
			tx.remove(b.have, e)
		}
	}
	for e, value := range want {
		tx.set(b.have, e, value)
	}
	if err := tx.commit(); err != nil {
		return err
	}
	return flows.forgetOthers()
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
