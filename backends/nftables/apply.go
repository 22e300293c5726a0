// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// maxOps limits the elements that one transaction changes. Large transactions have two
// disadvantages. While a transaction runs, other programs cannot change tables. If a
// large transaction fails, the search for the services that caused the failure takes
// long.
const maxOps = 20_000

// apply writes parts to the kernel, in as few transactions as maxOps allows. It adds
// failing services to the argument failed. It returns only those errors that no service
// caused.
func (t *table) apply(ctx context.Context, parts []part, failed *sink.Failed) error {
	for len(parts) > 0 {
		n, size := 1, len(parts[0].ops)
		for n < len(parts) && size+len(parts[n].ops) <= maxOps {
			size += len(parts[n].ops)
			n++
		}
		var err error
		if size > maxOps {
			err = t.applySplit(ctx, &parts[0], failed)
		} else {
			err = t.applyTogether(ctx, parts[:n], failed)
		}
		if err != nil {
			return err
		}
		parts = parts[n:]
	}
	return nil
}

// applySplit writes a part with more than maxOps changes, in several transactions. If one of
// them fails, applySplit undoes the others.
func (t *table) applySplit(ctx context.Context, p *part, failed *sink.Failed) error {
	split := p.split(maxOps)
	for i := range split {
		var refused sink.Failed
		if err := t.applyTogether(ctx, split[i:i+1], &refused); err != nil {
			return err
		}
		if len(refused) == 0 {
			continue
		}
		for j := i - 1; j >= 0; j-- {
			if err := t.commit(context.WithoutCancel(ctx), []part{split[j].undone()}); err != nil {
				return fmt.Errorf("undo a part of the changes of service %s: %w", p.services[0], err)
			}
		}
		for key, err := range refused {
			failed.Add(key, err)
		}
		return nil
	}
	return nil
}

// applyTogether writes parts in one transaction. If the kernel refuses the transaction,
// applyTogether tries each half, and so on until it has found the parts that fail.
func (t *table) applyTogether(ctx context.Context, parts []part, failed *sink.Failed) error {
	if err := context.Cause(ctx); err != nil {
		fail(parts, err, failed)
		return nil
	}
	err := t.commit(ctx, parts)
	if len(parts) == 1 && mayBeDrift(err) && !isOfTable(err) {
		if err := t.checkPart(ctx, &parts[0]); err != nil {
			return err
		}
		err = t.commit(ctx, parts)
	}
	switch {
	case err == nil || isOfTable(err):
		return err
	case len(parts) > 1:
		half := len(parts) / 2
		if err := t.applyTogether(ctx, parts[:half], failed); err != nil {
			return err
		}
		return t.applyTogether(ctx, parts[half:], failed)
	}
	fail(parts, err, failed)
	return nil
}

// isOfTable reports whether no service caused err.
func isOfTable(err error) bool {
	return errors.Is(err, netfilter.ErrUnknownOutcome) || errors.Is(err, unix.EPERM) || netfilter.IsTransient(err)
}

// mayBeDrift reports whether err may come from elements that another program changed.
func mayBeDrift(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY)
}

func fail(parts []part, err error, failed *sink.Failed) {
	for _, p := range parts {
		for _, key := range p.services {
			failed.Add(key, err)
		}
	}
}

// checkPart reads the elements of p from the kernel. If these are not the elements that p
// and the state expect, checkPart corrects p and the state.
func (t *table) checkPart(ctx context.Context, p *part) error {
	l, err := t.conn.Find(ctx)
	if err != nil {
		return err
	}
	if !l.Exists {
		t.drift.recordDrift(t)
		return fmt.Errorf("table inet %s was deleted", t.conn.Table)
	}
	for _, o := range p.ops {
		t.state.resolve(o)
		actual, ok, err := t.conn.getElement(ctx, o.elementID)
		if err != nil {
			return err
		}
		if ok != o.hasOld || ok && actual.value != o.old {
			t.drift.recordDrift(t)
		}
		if o.hasOld {
			t.state.count(&o.elementID, &o.old, -1)
		}
		if ok {
			t.state.count(&o.elementID, &actual.value, 1)
		}
		o.hasOld, o.old, o.checked = ok, actual.value, true
	}
	return nil
}

// commit writes parts in one transaction, and records the result in the state. The
// transaction first creates missing chains to which new elements refer. It removes
// elements before it adds others.
func (t *table) commit(ctx context.Context, parts []part) error {
	var removed, added []elementRef
	for _, p := range parts {
		for _, o := range p.ops {
			t.state.resolve(o)
			if o.hasOld == o.hasNew && o.old == o.new {
				continue
			}
			if o.hasOld {
				removed = append(removed, elementRef{&o.elementID, &o.old})
			}
			if o.hasNew {
				added = append(added, elementRef{&o.elementID, &o.new})
			}
		}
	}
	missing, sourceChains := t.missingClasses(added), sourcelists.Changed(t.state.ranges, t.state.rangesAfter(removed, added))
	err := t.conn.Transact(ctx, func(w *nft.Writer) {
		for _, c := range missing {
			makeClass(w, c, t.clientSeed)
		}
		writeElements(w, unix.NFT_MSG_DELSETELEM, 0, removed...)
		writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|unix.NLM_F_EXCL, added...)
		for _, c := range sourceChains {
			w.MakeChain(c)
		}
	})
	if err != nil {
		return err
	}
	t.state.classesMade(missing)
	t.state.sourceChainsMade(sourceChains)
	for _, p := range parts {
		for _, o := range p.ops {
			t.state.recordOp(o)
			o.applied = true
			if o.wanted < 0 && t.state.wanted[o.sharedID()] == 0 && t.state.holds(o) {
				// The element stays although no known service needs it.
				t.state.held[o.m].giveBack(&o.elementID)
				t.leftovers.Exist = true
			}
		}
	}
	return nil
}

// missingClasses returns the classes that do not exist although lists refer to them.
func (t *table) missingClasses(elements []elementRef) []class {
	needed := map[class]bool{}
	for _, e := range elements {
		if c, ok := classOfElement(e.elementID, e.value); ok {
			needed[c] = true
		}
	}
	return t.state.missing(needed)
}
