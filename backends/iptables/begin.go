// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// beginPass starts a pass. If sets are the cause of a failure, the ruleset uses rules in
// place of sets. If an error is permanent and affects only this family, beginPass stores it
// in t.broken and returns nil.
func (t *ruleset) beginPass(ctx context.Context) error {
	t.beginErr, t.withSets = nil, t.run.ipset != ""
	err := t.begin(ctx)
	if t.setsFailed(ctx, err) {
		t.withSets = false
		setErr := err
		if err = t.begin(ctx); err == nil {
			klog.FromContext(ctx).Error(setErr, "Cannot use sets; using rules in place of sets until another pass", "family", t.family)
		}
	}
	switch {
	case err == nil:
		t.failures = 0
	case isGeneral(err) || ctx.Err() != nil:
		return err
	default:
		if t.failures++; t.failures < attempts {
			return err
		}
		t.beginErr = fmt.Errorf("%s: %w", t.family, err)
	}
	return nil
}

// setsFailed reports whether sets may be the cause of err, the result of begin. The error
// of a program that refuses sets does not always mention sets. But if the kernel has a rule
// with a set, sets are not the cause.
func (t *ruleset) setsFailed(ctx context.Context, err error) bool {
	var failed *programError
	if !t.withSets || ctx.Err() != nil || isGeneral(err) || !errors.As(err, &failed) {
		return false
	}
	if failed.program == t.run.ipset {
		return true
	}
	text, err := t.run.save(ctx, filter)
	return err == nil && !strings.Contains(text, t.setMatch(dropSet, "dst,dst"))
}

// begin reads the rules and sets in the kernel, and creates the skeleton. Existing chains,
// entries and elements stay until prune.
func (t *ruleset) begin(ctx context.Context) error {
	elements, inSources := map[element]bool{}, map[string]uint64{}
	if t.withSets {
		var err error
		for range setAttempts {
			if err = t.run.replaceSets(ctx, t.allSets()); err == nil {
				elements, err = t.readSets(ctx)
			}
			if err == nil {
				inSources, err = t.readSources(ctx)
			}
			if err == nil || ctx.Err() != nil {
				break
			}
		}
		if err != nil {
			return err
		}
	}
	generation, err := t.run.generation(ctx)
	if err != nil {
		return err
	}
	saved, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	*t = ruleset{
		verified: generation, verifiedAt: *t.run.transactions,
		renderer: t.renderer, run: t.run, failures: t.failures, edited: t.edited,
		inexact: t.inexact, rewords: t.rewords, written: map[chainID]bool{},
		records:         map[types.NamespacedName]*record{},
		sharers:         map[entryID]map[types.NamespacedName]bool{},
		chains:          map[chainID]string{},
		claims:          map[chainID]map[string]claim{},
		branches:        map[chainID]map[string]bool{},
		subchains:       map[chainID][]chainID{},
		lingering:       map[chainID]map[string]string{},
		users:           map[element]int{},
		sources:         map[string]sourceUsers{},
		inKernel:        map[chainID]uint64{},
		inSets:          elements,
		sure:            map[string]int{},
		inSources:       inSources,
		held:            map[string][]element{},
		delivered:       map[types.NamespacedName]bool{},
		counted:         t.counting(),
		changedChains:   map[chainID]bool{},
		changedElements: map[element]bool{},
		changedSources:  map[string]bool{},
		jumpLines:       map[string][]string{},
	}
	missing := t.jumps()
	t.foreign = saved.foreign(missing, t.inexact)
	for id, rule := range missing {
		t.jumpLines[id.table] = append(t.jumpLines[id.table], "-I "+id.name+" "+rule)
	}
	for e := range elements {
		addr, _, _ := strings.Cut(e.text, ",")
		t.held[addr] = append(t.held[addr], e)
		t.users[e]++
		t.sure[e.set]++
	}
	for name := range inSources {
		t.changedSources[name] = true // so that prune destroys the set if no service needs it
	}
	for id, rules := range saved.chains {
		t.inKernel[id] = digest(rules)
		if !t.isDispatch(id) {
			t.chains[id] = rules
			continue
		}
		t.changedChains[id] = true
		if !hasEntries.MatchString(t.suffix(id)) {
			continue // renderDispatch computes the rules of the chain again
		}
		for rule := range strings.SplitSeq(rules, "\n") {
			match, rest := splitEntry(rule)
			if rest == "" || addressChain.MatchString(strings.TrimPrefix(rest, jump(t.opts.prefix()))) {
				continue
			}
			entry := entryID{t.home(id, match), match}
			owner := ownerOf(rest)
			t.claim(entry, claim{owner, rest}, true)
			t.oldRecord(owner).entries[entry] = rest
			t.addSharer(entry, owner)
		}
	}
	for _, table := range tables {
		t.changedChains[chainID{table, t.name(services)}] = true
	}
	t.replace(skeletonKey, &record{rendered: t.skeleton()}, false)
	t.undo = nil
	if err := t.commit(ctx); err != nil {
		return err
	}
	return t.deleteForeign(ctx)
}

// deleteForeign deletes the rules of t.foreign. It keeps and logs the rules that iptables
// refuses to delete.
func (t *ruleset) deleteForeign(ctx context.Context) error {
	rules := t.foreign
	t.foreign = nil
	for _, r := range rules {
		err := t.run.restore(ctx, fmt.Sprintf("*%s\n-D %s %s\nCOMMIT\n", r.chain.table, r.chain.name, r.rule))
		if err != nil {
			if isGeneral(err) || ctx.Err() != nil {
				return err
			}
			t.foreign = append(t.foreign, r)
			klog.FromContext(ctx).Error(err, "Cannot delete a rule that leads to a chain of this instance; delete it by its number",
				"family", t.family, "table", r.chain.table, "chain", r.chain.name, "rule", r.rule)
		}
		t.changedChains[r.target()] = true
	}
	return nil
}

// splitEntry splits a rule of a dispatch chain after its match.
func splitEntry(rule string) (match, rest string) {
	at := strings.Index(rule, "-j ")
	for _, match := range []string{"-m comment ", "-m set "} {
		if i := strings.Index(rule, match); i >= 0 {
			at = min(at, i)
		}
	}
	if at < 0 {
		return rule, ""
	}
	return strings.TrimSuffix(rule[:at], " "), rule[at:]
}

var commentPattern = regexp.MustCompile(`--comment "?([^"/:]+)/([^"/: ]+)`)

// ownerOf returns the service that the comment of an entry names. Without such a comment,
// it returns the empty key.
func ownerOf(rest string) (owner types.NamespacedName) {
	if m := commentPattern.FindStringSubmatch(rest); m != nil {
		owner.Namespace, owner.Name = strings.Clone(m[1]), strings.Clone(m[2])
	}
	return owner
}

// oldRecord returns the record of a service that this pass has not programmed.
func (t *ruleset) oldRecord(key types.NamespacedName) *record {
	if t.records[key] == nil {
		t.records[key] = &record{rendered: newRendered(), old: true}
	}
	return t.records[key]
}
