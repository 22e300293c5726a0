// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// unacked is a service that the sink has not acknowledged as the source has it. It is
// not modified while it is in a pending.
type unacked struct {
	key types.NamespacedName
	// old is the view last acknowledged since the pass began, nil if there is none.
	old *api.ServiceEndpoints
	// reason is why the service is pending.
	reason reason
	// unsure is Change.Unsure for the next delivery.
	unsure bool
	// alone says that a Sync of this service only failed as a whole. The service is
	// delivered alone from then on.
	alone bool
	// since is the last revision at which the sink had the right view.
	since uint64
	// trigger is the oldest trigger time of the changes, zero if there is none.
	trigger time.Time
	// retryAt is when the service is delivered if it does not change before.
	retryAt time.Time
	// failures is how often in a row the service failed, and err why it failed last.
	failures int
	err      error
}

// reason is why a service is pending.
type reason uint8

const (
	queued  reason = iota // taken from the source and not delivered yet
	suspect               // delivered in a Sync that failed as a whole
	failing               // failed by itself
	reasons
)

// change returns the change to deliver, where new is the service's present view.
func (s *unacked) change(new *api.ServiceEndpoints) Change {
	return Change{Key: s.key, Old: s.old, New: new, Unsure: s.unsure, TriggerTime: s.trigger}
}

// merge returns c, a later change of the service, as a change from what was last
// acknowledged.
func (s *unacked) merge(c Change) Change {
	merged := s.change(c.New)
	merged.TriggerTime = earlier(s.trigger, c.TriggerTime)
	return merged
}

// pending holds the services that the sink has not acknowledged. The cost of finding
// those that are due does not depend on the number of the others.
type pending struct {
	byKey   map[types.NamespacedName]*unacked
	byRetry *btree.BTreeG[*unacked] // without those that come alone
	alone   *btree.BTreeG[*unacked] // those that come alone, by retry
	// aloneAt is when the next one that comes alone may be delivered.
	aloneAt time.Time
	claims  claims // of the old views
	count   [reasons]int
	failing int // how many have failures
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
		claims:  claims{},
	}
}

// put adds s, in place of an earlier one with its key.
func (p *pending) put(s *unacked) {
	p.remove(s.key)
	p.byKey[s.key] = s
	p.schedule(s).ReplaceOrInsert(s)
	for f := range nodeview.Frontends(s.old) {
		p.claims.set(f.Claim(), s.key)
	}
	p.count[s.reason]++
	if s.failures > 0 {
		p.failing++
	}
}

// remove removes the service key, if it is pending.
func (p *pending) remove(key types.NamespacedName) {
	s := p.byKey[key]
	if s == nil {
		return
	}
	delete(p.byKey, key)
	p.schedule(s).Delete(s)
	for f := range nodeview.Frontends(s.old) {
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

// nextRetry returns when the first service is due, and false if none is pending.
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

// hasDue reports whether a service is due that does not come alone.
func (p *pending) hasDue(now time.Time) bool {
	s, ok := p.byRetry.Min()
	return ok && !s.retryAt.After(now)
}

// due calls yield with each service that is due and does not come alone, those that
// wait longest first, until it returns false.
func (p *pending) due(now time.Time, yield func(*unacked) bool) {
	p.byRetry.Ascend(func(s *unacked) bool { return !s.retryAt.After(now) && yield(s) })
}

// dueAlone returns a service that is due and comes alone, nil if there is none.
func (p *pending) dueAlone(now time.Time) *unacked {
	if s, ok := p.alone.Min(); ok && !later(s.retryAt, p.aloneAt).After(now) {
		return s
	}
	return nil
}

// acknowledge removes the service key, which the sink acknowledged with the view new.
// Where the old view of another service has a claim of new, that service forgets its
// old view: a sink must not remove from the new owner what the old view names.
func (p *pending) acknowledge(key types.NamespacedName, new *api.ServiceEndpoints) {
	p.remove(key)
	if len(p.claims) == 0 {
		return
	}
	for f := range nodeview.Frontends(new) {
		for _, other := range p.claims.meet(f.Claim(), key) {
			changed := *p.byKey[other]
			changed.old, changed.unsure = nil, true
			p.put(&changed)
		}
	}
}

// keys returns the keys of all services without those in delivered, in order.
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

// applied returns the last revision up to which nothing is pending, which is
// reached if nothing is pending at all.
func (p *pending) applied(reached uint64) uint64 {
	for _, s := range p.byKey {
		reached = min(reached, s.since)
	}
	return reached
}

// claims tells which service has a claim. The claims are grouped by address, as a claim
// of a whole address excludes all others there.
type claims map[netip.Addr]map[api.Claim]types.NamespacedName

func (c claims) set(claim api.Claim, key types.NamespacedName) {
	if c[claim.IP] == nil {
		c[claim.IP] = map[api.Claim]types.NamespacedName{}
	}
	c[claim.IP][claim] = key
}

// has reports whether key has a claim.
func (c claims) has(claim api.Claim, key types.NamespacedName) bool {
	other, ok := c[claim.IP][claim]
	return ok && other == key
}

// unset removes a claim if key has it.
func (c claims) unset(claim api.Claim, key types.NamespacedName) {
	if !c.has(claim, key) {
		return
	}
	delete(c[claim.IP], claim)
	if len(c[claim.IP]) == 0 {
		delete(c, claim.IP)
	}
}

// meet returns the services except key that have a claim which excludes this one.
func (c claims) meet(claim api.Claim, key types.NamespacedName) []types.NamespacedName {
	var services []types.NamespacedName
	add := func(other types.NamespacedName, ok bool) {
		if ok && other != key && !slices.Contains(services, other) {
			services = append(services, other)
		}
	}
	at, whole := c[claim.IP], api.Claim{IP: claim.IP}
	if claim == whole {
		for _, other := range at {
			add(other, true)
		}
		return services
	}
	for _, met := range []api.Claim{claim, whole} {
		other, ok := at[met]
		add(other, ok)
	}
	return services
}

// excludes reports whether two claims cannot belong to two services.
func excludes(a, b api.Claim) bool {
	whole := api.Claim{IP: a.IP}
	return a == b || a.IP == b.IP && (a == whole || b == whole)
}
