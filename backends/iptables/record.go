// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// record has the rules and elements that a service needs.
type record struct {
	*rendered
	view *api.View
	// old is true if the record has no view. Then it has the entries and elements that the
	// kernel had when the pass began.
	old bool
}

// claim is an entry of a dispatch chain.
type claim struct {
	owner types.NamespacedName
	rest  string // the part of the rule after its match
}

func (t *ruleset) allSets() map[string]string {
	sets := map[string]string{}
	for kind, setType := range setTypes {
		sets[t.setName(kind)] = setType
	}
	return sets
}

// record returns the record for a view. The argument last is the previous record of the
// service in the same environment, or nil.
func (t *ruleset) record(view *api.View, last *record) *record {
	return &record{rendered: t.renderService(view, last), view: view}
}

// replace replaces the record of a service. If other services have entries with the same
// matches, the service takes these matches only if take is true.
func (t *ruleset) replace(key types.NamespacedName, next *record, take bool) {
	last := t.records[key]
	if last == nil {
		last = &record{rendered: newRendered()}
	}
	for id := range last.chains {
		if _, ok := next.chains[id]; !ok && !t.holding() {
			t.setChain(id, "", false)
		}
	}
	for id, rules := range next.chains {
		t.setChain(id, rules, true)
	}
	for id := range last.entries {
		if _, ok := next.entries[id]; !ok {
			t.unclaim(id, key)
		}
	}
	for id, rest := range next.entries {
		t.claim(id, claim{key, rest}, take)
	}
	for e := range last.elements {
		if !next.elements[e] {
			t.use(e, -1)
		}
	}
	for e := range next.elements {
		if !last.elements[e] {
			t.use(e, 1)
		}
	}
	t.replaceSources(last.sources, next.sources)
	t.setRecord(key, next)
}

func (t *ruleset) setRecord(key types.NamespacedName, next *record) {
	last, had := t.records[key]
	t.undo = append(t.undo, func() { t.putRecord(key, last, had) })
	t.putRecord(key, next, !next.isEmpty())
}

func (t *ruleset) putRecord(key types.NamespacedName, r *record, keep bool) {
	if last := t.records[key]; last != nil {
		for id := range last.entries {
			if isShared(id) {
				delete(t.sharers[id], key)
				put(t.sharers, id, t.sharers[id], len(t.sharers[id]) > 0)
			}
		}
	}
	put(t.records, key, r, keep)
	if keep {
		for id := range r.entries {
			t.addSharer(id, key)
		}
	}
}

// addSharer records that a service needs an entry, if the entry is shared.
func (t *ruleset) addSharer(id entryID, key types.NamespacedName) {
	if !isShared(id) {
		return
	}
	if t.sharers[id] == nil {
		t.sharers[id] = map[types.NamespacedName]bool{}
	}
	t.sharers[id][key] = true
}

// put sets the value of a key, or deletes the key if keep is false.
func put[K comparable, V any](m map[K]V, key K, value V, keep bool) {
	if keep {
		m[key] = value
	} else {
		delete(m, key)
	}
}

// hasForeign reports whether a rule of t.foreign leads to a chain.
func (t *ruleset) hasForeign(id chainID) bool {
	return slices.ContainsFunc(t.foreign, func(r foreignRule) bool { return r.target() == id })
}

// setChain sets the rules of a chain. If keep is false, it removes the chain unless a
// rule of t.foreign leads to the chain.
func (t *ruleset) setChain(id chainID, rules string, keep bool) {
	keep = keep || t.hasForeign(id)
	last, had := t.chains[id]
	if had == keep && last == rules {
		return
	}
	t.undo = append(t.undo, func() {
		put(t.chains, id, last, had)
		t.changedChains[id] = true
	})
	put(t.chains, id, rules, keep)
	t.changedChains[id] = true
}

// use adds n to the reference count of an element.
func (t *ruleset) use(e element, n int) {
	t.undo = append(t.undo, func() { t.addUsers(e, -n) })
	t.addUsers(e, n)
}

func (t *ruleset) addUsers(e element, n int) {
	users := t.users[e] + n
	put(t.users, e, users, users > 0)
	t.changedElements[e] = true
}

// claim sets the entry of a match. If take is true, the service takes the match from
// another service. If c.rest is empty, the match gets no entry.
func (t *ruleset) claim(id entryID, c claim, take bool) {
	is, had := t.claims[id.chain][id.match]
	if is != c && (take || is.owner == c.owner) && (had || c.rest != "") {
		t.setClaim(id, c, c.rest != "")
	}
}

// unclaim removes the entry of a service from a dispatch chain. Another service that needs
// the same entry becomes its owner.
func (t *ruleset) unclaim(id entryID, owner types.NamespacedName) {
	is, had := t.claims[id.chain][id.match]
	if !had || is.owner != owner {
		return
	}
	for other := range t.sharers[id] {
		if rest := t.records[other].entries[id]; rest != "" && other != owner {
			t.setClaim(id, claim{other, rest}, true)
			return
		}
	}
	t.setClaim(id, claim{}, false)
}

// isShared reports whether several services may need an entry. There is only one kind of
// shared entry: without sets, it rejects packets to unknown ports of a cluster IP.
func isShared(id entryID) bool {
	return id.chain.table == filter && !strings.Contains(id.match, "--dport")
}

func (t *ruleset) setClaim(id entryID, c claim, keep bool) {
	last, had := t.claims[id.chain][id.match]
	if id.chain.table == mangle && had && !keep {
		if t.lingering[id.chain] == nil {
			t.lingering[id.chain] = map[string]string{}
		}
		t.lingering[id.chain][id.match] = last.rest
	}
	t.undo = append(t.undo, func() { t.putClaim(id, last, had) })
	t.putClaim(id, c, keep)
}

func (t *ruleset) putClaim(id entryID, c claim, keep bool) {
	if t.claims[id.chain] == nil {
		t.claims[id.chain] = map[string]claim{}
	}
	put(t.claims[id.chain], id.match, c, keep)
	t.growOrPrune(id.chain, len(t.claims[id.chain]) > 0)
}
