// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"maps"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// prune removes the chains, entries and elements that no service needs, if they existed
// when the pass began. Failing services keep their entries and the chains to which the
// entries lead. If a failing service was not delivered in this pass, prune keeps all
// elements, because any of them may belong to this service.
func (t *ruleset) prune(ctx context.Context, failing map[types.NamespacedName]bool) error {
	if t.beginErr != nil {
		return nil
	}
	needed := map[chainID]bool{}
	for key, r := range t.records {
		if r.old && !failing[key] {
			t.replace(key, t.record(nil, nil), false)
			continue
		}
		for id := range r.chains {
			needed[id] = true
		}
		if r.old {
			for id, rest := range r.entries {
				t.reach(id.chain.table, rest, needed)
			}
		}
	}
	for name := range t.sources {
		needed[chainID{mangle, name}] = true
	}
	for id := range t.chains {
		if !t.isDispatch(id) && !needed[id] {
			t.setChain(id, "", false)
		}
	}
	for key := range failing {
		if !t.delivered[key] {
			clear(t.held) // so the loop below keeps the reference counts of these elements one too high
		}
	}
	for _, list := range t.held {
		for _, e := range list {
			// Such an element has the address of an endpoint, and any failing service may
			// need the element.
			if e.set != hairpinSet || len(failing) == 0 {
				t.use(e, -1)
			}
		}
	}
	clear(t.held)
	t.delivered, t.counted, t.undo = nil, nil, nil
	if err := t.commitOld(ctx); err != nil {
		return err
	}
	return t.checkEdited(ctx)
}

var jumpPattern = regexp.MustCompile(`-j (\S+)`)

// reach sets needed[c] to true for each chain c to which the rules lead.
func (t *ruleset) reach(table, rules string, needed map[chainID]bool) {
	for _, m := range jumpPattern.FindAllStringSubmatch(rules, -1) {
		id := chainID{table, m[1]}
		if next, ok := t.chains[id]; ok && !needed[id] {
			needed[id] = true
			t.reach(table, next, needed)
		}
	}
}

// remove removes the instance's chains and the rules that lead to them. In flavour nft,
// it also deletes the tables that are empty after that.
func (t *ruleset) remove(ctx context.Context) error {
	if t.run.flavour == flavourLegacy {
		s, err := t.readLoadedRules(ctx)
		if err != nil {
			return err
		}
		return t.removeChains(ctx, s)
	}
	has, err := t.hasChains(ctx)
	if has {
		var s *saved
		if s, err = t.readRules(ctx); err == nil {
			err = t.removeChains(ctx, s)
		}
	}
	if err != nil {
		return err
	}
	return deleteEmptyTables(ctx, t.opts.NetNS, t.family)
}

// removeChains removes the chains in s and the rules that lead to them.
func (t *ruleset) removeChains(ctx context.Context, s *saved) error {
	missing := t.jumps()
	t.foreign = s.foreign(missing, nil)
	t.chains, t.changedChains, t.jumpLines = map[chainID]string{}, map[chainID]bool{}, map[string][]string{}
	if err := t.deleteForeign(ctx); err != nil {
		return err
	}
	for id, rule := range t.jumps() {
		if _, ok := missing[id]; !ok {
			t.jumpLines[id.table] = append(t.jumpLines[id.table], "-D "+id.name+" "+rule)
		}
	}
	return t.run.restore(ctx, t.restoreInput(slices.Collect(maps.Keys(s.chains))))
}
