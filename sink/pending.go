// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/shrink"
	"github.com/kpng-project/kpng/internal/updates"
	"k8s.io/apimachinery/pkg/types"
)

// unacked is a service whose present view the sink has not acknowledged. It must not be
// modified while it is in pending.byKey.
type unacked struct {
	key types.NamespacedName
	// The view last acknowledged since the pass began, if any.
	old updates.View
	// True if the old or the new view is large. Then the service gets a Sync of its own.
	large  bool
	reason reason
	// The value of Change.Unsure in the next delivery.
	unsure bool
	// The last revision at which the acknowledged view was the present view.
	since uint64
	// The oldest trigger time of the changes; zero if there is none.
	trigger time.Time
	// When to deliver the service, unless it changes earlier.
	retryAt time.Time
	// The number of failures in a row, and the last error.
	failures int
	err      error
}

// reason says why a service is pending.
type reason uint8

const (
	queued   reason = iota // received from the source, not delivered yet
	suspect                // delivered in a Sync that failed as a whole
	failing                // the service itself failed
	isolated               // a Sync of this service alone failed as a whole, so it is always delivered alone
	reasons
)

// changeTo returns the Change from the old view of s to a new view.
func (s *unacked) changeTo(new *api.View) Change {
	return Change{Key: s.key, Old: s.old.Get(), New: new, Unsure: s.unsure, TriggerTime: s.trigger}
}

// computed returns the Change from the old view of s to the present view. It returns an
// error if the source panics.
func (s *unacked) computed(u *updates.Update) (c Change, err error) {
	defer func() {
		if r := recover(); r != nil {
			c, err = Change{Key: s.key}, fmt.Errorf("compute view: panic in source: %v", r)
		}
	}()
	return s.changeTo(u.View(s.key)), nil
}

// pending holds the unacknowledged services. The time to find the due services does not
// depend on the number of other services.
type pending struct {
	byKey map[types.NamespacedName]*unacked
	most  shrink.Size // of byKey
	// Each service is in one of these trees, which are sorted by retryAt. The tree alone has
	// the isolated services, the tree large has other large services, and the tree small has
	// the rest.
	small, large, alone *btree.BTreeG[*unacked]
	// When the next isolated service may be delivered.
	aloneAt time.Time
	count   [reasons]int
	failing int // number of services whose field failures is not 0
	claims  oldClaims
}

func newPending() pending {
	newTree := func() *btree.BTreeG[*unacked] {
		const degree = 16
		return btree.NewG(degree, func(a, b *unacked) bool {
			return cmp.Or(a.retryAt.Compare(b.retryAt), ordering.Keys(a.key, b.key)) < 0
		})
	}
	return pending{
		byKey: map[types.NamespacedName]*unacked{},
		small: newTree(), large: newTree(), alone: newTree(),
		claims: newOldClaims(),
	}
}

// put adds s, or replaces the record of the same service with s.
func (p *pending) put(s *unacked) {
	p.remove(s.key)
	p.byKey[s.key] = s
	p.claims.changed[s.key] = struct{}{}
	p.schedule(s).ReplaceOrInsert(s)
	p.count[s.reason]++
	if s.failures > 0 {
		p.failing++
	}
}

func (p *pending) remove(key types.NamespacedName) {
	s := p.byKey[key]
	if s == nil {
		return
	}
	delete(p.byKey, key)
	p.byKey = shrink.Map(p.byKey, &p.most)
	p.claims.changed[key] = struct{}{}
	p.schedule(s).Delete(s)
	p.count[s.reason]--
	if s.failures > 0 {
		p.failing--
	}
}

func (p *pending) schedule(s *unacked) *btree.BTreeG[*unacked] {
	switch {
	case s.reason == isolated:
		return p.alone
	case s.large:
		return p.large
	}
	return p.small
}

// nextRetry returns the time at which the first service is due. It returns false if no
// service is pending.
func (p *pending) nextRetry() (at time.Time, ok bool) {
	for _, tree := range p.trees() {
		if s, some := tree.Min(); some {
			if due := p.dueAt(s); !ok || due.Before(at) {
				at, ok = due, true
			}
		}
	}
	return at, ok
}

func (p *pending) trees() [3]*btree.BTreeG[*unacked] {
	return [...]*btree.BTreeG[*unacked]{p.small, p.large, p.alone}
}

func (p *pending) dueAt(s *unacked) time.Time {
	if s.reason == isolated {
		return later(s.retryAt, p.aloneAt)
	}
	return s.retryAt
}

// first returns at most n services, in the order of their next delivery.
func (p *pending) first(n int) []types.NamespacedName {
	var keys []types.NamespacedName
	for _, tree := range p.trees() {
		tree.Ascend(func(s *unacked) bool {
			if len(keys) == n {
				return false
			}
			keys = append(keys, s.key)
			return true
		})
	}
	return keys
}

// due calls the function yield with each service that is due, except large and isolated
// services, in the order of retryAt. It stops if yield returns false.
func (p *pending) due(now time.Time, yield func(*unacked) bool) {
	p.small.Ascend(func(s *unacked) bool { return !s.retryAt.After(now) && yield(s) })
}

// dueLarge returns a large service that is due and not isolated, or nil if there is none.
func (p *pending) dueLarge(now time.Time) *unacked { return p.firstDue(p.large, now) }

// dueAlone returns an isolated service that is due, or nil if there is none.
func (p *pending) dueAlone(now time.Time) *unacked { return p.firstDue(p.alone, now) }

// acknowledgedLarge counts the queued large services of which the sink has acknowledged a
// view. They do not delay the end of a pass, because they may change all the time.
func (p *pending) acknowledgedLarge() (n int) {
	p.large.Ascend(func(s *unacked) bool {
		if !s.unsure {
			n++
		}
		return true
	})
	return n
}

// firstDue returns the first service of a tree if it is due, or nil.
func (p *pending) firstDue(tree *btree.BTreeG[*unacked], now time.Time) *unacked {
	if s, ok := tree.Min(); ok && !p.dueAt(s).After(now) {
		return s
	}
	return nil
}

// takenBy returns new records for the services whose old view has a claim of an
// acknowledged change. The new records have no old view. Otherwise the sink would use
// the old view to remove the claim from its new owner.
func (p *pending) takenBy(c *Change) (records []*unacked) {
	if frontends.Same(c.Old, c.New) {
		return nil // the sink had acknowledged these claims before
	}
	p.claims.update(p.byKey)
	if len(p.claims.owners) == 0 {
		return nil
	}
	taken := map[types.NamespacedName]struct{}{}
	for f := range frontends.Keys(c.New) {
		for _, other := range p.claims.owners.conflicting(f.Claim(), c.Key) {
			taken[other] = struct{}{}
		}
	}
	for other := range taken {
		record := *p.byKey[other]
		record.old, record.unsure = updates.View{}, true
		records = append(records, &record)
	}
	return records
}

// oldClaims is an index of the claims of old views. It is only updated when it is needed,
// because the old views of large services have many claims.
type oldClaims struct {
	owners  claimOwners
	indexed map[types.NamespacedName]*api.View // the old views in owners
	changed map[types.NamespacedName]struct{}  // services whose records have changed since the last update
}

func newOldClaims() oldClaims {
	return oldClaims{
		owners: claimOwners{}, indexed: map[types.NamespacedName]*api.View{},
		changed: map[types.NamespacedName]struct{}{},
	}
}

// update updates the index to the given records.
func (o *oldClaims) update(records map[types.NamespacedName]*unacked) {
	added := map[types.NamespacedName]*api.View{}
	for key := range o.changed {
		var now *api.View
		if s := records[key]; s != nil {
			now = s.old.Get()
		}
		before := o.indexed[key]
		if now == before {
			continue
		}
		for f := range frontends.Keys(before) {
			o.owners.unset(f.Claim(), key)
		}
		delete(o.indexed, key)
		if now != nil {
			o.indexed[key], added[key] = now, now
		}
	}
	o.changed = shrink.Cleared(o.changed)
	for key, view := range added {
		for f := range frontends.Keys(view) {
			o.owners.set(f.Claim(), key)
		}
	}
}

// unsure returns the sorted keys of all services whose last delivery the sink has not
// acknowledged, except the services in the list delivered.
func (p *pending) unsure(delivered []Change) []types.NamespacedName {
	var keys []types.NamespacedName
	for key, s := range p.byKey {
		if s.unsure && !hasService(delivered, key) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, ordering.Keys)
	return keys
}

// applied returns the last revision up to which the sink has acknowledged everything. The
// result is not greater than the argument position.
func (p *pending) applied(position uint64) uint64 {
	for _, s := range p.byKey {
		position = min(position, s.since)
	}
	return position
}

// claimOwners maps claims to services. It groups claims by address, because a claim of a
// whole address excludes all other claims at this address.
type claimOwners map[netip.Addr]map[api.Claim]types.NamespacedName

func (c claimOwners) set(claim api.Claim, key types.NamespacedName) {
	if c[claim.IP] == nil {
		c[claim.IP] = map[api.Claim]types.NamespacedName{}
	}
	c[claim.IP][claim] = key
}

func (c claimOwners) has(claim api.Claim, key types.NamespacedName) bool {
	return c[claim.IP][claim] == key
}

// unset removes the given claim if the service with this key has it.
func (c claimOwners) unset(claim api.Claim, key types.NamespacedName) {
	if !c.has(claim, key) {
		return
	}
	delete(c[claim.IP], claim)
	if len(c[claim.IP]) == 0 {
		delete(c, claim.IP)
	}
}

// conflicting returns the services whose claims exclude the given claim. It omits the
// service with this key.
func (c claimOwners) conflicting(claim api.Claim, key types.NamespacedName) []types.NamespacedName {
	at := c[claim.IP]
	if len(at) == 0 {
		return nil
	}
	whole := api.Claim{IP: claim.IP}
	if claim == whole {
		services := map[types.NamespacedName]struct{}{}
		for _, other := range at {
			if other != key {
				services[other] = struct{}{}
			}
		}
		return slices.SortedFunc(maps.Keys(services), ordering.Keys)
	}
	var services []types.NamespacedName
	for _, met := range [...]api.Claim{claim, whole} {
		if other, ok := at[met]; ok && other != key && !slices.Contains(services, other) {
			services = append(services, other)
		}
	}
	return services
}
