// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"cmp"
	"slices"
	"time"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// unacked is a service that was told to the sink and not acknowledged. It is
// not changed while it is in a pending.
type unacked struct {
	key types.NamespacedName
	// old is the view last acknowledged, nil if there was none.
	old *api.ServiceEndpoints
	// since is the last revision at which the sink had what it should have.
	since uint64
	// trigger is the oldest trigger time of the changes told, zero if none.
	trigger time.Time
	// retryAt is when the service is told again, if it does not change before.
	retryAt time.Time
	// failures is how often in a row the sink named the service in a Failed,
	// and err what it said last. They are 0 and nil if the service only took
	// part in a Sync that failed as a whole.
	failures int
	err      error
}

// retry returns the change that tells the service again, whose view is now new.
func (s *unacked) retry(new *api.ServiceEndpoints) Change {
	return Change{Key: s.key, Old: s.old, New: new, Retry: true, TriggerTime: s.trigger}
}

// merge makes c, what changed since the service was told, a change from what
// was last acknowledged.
func (s *unacked) merge(c Change) Change {
	merged := s.retry(c.New)
	merged.TriggerTime = earlier(s.trigger, c.TriggerTime)
	return merged
}

// pending are the services that were told and not acknowledged. What it costs
// to find those that are due does not depend on how many are not.
type pending struct {
	byKey   map[types.NamespacedName]*unacked
	byRetry *btree.BTreeG[*unacked]
	bySince *btree.BTreeG[*unacked]
	failing int // how many have failures
}

func newPending() pending {
	const degree = 16
	return pending{
		byKey: map[types.NamespacedName]*unacked{},
		byRetry: btree.NewG(degree, func(a, b *unacked) bool {
			return cmp.Or(a.retryAt.Compare(b.retryAt), api.CompareKeys(a.key, b.key)) < 0
		}),
		bySince: btree.NewG(degree, func(a, b *unacked) bool {
			return cmp.Or(cmp.Compare(a.since, b.since), api.CompareKeys(a.key, b.key)) < 0
		}),
	}
}

func (p *pending) len() int { return len(p.byKey) }

// get returns the service key, nil if it is not pending.
func (p *pending) get(key types.NamespacedName) *unacked { return p.byKey[key] }

// put adds s, in place of what was there under its key.
func (p *pending) put(s *unacked) {
	p.remove(s.key)
	p.byKey[s.key] = s
	p.byRetry.ReplaceOrInsert(s)
	p.bySince.ReplaceOrInsert(s)
	if s.failures > 0 {
		p.failing++
	}
}

// remove drops the service key, if it is there.
func (p *pending) remove(key types.NamespacedName) {
	s := p.byKey[key]
	if s == nil {
		return
	}
	delete(p.byKey, key)
	p.byRetry.Delete(s)
	p.bySince.Delete(s)
	if s.failures > 0 {
		p.failing--
	}
}

// nextRetry returns when the first service is due, and false if none is pending.
func (p *pending) nextRetry() (time.Time, bool) {
	s, ok := p.byRetry.Min()
	if !ok {
		return time.Time{}, false
	}
	return s.retryAt, true
}

// due returns the services to be told again by now, in order of their keys.
func (p *pending) due(now time.Time) []*unacked {
	var due []*unacked
	p.byRetry.Ascend(func(s *unacked) bool {
		if s.retryAt.After(now) {
			return false
		}
		due = append(due, s)
		return true
	})
	slices.SortFunc(due, func(a, b *unacked) int { return api.CompareKeys(a.key, b.key) })
	return due
}

// applied returns the last revision up to which nothing is pending, which is
// reached if nothing is pending at all.
func (p *pending) applied(reached uint64) uint64 {
	if s, ok := p.bySince.Min(); ok {
		return min(s.since, reached)
	}
	return reached
}
