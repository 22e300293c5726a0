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

// maxOps is how many elements and rules one transaction changes, if no part has more. The
// kernel lets other programs change tables between transactions, and a failure has to be
// searched for in one.
const maxOps = 20_000

// apply brings parts into effect, in as few transactions as maxOps admits. It adds the
// services that fail to failed. An error is about everything.
func (t *table) apply(ctx context.Context, parts []part, failed *sink.Failed) error {
	for len(parts) > 0 {
		n, size := 1, parts[0].size()
		for n < len(parts) && size+parts[n].size() <= maxOps {
			size += parts[n].size()
			n++
		}
		if err := t.applyTogether(ctx, parts[:n], failed); err != nil {
			return err
		}
		parts = parts[n:]
	}
	return nil
}

// applyTogether brings parts into effect in one transaction. If that fails it halves
// them until it is known which fail.
func (t *table) applyTogether(ctx context.Context, parts []part, failed *sink.Failed) error {
	if err := context.Cause(ctx); err != nil {
		fail(parts, err, failed)
		return nil
	}
	err := t.commit(ctx, parts)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, netfilter.ErrUnknownOutcome), errors.Is(err, unix.EPERM), netfilter.IsTransient(err):
		return err // no service is at fault
	case len(parts) > 1:
		half := len(parts) / 2
		if err := t.applyTogether(ctx, parts[:half], failed); err != nil {
			return err
		}
		return t.applyTogether(ctx, parts[half:], failed)
	case isDrift(err):
		if err := t.look(ctx, &parts[0]); err != nil {
			return err
		}
		if err = t.commit(ctx, parts); err == nil {
			return nil
		}
	}
	fail(parts, err, failed)
	return nil
}

// isDrift reports whether err may come from elements that are not as they were left.
func isDrift(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY)
}

func fail(parts []part, err error, failed *sink.Failed) {
	for _, p := range parts {
		for _, key := range p.services {
			failed.Add(key, err)
		}
	}
}

// look reads what the kernel has of a part's elements, and corrects the part and
// the state by it.
func (t *table) look(ctx context.Context, p *part) error {
	if ok, _, err := t.conn.exists(ctx); err != nil {
		return err
	} else if !ok {
		t.drift.found(t)
		return fmt.Errorf("table inet %s was deleted", t.conn.table)
	}
	if len(p.objects) > 0 {
		own, err := t.ownObjects(ctx)
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
		t.state.resolve(o)
		actual, ok, err := t.conn.get(ctx, o.elementID)
		if err != nil {
			return err
		}
		if ok != o.hasOld || ok && actual.value != o.old {
			t.drift.found(t)
		}
		if o.hasOld {
			t.state.lost(&o.elementID, &o.old)
		}
		if ok {
			t.state.has(&o.elementID, &actual.value)
		}
		o.hasOld, o.old, o.looked = ok, actual.value, true
	}
	return nil
}

// commit brings parts into effect in one transaction. It removes elements before it adds
// others, and makes the chains that those lead to before.
func (t *table) commit(ctx context.Context, parts []part) error {
	var removed, added []element
	var objects []objectOp
	for _, p := range parts {
		objects = append(objects, p.objects...)
		for i := range p.ops {
			o := &p.ops[i]
			t.state.resolve(o)
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
	made := t.classesToMake(added)
	err := t.conn.transact(ctx, func(w *wire) {
		for _, c := range made {
			w.makeSharedChain(c)
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
		t.state.sharedChainMade(c)
	}
	for _, o := range objects {
		t.state.appliedObject(&o)
	}
	for _, p := range parts {
		for i := range p.ops {
			t.state.applied(&p.ops[i])
			t.leftovers.exist = t.leftovers.exist || t.state.isLeft(&p.ops[i])
		}
	}
	return nil
}

// classesToMake returns the classes that elements have and that are not there. A class stays
// when no frontend has it any more, as a packet may carry its number; Verify removes it.
func (t *table) classesToMake(elements []element) (list []sharedChain) {
	for i := range elements {
		e := &elements[i]
		if c, ok := sharedChainOf(&e.elementID, &e.value); ok {
			if !t.state.shared[c].made && !slices.Contains(list, c) {
				list = append(list, c)
			}
		}
	}
	return list
}
