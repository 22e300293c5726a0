// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"strings"
)

// saved has the rules of one family in the kernel.
type saved struct {
	// chains has the rules of the instance's chains.
	chains map[chainID]string
	// jumps has the rules of other chains that lead to the instance's chains.
	jumps map[chainID]string
}

// readRules reads the rules in the kernel.
func (t *ruleset) readRules(ctx context.Context) (*saved, error) {
	return t.readTables(ctx, tables[:])
}

// readTables reads the rules in the tables of list.
func (t *ruleset) readTables(ctx context.Context, list []string) (*saved, error) {
	s := &saved{map[chainID]string{}, map[chainID]string{}}
	for _, table := range list {
		text, err := t.run.save(ctx, table)
		if err != nil {
			return nil, err
		}
		s.parse(text, table, t.opts.isOwn)
	}
	return s, nil
}

// readSets reads the elements of the instance's sets.
func (t *ruleset) readSets(ctx context.Context) (map[element]bool, error) {
	elements := map[element]bool{}
	for kind := range setTypes {
		list, err := t.run.elements(ctx, t.setName(kind))
		if err != nil {
			return nil, err
		}
		for _, text := range list {
			elements[element{kind, text}] = true
		}
	}
	return elements, nil
}

// parse adds the rules of a table from the output of iptables-save.
func (s *saved) parse(text, table string, isOwn func(string) bool) {
	own, jumps := map[string][]string{}, map[string][]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if name, ok := strings.CutPrefix(line, ":"); ok {
			if name, _, _ = strings.Cut(name, " "); isOwn(name) {
				own[name] = nil
			}
			continue
		}
		rest, ok := strings.CutPrefix(line, "-A ")
		if !ok {
			continue
		}
		name, rule, _ := strings.Cut(rest, " ")
		if _, ok := own[name]; ok {
			own[name] = append(own[name], rule)
		} else if at := strings.LastIndexByte(rule, ' '); at > 0 && isOwn(rule[at+1:]) && (strings.HasSuffix(rule[:at], "-j") || strings.HasSuffix(rule[:at], "-g")) {
			jumps[name] = append(jumps[name], rule)
		}
	}
	// Without the copies, the strings would keep the whole output in memory.
	for name, rules := range own {
		s.chains[chainID{table, strings.Clone(name)}] = joinCopy(rules)
	}
	for name, rules := range jumps {
		s.jumps[chainID{table, strings.Clone(name)}] = joinCopy(rules)
	}
}

// joinCopy joins rules in newly allocated memory. Given one string, strings.Join returns
// that string itself.
func joinCopy(rules []string) string {
	if len(rules) == 1 {
		return strings.Clone(rules[0])
	}
	return strings.Join(rules, "\n")
}

// foreignRule is a rule that leads from another chain to a chain of the instance.
type foreignRule struct {
	chain chainID
	rule  string
}

// target returns the chain of the instance to which the rule leads.
func (r foreignRule) target() chainID {
	return chainID{r.chain.table, r.rule[strings.LastIndexByte(r.rule, ' ')+1:]}
}

// foreign returns the rules, other than the given jumps, that lead to chains of the
// instance. It deletes the jumps in the kernel from the argument jumps. A rule also
// counts as the jump of its chain if inexact has the digest of the rule.
func (s *saved) foreign(jumps map[chainID]string, inexact map[chainID]uint64) (list []foreignRule) {
	for id, rules := range s.jumps {
		for rule := range strings.SplitSeq(rules, "\n") {
			want := jumps[id]
			if want != "" && (rule == want || digest(rule) == inexact[id]) {
				delete(jumps, id)
			} else {
				list = append(list, foreignRule{id, rule})
			}
		}
	}
	return list
}
