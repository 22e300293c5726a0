// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"time"

	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/updates"
	"k8s.io/apimachinery/pkg/types"
)

// delivery is the current pass. Because it delivers services in the order of their keys,
// it need not store the keys of all delivered services.
type delivery struct {
	// begun: a Changes with First was acknowledged.
	begun bool
	// The start and the revision of the first Sync, or zero before it.
	start    time.Time
	revision uint64
	// count: the number of acknowledged services. logged: when progress was last logged.
	count  int
	logged time.Time
	// reached: the pass has delivered all services up to this key. ahead: services with
	// later keys that were also delivered, because they changed or are isolated.
	reached types.NamespacedName
	ahead   map[types.NamespacedName]struct{}
	// large: large services that wait until the other services have been delivered.
	large map[types.NamespacedName]struct{}
	// True if changes were delivered since the last batch of the pass.
	yielded bool
	// The memory of the last batch, for reuse.
	buffer []Change
	// The services that were failing when the pass began.
	failedBefore map[types.NamespacedName]*unacked
}

// delivered reports whether the pass has already delivered a service.
func (p *delivery) delivered(key types.NamespacedName) bool {
	if _, waits := p.large[key]; waits {
		return false
	}
	_, ahead := p.ahead[key]
	return ahead || ordering.Keys(key, p.reached) <= 0
}

// admit returns the changes to deliver now: all changes of services that the pass has
// delivered, and other changes up to the limit. The limit applies to the size of the other
// changes and to the number of services in p.ahead. The pass delivers the rest later.
func (p *delivery) admit(changes []Change, limit int) []Change {
	var admitted []Change
	size := 0
	for _, c := range changes {
		switch {
		case p.delivered(c.Key):
			// If Old is nil, no view was acknowledged in this pass, and the sink may have any
			// view.
			c.Unsure = c.Old == nil
		case size+c.size() > limit || len(p.ahead) >= limit:
			continue
		default:
			size += c.size()
			p.takeAhead(c.Key)
			c.Old, c.Unsure = nil, true
		}
		admitted = append(admitted, c)
	}
	return admitted
}

// takeAhead records that a service is delivered before the pass has reached it.
func (p *delivery) takeAhead(key types.NamespacedName) {
	p.ahead[key] = struct{}{}
	delete(p.large, key)
}

// appendNext appends the next services of the pass to changes: at most maxCount services,
// whose total size is at most limit. It appends at least one service if any is left. It
// adds large services to p.large instead. The second result reports whether further
// services are left.
func (p *delivery) appendNext(u *updates.Update, maxCount, limit int, changes []Change) (_ []Change, more bool) {
	if changes == nil {
		changes = p.buffer[:0]
	}
	before, size := len(changes), 0
	for key, view := range u.After(p.reached) {
		if _, ahead := p.ahead[key]; ahead {
			continue
		}
		if view.Size >= updates.LargeSize {
			p.large[key] = struct{}{}
			continue
		}
		n := len(changes) - before
		if n > 0 && (size+view.Size > limit || n == maxCount) {
			more = true
			break
		}
		delete(p.large, key) // it was large before
		size += view.Size
		changes = append(changes, Change{Key: key, New: view.Get(), Unsure: true})
	}
	if n := len(changes); n > before {
		p.reached = changes[n-1].Key
		p.buffer = changes
		for key := range p.ahead {
			if ordering.Keys(key, p.reached) <= 0 {
				delete(p.ahead, key)
			}
		}
	}
	return changes, more
}

// takeLarge returns a change without an old view for each service in p.large. From then
// on, these services count as delivered.
func (p *delivery) takeLarge() (changes []updates.LargeChange) {
	for key := range p.large {
		changes = append(changes, updates.LargeChange{Key: key})
		p.takeAhead(key)
	}
	return changes
}

// hasNext reports whether the pass has a service left.
func (p *delivery) hasNext(u *updates.Update) bool {
	for key := range u.After(p.reached) {
		if _, ahead := p.ahead[key]; !ahead {
			return true
		}
	}
	return len(p.large) > 0
}

// size returns the size of the change, by the measure of [Options.BatchSize].
func (c *Change) size() int {
	if c.New != nil {
		return updates.Size(c.New)
	}
	return updates.Size(c.Old)
}

// isLarge reports whether the old or the new view of a change is large.
func isLarge(c *Change) bool {
	return max(updates.Size(c.Old), updates.Size(c.New)) >= updates.LargeSize
}
