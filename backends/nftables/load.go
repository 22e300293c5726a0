// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// active reports whether the table receives packets.
func (l *listing) active() bool {
	for _, h := range l.hooks {
		if h != (hook{}) {
			return !l.dormant
		}
	}
	return false
}

// hasRules reports whether any chain of the table has rules that the kernel applies.
func (l *listing) hasRules() bool {
	for _, d := range l.chains {
		if d.n > 0 {
			return !l.dormant
		}
	}
	return false
}

// fits reports whether this version of the package can keep the table with its elements.
// Each map must have the layout that this version uses. If a map is missing, a foreign set
// may be the map of another version under another name, so the table does not fit.
func (l *listing) fits() bool {
	hasForeign := len(l.foreignSets()) > 0
	for _, want := range allLayouts() {
		if s, ok := l.sets[want.name]; ok && !want.sameAs(&s) || !ok && hasForeign {
			return false
		}
	}
	return true
}

// foreignSets returns the names of sets that this version of the package cannot have made.
// It omits anonymous sets, which the kernel deletes together with their rules.
func (l *listing) foreignSets() (names []string) {
	all := allLayouts()
	for name, s := range l.sets {
		isOwn := slices.ContainsFunc(all, func(l layout) bool { return l.name == name })
		if !isOwn && s.flags&unix.NFT_SET_ANONYMOUS == 0 {
			names = append(names, name)
		}
	}
	return names
}

// loadSkeleton writes the missing parts of the skeleton in one transaction. It keeps the
// elements of a table that fits. It returns the number that conn.foreignCommits returned
// before any table was read.
//
// If another version of this package made the table, its maps may have other layouts.
// Then loadSkeleton makes a second table without base chains. The old table handles the
// traffic until [table.replaceTable] is called.
func (t *table) loadSkeleton(ctx context.Context) (foreignCommits int64, err error) {
	if foreignCommits, err = t.conn.foreignCommits(ctx); err != nil {
		return 0, err
	}
	names := t.opts.tables()
	var tables [len(names)]*listing
	for i, name := range names {
		if tables[i], err = t.conn.inspect(ctx, name); err != nil {
			return 0, err
		}
	}
	rank := func(l *listing) int {
		switch {
		case l.active() && l.fits():
			return 2
		case !l.active():
			return 1
		default:
			return 0
		}
	}
	now, other := 0, 1
	if rank(tables[1]) > rank(tables[0]) {
		now, other = 1, 0
	}
	t.conn.table, t.replaced = names[now], ""
	if tables[other].exists {
		t.replaced = names[other]
	}
	t.clientSeed = 0
	if tables[now].fits() {
		t.clientSeed = tables[now].clientSeed // so that clients keep their groups
	}
	for t.clientSeed == 0 {
		t.clientSeed = rand.Uint32()
	}
	chains := t.skeletonChains()
	if tables[other].active() && !tables[now].active() {
		klog.FromContext(ctx).Info("Present table has another layout; filling a new one", "present", names[other], "new", names[now])
		chains = slices.DeleteFunc(chains, func(c chain) bool { return c.hook != (hook{}) })
	}
	return foreignCommits, t.load(ctx, tables[now], chains, func(*wire) {})
}

// replaceTable activates the new table after a pass has filled it. The same transaction
// deletes the old table. It does nothing if there is only one table.
func (t *table) replaceTable(ctx context.Context) error {
	if t.replaced == "" {
		return nil
	}
	present, err := t.conn.inspect(ctx, t.conn.table)
	if err != nil {
		return err
	}
	clients, err := t.takeClients(ctx)
	if err != nil {
		return err
	}
	err = t.load(ctx, present, t.skeletonChains(), func(w *wire) {
		for family, list := range clients {
			w.clients(family, list)
		}
		w.deleteTable(t.replaced)
	})
	if err == nil {
		t.replaced, t.repeated = "", false
	}
	return err
}

// load compares chains with the present table. It writes the maps and chains that the
// table lacks, and replaces chains that differ. It calls finish to add messages to the
// same transaction.
func (t *table) load(ctx context.Context, present *listing, chains []chain, finish func(*wire)) error {
	t.skeleton = make(map[string]digest, len(chains))
	for _, c := range chains {
		t.skeleton[c.name] = digestOf(t.conn.seed, c.hook, c.rules)
	}
	var err error
	// Activate a dormant table in a separate transaction, because the kernel cannot add base
	// chains in the same transaction.
	if present.dormant && present.fits() {
		err = t.conn.transact(ctx, func(w *wire) { w.newTable() })
	}
	if err == nil {
		err = t.conn.transact(ctx, func(w *wire) {
			if present.exists && !present.fits() {
				w.deleteTable(w.table)
				present = &listing{}
			}
			if !present.exists {
				w.newTable()
			}
			for _, l := range allLayouts() {
				if _, ok := present.sets[l.name]; !ok {
					w.newSet(l)
				}
			}
			// These chains depend on services. They keep their rules until the pass has read the
			// ranges. Without rules, they admit no source.
			for _, family := range families {
				name := sourcelists.ChainName(family)
				if _, ok := present.hooks[name]; !ok {
					w.newChain(name, hook{})
				}
			}
			w.changeChains(present, slices.DeleteFunc(chains, func(c chain) bool {
				return present.chains[c.name] == t.skeleton[c.name]
			}))
			finish(w)
		})
	}
	if err != nil {
		return fmt.Errorf("load table inet %s: %w", t.conn.table, err)
	}
	return nil
}

// changeChains adds messages that create or replace the given chains.
func (w *wire) changeChains(present *listing, chains []chain) {
	for _, c := range chains {
		if _, ok := present.hooks[c.name]; ok {
			w.flushChain(c.name)
		}
	}
	for _, c := range chains {
		h, ok := present.hooks[c.name]
		if ok && h != c.hook { // the kernel cannot change a hook, so replace the chain
			w.deleteChain(c.name)
		}
		if !ok || h != c.hook {
			w.newChain(c.name, c.hook)
		}
	}
	for _, c := range chains {
		for _, rule := range c.rules {
			w.rule(c.name, rule)
		}
	}
}
