// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// delivery is the current pass. It delivers services in key order, so it does not store
// the key of each delivered service.
type delivery struct {
	// The flag begun reports that a Changes with First was acknowledged. The field start
	// is when the pass began.
	begun bool
	start time.Time
	// reached is the key up to which the pass has delivered all services. The set ahead
	// has delivered services after reached: they changed during the pass or are isolated.
	reached types.NamespacedName
	ahead   map[types.NamespacedName]struct{}
	// yielded reports that the last batch had only changes and no services of the pass.
	yielded bool
	// buffer is the memory of the last batch, for reuse.
	buffer []Change
	// failedBefore are the services that were failing when the pass began.
	failedBefore map[types.NamespacedName]*unacked
}

// delivered reports whether the pass has delivered a service.
func (p *delivery) delivered(key types.NamespacedName) bool {
	_, ahead := p.ahead[key]
	return ahead || api.CompareKeys(key, p.reached) <= 0
}

// admit returns the changes to deliver now. It leaves changes of services beyond reached
// to the pass when they exceed limit services and endpoints, or when limit services are
// ahead already.
func (p *delivery) admit(changes []Change, limit int) []Change {
	var admitted []Change
	size := 0
	for _, c := range changes {
		switch {
		case p.delivered(c.Key):
			// Without an acknowledged view, the sink may hold a view from before the
			// pass.
			c.Unsure = c.Old == nil
		case size+weight(&c) > limit || len(p.ahead) >= limit:
			continue
		default:
			size += weight(&c)
			p.ahead[c.Key] = struct{}{}
			c.Old, c.Unsure = nil, true
		}
		admitted = append(admitted, c)
	}
	return admitted
}

// appendNext appends the next services of the pass to changes. It appends at least one if
// any is left, at most maxCount, and up to limit services and endpoints. The result more
// reports whether services are left.
func (p *delivery) appendNext(u *Update, maxCount, limit int, changes []Change) (_ []Change, more bool) {
	if changes == nil {
		changes = p.buffer[:0]
	}
	before, size := len(changes), 0
	for view := range u.After(p.reached) {
		c := Change{Key: view.Key(), New: view, Unsure: true}
		if _, ahead := p.ahead[c.Key]; ahead {
			continue
		}
		size += weight(&c)
		if n := len(changes) - before; n > 0 && (size > limit || n == maxCount) {
			more = true
			break
		}
		changes = append(changes, c)
	}
	if n := len(changes); n > before {
		p.reached = changes[n-1].Key
		p.buffer = changes
		for key := range p.ahead {
			if api.CompareKeys(key, p.reached) <= 0 {
				delete(p.ahead, key)
			}
		}
	}
	return changes, more
}

// hasNext reports whether the pass has a service left.
func (p *delivery) hasNext(u *Update) bool {
	for view := range u.After(p.reached) {
		if _, ahead := p.ahead[view.Key()]; !ahead {
			return true
		}
	}
	return false
}

// weight returns the size of a change, as [Options.BatchSize] counts it.
func weight(c *Change) int {
	view := c.New
	if view == nil {
		view = c.Old
	}
	if view == nil {
		return 1
	}
	return 1 + len(view.Endpoints)
}
