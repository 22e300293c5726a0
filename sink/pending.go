// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// unacked is a service whose present view the sink has not acknowledged. It must not be
// modified while it is in pending.byKey.
type unacked struct {
	key types.NamespacedName
	// The view last acknowledged since the pass began, or nil if there is none.
	old    *api.ServiceEndpoints
	reason reason
	// The value of Change.Unsure in the next delivery.
	unsure bool
	// The service is isolated: a Sync of this service alone has failed as a whole, so the
	// driver always delivers it alone.
	alone bool
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
	queued  reason = iota // received from the source, not delivered yet
	suspect               // delivered in a Sync that failed as a whole
	failing               // the service itself failed
	reasons
)

// changeTo returns the Change from the old view of s to a new view.
func (s *unacked) changeTo(new *api.ServiceEndpoints) Change {
	return Change{Key: s.key, Old: s.old, New: new, Unsure: s.unsure, TriggerTime: s.trigger}
}

// merge combines s with c, a later Change of the service. The result leads from the old
// view of s to the new view of c.
func (s *unacked) merge(c Change) Change {
	merged := s.changeTo(c.New)
	merged.TriggerTime = earlier(s.trigger, c.TriggerTime)
	return merged
}

// pending holds the unacknowledged services. The time to find the due services does not
// depend on the number of other services.
type pending struct {
	byKey   map[types.NamespacedName]*unacked
	byRetry *btree.BTreeG[*unacked] // without isolated services
	alone   *btree.BTreeG[*unacked] // isolated services, by retry time
	// When the next isolated service may be delivered.
	aloneAt time.Time
	claims  claimOwners // claims of the old views
	count   [reasons]int
	failing int // number of services whose field failures is not 0
}

func newPending() pending {
	const degree = 16
	byRetry := func(a, b *unacked) bool {
		return cmp.Or(a.retryAt.Compare(b.retryAt), api.CompareKeys(a.key, b.key)) < 0
	}
	return pending{
		byKey:   map[types.NamespacedName]*unacked{},
		byRetry: btree.NewG(degree, byRetry),
		alone:   btree.NewG(degree, byRetry),
		claims:  claimOwners{},
	}
}

// put adds s, or replaces the record of the same service with s.
func (p *pending) put(s *unacked) {
	p.remove(s.key)
	p.byKey[s.key] = s
	p.schedule(s).ReplaceOrInsert(s)
	for f := range nodeview.FrontendKeys(s.old) {
		p.claims.set(f.Claim(), s.key)
	}
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
	p.schedule(s).Delete(s)
	for f := range nodeview.FrontendKeys(s.old) {
		p.claims.unset(f.Claim(), s.key)
	}
	p.count[s.reason]--
	if s.failures > 0 {
		p.failing--
	}
}

func (p *pending) schedule(s *unacked) *btree.BTreeG[*unacked] {
	if s.alone {
		return p.alone
	}
	return p.byRetry
}

// nextRetry returns the time at which the first service is due. It returns false if no
// service is pending.
func (p *pending) nextRetry() (time.Time, bool) {
	s, ok := p.byRetry.Min()
	if a, more := p.alone.Min(); more {
		at := later(a.retryAt, p.aloneAt)
		if !ok || at.Before(s.retryAt) {
			return at, true
		}
	}
	if !ok {
		return time.Time{}, false
	}
	return s.retryAt, true
}

// first returns at most n services, in the order of their next delivery.
func (p *pending) first(n int) []types.NamespacedName {
	var keys []types.NamespacedName
	for _, list := range [...]*btree.BTreeG[*unacked]{p.byRetry, p.alone} {
		list.Ascend(func(s *unacked) bool {
			if len(keys) == n {
				return false
			}
			keys = append(keys, s.key)
			return true
		})
	}
	return keys
}

// hasDue reports whether a service that is not isolated is due.
func (p *pending) hasDue(now time.Time) bool {
	s, ok := p.byRetry.Min()
	return ok && !s.retryAt.After(now)
}

// due calls yield with each service that is due, except isolated services, in the order
// of retryAt. It stops if yield returns false.
func (p *pending) due(now time.Time, yield func(*unacked) bool) {
	p.byRetry.Ascend(func(s *unacked) bool { return !s.retryAt.After(now) && yield(s) })
}

// dueAlone returns an isolated service that is due, or nil if there is none.
func (p *pending) dueAlone(now time.Time) *unacked {
	if s, ok := p.alone.Min(); ok && !later(s.retryAt, p.aloneAt).After(now) {
		return s
	}
	return nil
}

// acknowledge removes the service with this key, because the sink has acknowledged its
// new view. If the old view of another service has a claim of this new view, acknowledge
// clears that old view. Otherwise the sink would use the old view to remove the claim
// from its new owner.
func (p *pending) acknowledge(key types.NamespacedName, new *api.ServiceEndpoints) {
	p.remove(key)
	if len(p.claims) == 0 {
		return
	}
	for f := range nodeview.FrontendKeys(new) {
		for _, other := range p.claims.conflicting(f.Claim(), key) {
			changed := *p.byKey[other]
			changed.old, changed.unsure = nil, true
			p.put(&changed)
		}
	}
}

// keys returns the sorted keys of all services except those in delivered.
func (p *pending) keys(delivered []Change) []types.NamespacedName {
	var keys []types.NamespacedName
	for key := range p.byKey {
		if !hasService(delivered, key) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, api.CompareKeys)
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
	other, ok := c[claim.IP][claim]
	return ok && other == key
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
		return slices.SortedFunc(maps.Keys(services), api.CompareKeys)
	}
	var services []types.NamespacedName
	for _, met := range [...]api.Claim{claim, whole} {
		if other, ok := at[met]; ok && other != key && !slices.Contains(services, other) {
			services = append(services, other)
		}
	}
	return services
}
