// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// attempts is a number of consecutive failures of begin. After so many failures, their
// cause counts as permanent.
const attempts = 3

// setAttempts is the number of attempts to read and repair the sets before a pass uses
// rules in place of sets. Without sets, the pass does not reject or drop the packets of
// services that it has not delivered yet.
const setAttempts = 2

// commit writes the changed elements and chains if they differ from those in the kernel.
// If commit fails, the kernel may have some of the changes. Then the next commit writes
// these elements and chains again.
func (t *ruleset) commit(ctx context.Context) error {
	var add, remove []element
	for e := range t.changedElements {
		sure, ok := t.inSets[e]
		switch {
		case t.users[e] > 0 && !sure:
			add = append(add, e)
		case t.users[e] == 0 && ok:
			remove = append(remove, e)
		}
	}
	if err := t.changeSets(ctx, "add", add); err != nil {
		return err
	}
	if t.withSets {
		if err := t.fillSources(ctx); err != nil {
			return err
		}
	}
	if err := t.writeChains(ctx); err != nil {
		return err
	}
	if len(t.lingering) > 0 {
		for id := range t.lingering {
			t.changedChains[id] = true
		}
		clear(t.lingering)
		if err := t.writeChains(ctx); err != nil {
			return err
		}
	}
	if err := t.changeSets(ctx, "del", remove); err != nil {
		return err
	}
	clear(t.changedElements)
	if t.withSets {
		return t.destroySources(ctx)
	}
	return nil
}

// changeSets adds or deletes elements.
func (t *ruleset) changeSets(ctx context.Context, action string, list []element) error {
	var items []string
	for _, e := range list {
		items = append(items, t.setName(e.set)+" "+e.text)
		if t.inSets[e] {
			t.sure[e.set]--
		}
		t.inSets[e] = false
	}
	if err := t.run.changeSets(ctx, action, items); err != nil {
		return err
	}
	for _, e := range list {
		if put(t.inSets, e, true, action == "add"); action == "add" {
			t.sure[e.set]++
		}
	}
	return nil
}

// writeChains writes the changed chains.
func (t *ruleset) writeChains(ctx context.Context) error {
	for id := range maps.Clone(t.changedChains) {
		switch _, needed := t.chains[id]; {
		case !t.isDispatch(id):
		case !subchain.MatchString(t.suffix(id)):
			t.renderDispatch(id)
		case !needed:
			put(t.chains, id, "", t.hasForeign(id))
		}
	}
	var write, later []chainID
	for id := range t.changedChains {
		rules, needed := t.chains[id]
		if !needed && id.table == mangle && len(t.lingering) > 0 {
			later = append(later, id) // a lingering entry may lead to this chain
		} else if is, exists := t.inKernel[id]; needed != exists || needed && is != digest(rules) {
			write = append(write, id)
		}
	}
	if err := t.run.restore(ctx, t.restoreInput(write)); err != nil {
		for _, id := range write {
			t.inKernel[id] = 0
		}
		return err
	}
	t.entries = nil
	for _, id := range write {
		rules, needed := t.chains[id]
		put(t.inKernel, id, digest(rules), needed)
		if t.rewords {
			delete(t.inexact, id)
			put(t.written, id, true, needed)
		}
	}
	clear(t.jumpLines)
	clear(t.changedChains)
	for _, id := range later {
		t.changedChains[id] = true
	}
	return nil
}

// maxLines limits the lines of a transaction in flavour nft, unless one chain has more
// lines. Therefore changes of other programs need not wait for all rules of a large
// service. In flavour legacy, each transaction replaces the whole table, so one
// transaction per table is best.
const maxLines = 10_000

// restoreInput returns the input for iptables-restore that writes these chains. It is
// empty if there is nothing to write. A chain is written after the chains to which it
// leads. A chain is removed after the chains that led to it were written.
func (t *ruleset) restoreInput(write []chainID) string {
	order := func(id chainID) int {
		if _, needed := t.chains[id]; !needed {
			return lastRank + 1
		}
		return rank(t.suffix(id))
	}
	slices.SortFunc(write, func(a, b chainID) int {
		return cmp.Or(cmp.Compare(order(a), order(b)), strings.Compare(a.name, b.name))
	})
	var b strings.Builder
	for _, table := range tables {
		var part, remove []chainID
		lines := 0
		for _, id := range write {
			if id.table != table {
				continue
			}
			n := 1 + countRules(t.chains[id])
			if lines > 0 && lines+n > maxLines && t.run.flavour == flavourNFT {
				t.restorePart(&b, table, part, nil, nil)
				part, lines = nil, 0
			}
			part, lines = append(part, id), lines+n
			if _, needed := t.chains[id]; !needed {
				remove = append(remove, id)
			}
		}
		t.restorePart(&b, table, part, t.jumpLines[table], remove)
	}
	return b.String()
}

// restorePart writes the input for a transaction to b. It writes nothing if the transaction
// is empty.
func (t *ruleset) restorePart(b *strings.Builder, table string, write []chainID, jumpLines []string, remove []chainID) {
	if len(write)+len(jumpLines)+len(remove) == 0 {
		return
	}
	fmt.Fprintf(b, "*%s\n", table)
	// In flavour nft, iptables-restore 1.8.9 inserts each chain into a sorted list. This is
	// fastest if each new chain belongs at the beginning of the list.
	slices.SortFunc(write, func(a, b chainID) int { return strings.Compare(b.name, a.name) })
	// A line with a colon creates a chain, or removes the rules of an existing one.
	for _, id := range write {
		fmt.Fprintf(b, ":%s - [0:0]\n", id.name)
	}
	for _, id := range write {
		if rules := t.chains[id]; rules != "" {
			for rule := range strings.SplitSeq(rules, "\n") {
				b.WriteString("-A " + id.name + " " + rule + "\n")
			}
		}
	}
	for _, line := range jumpLines {
		b.WriteString(line + "\n")
	}
	for _, id := range remove {
		fmt.Fprintf(b, "-X %s\n", id.name)
	}
	b.WriteString("COMMIT\n")
}
