// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// delivery is a pass under way. Services are delivered in key order, so it does not
// need to know each service that was delivered.
type delivery struct {
	// begun says that a Changes with First was acknowledged, and start is when the
	// first one was made.
	begun bool
	start time.Time
	// All services up to reached were delivered, and of those after it the ones in
	// ahead, which changed during the pass or come alone.
	reached types.NamespacedName
	ahead   map[types.NamespacedName]struct{}
	// yielded says that the last Changes had changes only and nothing of the pass.
	yielded bool
	// buffer is what the last batch was written to, for the next one.
	buffer []Change
	// before are the services that were failing when the pass began.
	before map[types.NamespacedName]*unacked
}

// delivered reports whether a service was delivered in the pass.
func (p *delivery) delivered(key types.NamespacedName) bool {
	_, ahead := p.ahead[key]
	return ahead || api.CompareKeys(key, p.reached) <= 0
}

// admit returns those of changes that are delivered now. The pass delivers the others
// in their turn: services beyond reached, where the changes of more than limit
// services and endpoints came together, or many services are ahead already.
func (p *delivery) admit(changes []Change, limit int) []Change {
	var admitted []Change
	size := 0
	for _, c := range changes {
		switch {
		case p.delivered(c.Key):
			// If the sink acknowledged no view yet, it may have one from before the pass.
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

// next appends the next services of the pass to changes: at least one if there is one and
// at most most, of up to limit services and endpoints. It returns whether there are more.
func (p *delivery) next(u *Update, most, limit int, changes []Change) (_ []Change, more bool) {
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
		if n := len(changes) - before; n > 0 && (size > limit || n == most) {
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

// hasNext reports whether next would return a service.
func (p *delivery) hasNext(u *Update) bool {
	for view := range u.After(p.reached) {
		if _, ahead := p.ahead[view.Key()]; !ahead {
			return true
		}
	}
	return false
}

// weight returns the size of a change for [Options.BatchSize].
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
