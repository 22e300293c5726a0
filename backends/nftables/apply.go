// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// maxOps is how many elements one transaction changes, if no part has more. The kernel
// lets other programs change tables between transactions, and a failure has to be
// searched for in one.
const maxOps = 20_000

// apply brings parts into effect, in as few transactions as maxOps admits. Services
// that fail are in failed; an error is about everything.
func (b *Backend) apply(ctx context.Context, parts []part, failed *sink.Failed) error {
	for len(parts) > 0 {
		n, ops := 1, len(parts[0].ops)
		for n < len(parts) && ops+len(parts[n].ops) <= maxOps {
			ops += len(parts[n].ops)
			n++
		}
		if err := b.applyTogether(ctx, parts[:n], failed); err != nil {
			return err
		}
		parts = parts[n:]
	}
	return nil
}

// applyTogether brings parts into effect in one transaction. If that fails it halves
// them until it is known which fail.
func (b *Backend) applyTogether(ctx context.Context, parts []part, failed *sink.Failed) error {
	if err := context.Cause(ctx); err != nil {
		b.fail(parts, err, failed)
		return nil
	}
	err := b.transact(ctx, parts)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, netfilter.ErrUnknownOutcome):
		return fmt.Errorf("%w: %w", err, sink.ErrStartOver)
	case errors.Is(err, unix.EPERM), netfilter.IsTransient(err):
		return err // no service's fault
	case len(parts) > 1:
		half := len(parts) / 2
		if err := b.applyTogether(ctx, parts[:half], failed); err != nil {
			return err
		}
		return b.applyTogether(ctx, parts[half:], failed)
	case isDrift(err):
		// Somebody else changed what the service has. Look, and try once more.
		if err := b.look(ctx, &parts[0]); err != nil {
			return err
		}
		if err = b.transact(ctx, parts); err == nil {
			return nil
		}
	}
	b.fail(parts, err, failed)
	return nil
}

// isDrift reports whether err may come from elements that are not as they were left.
func isDrift(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY)
}

func (b *Backend) fail(parts []part, err error, failed *sink.Failed) {
	for _, p := range parts {
		for _, key := range p.services {
			failed.Add(key, err)
		}
	}
}

// look reads what the kernel has of a part's elements, and corrects the part and
// the state by it.
func (b *Backend) look(ctx context.Context, p *part) error {
	if ok, _, err := b.conn.exists(ctx); err != nil {
		return err
	} else if !ok {
		b.drift()
		return fmt.Errorf("table inet %s is gone: %w", b.table(), sink.ErrStartOver)
	}
	if len(p.objects) > 0 {
		own, err := b.ownObjects(ctx)
		if err != nil {
			return err
		}
		p.objects = slices.DeleteFunc(p.objects, func(o objectOp) bool {
			return o.new == nil && !slices.ContainsFunc(own, func(there object) bool {
				return there.name == o.old.name && there.isSet() == o.old.isSet()
			})
		})
	}
	for i := range p.ops {
		o := &p.ops[i]
		b.resolve(o)
		actual, ok, err := b.conn.get(ctx, o.elementID)
		if err != nil {
			return err
		}
		if ok != o.hasOld || ok && actual.value != o.old {
			b.drift()
			b.drifting = true
		}
		if o.hasOld {
			b.state.lost(&o.elementID, &o.old)
		}
		if ok {
			b.state.has(&o.elementID, &actual.value)
		}
		o.hasOld, o.old, o.looked = ok, actual.value, true
	}
	return nil
}

// resolve says of an element that several services may want whether it comes or
// goes.
func (b *Backend) resolve(o *op) {
	if !o.m.shared() {
		return
	}
	before := b.state.wanted[o.elementID]
	o.hasOld = o.hasOld || before > 0 && !o.looked
	o.hasNew = before+o.wanted > 0
}

// transact brings parts into effect in one transaction. What goes goes before
// anything comes, but for the chains that are made for it.
func (b *Backend) transact(ctx context.Context, parts []part) error {
	var removed, added []element
	var objects []objectOp
	for _, p := range parts {
		objects = append(objects, p.objects...)
		for i := range p.ops {
			o := &p.ops[i]
			b.resolve(o)
			if o.hasOld == o.hasNew && o.old == o.new {
				continue
			}
			if o.hasOld {
				removed = append(removed, element{o.elementID, o.old})
			}
			if o.hasNew {
				added = append(added, element{o.elementID, o.new})
			}
		}
	}
	made := b.classesToMake(added)
	err := b.conn.transact(ctx, func(w *wire) {
		for _, c := range made {
			w.makeClass(c)
		}
		w.makeObjects(objects)
		w.allElements(unix.NFT_MSG_DELSETELEM, 0, removed)
		w.allElements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|unix.NLM_F_EXCL, added)
		w.deleteObjects(objects)
	})
	if err != nil {
		return err
	}
	for _, c := range made {
		b.state.hasClass(c)
	}
	for _, o := range objects {
		b.state.appliedObject(&o)
	}
	for _, p := range parts {
		for i := range p.ops {
			b.state.applied(&p.ops[i])
			b.leftovers = b.leftovers || b.state.isLeft(&p.ops[i])
		}
	}
	return nil
}

// classesToMake returns the classes that elements have and that are not there. A class stays
// when no frontend has it any more, as a packet may carry its number; Verify removes it.
func (b *Backend) classesToMake(elements []element) (list []class) {
	for i := range elements {
		e := &elements[i]
		if c, ok := classOf(&e.elementID, &e.value); ok {
			if !b.state.classes[c].made && !slices.Contains(list, c) {
				list = append(list, c)
			}
		}
	}
	return list
}
