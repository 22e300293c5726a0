// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// active reports whether the table receives packets.
func (l listing) active() bool {
	for _, h := range l.Hooks {
		if h != (nft.Hook{}) {
			return !l.Dormant
		}
	}
	return false
}

// hasRules reports whether any chain of the table has rules that the kernel applies.
func (l listing) hasRules() bool {
	for _, d := range l.Chains {
		if d.Rules > 0 {
			return !l.Dormant
		}
	}
	return false
}

// fits reports whether this version of the package can keep the table with its elements.
// Each map must have the layout that this version uses. If a map is missing, a foreign set
// may be the map of another version under another name, so the table does not fit.
func (l listing) fits() bool {
	hasForeign := len(l.foreignSets()) > 0
	for _, want := range allLayouts() {
		if s, ok := l.Sets[want.Name]; ok && !want.SameAs(&s) || !ok && hasForeign {
			return false
		}
	}
	return true
}

// foreignSets returns the names of sets that this version of the package cannot have made.
// It omits anonymous sets, which the kernel deletes together with their rules.
func (l listing) foreignSets() (names []string) {
	all := allLayouts()
	for name, s := range l.Sets {
		isOwn := slices.ContainsFunc(all, func(s nft.Set) bool { return s.Name == name })
		if !isOwn && s.Flags&unix.NFT_SET_ANONYMOUS == 0 {
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
	var tables [len(names)]listing
	for i, name := range names {
		if tables[i], err = t.conn.inspect(ctx, name); err != nil {
			return 0, err
		}
	}
	rank := func(l listing) int {
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
	t.conn.Table, t.replaced = names[now], ""
	if tables[other].Exists {
		t.replaced = names[other]
	}
	if tables[now].fits() {
		t.clientSeed = cmp.Or(tables[now].clientSeed, t.clientSeed) // so that clients keep their groups
	}
	for t.clientSeed == 0 {
		t.clientSeed = rand.Uint32()
	}
	chains := t.skeletonChains()
	if tables[other].active() && !tables[now].active() {
		klog.FromContext(ctx).Info("Present table has another layout; filling a new one", "present", names[other], "new", names[now])
		chains = slices.DeleteFunc(chains, func(c nft.Chain) bool { return c.Hook != (nft.Hook{}) })
	}
	return foreignCommits, t.load(ctx, tables[now], chains, func(*nft.Writer) {})
}

// replaceTable activates the new table after a pass has filled it. The same transaction
// deletes the old table. If there is only one table, replaceTable does nothing.
func (t *table) replaceTable(ctx context.Context) error {
	if t.replaced == "" {
		return nil
	}
	present, err := t.conn.inspect(ctx, t.conn.Table)
	if err != nil {
		return err
	}
	clients, err := t.takeClients(ctx)
	if err != nil {
		return err
	}
	err = t.load(ctx, present, t.skeletonChains(), func(w *nft.Writer) {
		for family, list := range clients {
			writeClients(w, family, list)
		}
		w.DeleteTable(t.replaced)
	})
	if err == nil {
		t.replaced, t.repeated = "", false
	}
	return err
}

// load compares chains with the present table. It writes the maps and chains that the
// table lacks, and replaces chains that differ. The function finish adds messages to the
// same transaction.
func (t *table) load(ctx context.Context, present listing, chains nft.Chains, finish func(*nft.Writer)) error {
	t.skeleton = make(map[string]nft.Digest, len(chains))
	for _, c := range chains {
		t.skeleton[c.Name] = c.Digest()
	}
	if present.fits() && t.opts.FollowServiceCIDRs != nil && t.serviceCIDRs == nil {
		// The CIDRs are not known yet. Keep the chains of the previous process.
		if d, ok := present.Chains[serviceCIDRsChain]; ok {
			t.skeleton[serviceCIDRsChain] = d
		}
	}
	var err error
	// Activate a dormant table in a separate transaction, because the kernel cannot add base
	// chains in the same transaction.
	if present.Dormant && present.fits() {
		err = t.conn.Transact(ctx, func(w *nft.Writer) { w.NewTable() })
	}
	if err == nil {
		err = t.conn.Transact(ctx, func(w *nft.Writer) {
			if present.Exists && !present.fits() {
				w.DeleteTable(w.Table)
				present = listing{Listing: &nft.Listing{}}
			}
			if !present.Exists {
				w.NewTable()
			}
			for _, l := range allLayouts() {
				if _, ok := present.Sets[l.Name]; !ok {
					w.NewSet(l)
				}
			}
			// These chains depend on services. They keep their rules until the pass has read the
			// ranges. Without rules, they admit no source.
			for _, c := range sourcelists.Counts.Chains(nil) {
				if _, ok := present.Hooks[c.Name]; !ok {
					w.NewChain(c.Name, c.Hook)
				}
			}
			changeChains(w, present, slices.DeleteFunc(chains, func(c nft.Chain) bool {
				return present.Chains[c.Name] == t.skeleton[c.Name]
			}))
			finish(w)
		})
	}
	if err != nil {
		return fmt.Errorf("load table inet %s: %w", t.conn.Table, err)
	}
	return nil
}

// changeChains adds messages that create or replace the given chains.
func changeChains(w *nft.Writer, present listing, chains nft.Chains) {
	for _, c := range chains {
		if _, ok := present.Hooks[c.Name]; ok {
			w.FlushChain(c.Name)
		}
	}
	for _, c := range chains {
		h, ok := present.Hooks[c.Name]
		if ok && h != c.Hook { // the kernel cannot change a hook, so replace the chain
			w.DeleteChain(c.Name)
		}
		if !ok || h != c.Hook {
			w.NewChain(c.Name, c.Hook)
		}
	}
	for _, c := range chains {
		w.AddRules(c.Name, c.Rules)
	}
}
