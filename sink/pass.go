// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"time"

	"github.com/kpng-project/kpng/api"
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
	// True if the pass has let changes go first since its last batch.
	yielded bool
	// The memory of the last batch, for reuse.
	buffer []Change
	// The services that were failing when the pass began.
	failedBefore map[types.NamespacedName]*unacked
}

// delivered reports whether the pass has already delivered a service.
func (p *delivery) delivered(key types.NamespacedName) bool {
	_, ahead := p.ahead[key]
	return ahead || api.CompareKeys(key, p.reached) <= 0
}

// admit returns the changes to deliver now: all changes of services that the pass has
// delivered, and other changes up to limit. The limit applies to the size of the other
// changes and to the number of services in p.ahead. The pass delivers the rest later.
func (p *delivery) admit(changes []Change, limit int) []Change {
	var admitted []Change
	size := 0
	for _, c := range changes {
		switch {
		case p.delivered(c.Key):
			// If Old is nil, no view was acknowledged in this pass, and the sink may have any.
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

// appendNext appends the next services of the pass to changes: at most maxCount services,
// whose total size is at most limit. It appends at least one service if any is left. The
// second result reports whether further services are left.
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

// weight returns the size of a change, by the measure of [Options.BatchSize].
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
