// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/internal/kernelnode"
	"k8s.io/klog/v2"
)

// verify compares the rules and sets in the kernel with those that commit has written. It
// returns a [kernelnode.Difference] if another program has changed something.
func (t *ruleset) verify(ctx context.Context) error {
	if t.beginErr != nil {
		return nil
	}
	generation, err := t.run.generation(ctx)
	if err != nil {
		return err
	}
	if generation == 0 || generation != t.verified {
		if err := t.verifyRules(ctx); err != nil {
			return err
		}
		t.setVerified(generation)
	}
	if !t.withSets {
		return nil
	}
	if err := t.run.createSets(ctx, t.allSets()); err != nil {
		return err
	}
	elements, err := t.readSets(ctx)
	if err != nil {
		return err
	}
	for e := range elements {
		if _, ok := t.inSets[e]; !ok {
			return kernelnode.Differs("%s was added to set %s", e.text, t.setName(e.set))
		}
	}
	for e, sure := range t.inSets {
		if sure && !elements[e] {
			return kernelnode.Differs("%s was removed from set %s", e.text, t.setName(e.set))
		}
	}
	return t.verifySources(ctx)
}

// setVerified records that the rules in the kernel are known in a generation.
func (t *ruleset) setVerified(generation uint32) {
	t.verified, t.verifiedAt = generation, *t.run.transactions
}

func (t *ruleset) verifyRules(ctx context.Context) error {
	saved, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	for _, c := range t.comparisons(saved) {
		for id := range c.is {
			if _, ok := c.want[id]; !ok && !t.changedChains[id] {
				return kernelnode.Differs("%s was added", t.describe(id))
			}
		}
		for id, rules := range c.want {
			text, exists := c.is[id]
			switch {
			case t.changedChains[id]: // a Sync failed, so the kernel may have other rules
			case !exists:
				return kernelnode.Differs("%s was deleted", t.describe(id))
			case text == rules:
				delete(t.inexact, id)
			case !sameLength(text, rules):
				return kernelnode.Differs("%s has another number of rules", t.describe(id))
			case t.inexact[id] == digest(text):
			case t.written[id]:
				t.inexact[id] = digest(text)
			default:
				t.edited = true
				return kernelnode.Differs("%s was changed", t.describe(id))
			}
			delete(t.written, id)
		}
	}
	return nil
}

// comparison has the rules of chains in the kernel, and the rules that these chains
// should have.
type comparison struct{ is, want map[chainID]string }

// comparisons returns the comparisons for the chains of the instance, and for the rules
// that lead to them. It omits the rules of t.foreign.
func (t *ruleset) comparisons(s *saved) [2]comparison {
	jumps := map[chainID]string{}
	for id, rules := range s.jumps {
		list := slices.DeleteFunc(strings.Split(rules, "\n"), func(rule string) bool {
			return slices.Contains(t.foreign, foreignRule{id, rule})
		})
		put(jumps, id, strings.Join(list, "\n"), len(list) > 0)
	}
	return [2]comparison{{s.chains, t.chains}, {jumps, t.jumps()}}
}

func (t *ruleset) describe(id chainID) string {
	if t.opts.isOwn(id.name) {
		return fmt.Sprintf("chain %s of table %s", id.name, id.table)
	}
	return fmt.Sprintf("the jump from chain %s of table %s", id.name, id.table)
}

func sameLength(a, b string) bool {
	return (a == "") == (b == "") && strings.Count(a, "\n") == strings.Count(b, "\n")
}

// checkEdited is called after a pass. If verify found edited rules before the pass,
// checkEdited reads the rules again. If iptables-save still prints other rules for a
// chain, checkEdited adds the chain to inexact, because the pass has written the right
// rules.
func (t *ruleset) checkEdited(ctx context.Context) error {
	if !t.edited {
		return nil
	}
	saved, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	t.edited, t.inexact, t.written = false, map[chainID]uint64{}, map[chainID]bool{}
	var example string
	for _, c := range t.comparisons(saved) {
		for id, rules := range c.want {
			if text, exists := c.is[id]; exists && text != rules && sameLength(text, rules) {
				t.inexact[id] = digest(text)
				example = t.describe(id)
			}
		}
	}
	if t.rewords = example != ""; t.rewords {
		klog.FromContext(ctx).Info("iptables prints rules of some chains in another form; until the next comparison, a change of a new chain by another program is found only if it changes the number of rules",
			"family", t.family, "chains", len(t.inexact), "example", example)
	}
	return nil
}
