// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"k8s.io/apimachinery/pkg/types"
)

// Pass helps a sink that keeps records of services. At the end of a pass, it reports
// which services are stale. The package comment shows how to use it. The zero value is
// ready to use.
//
// During a pass, a Pass stores the keys of the services that were delivered since the
// pass began, except deleted services. Between passes, it stores nothing.
type Pass struct {
	delivered map[types.NamespacedName]struct{}
	last      bool
}

// Begin records the services of c. Call it once at the start of each Sync.
func (p *Pass) Begin(c *Changes) {
	switch {
	case c.First:
		p.delivered = map[types.NamespacedName]struct{}{}
	case p.last:
		p.delivered = nil // the pass has ended
	}
	if p.last = c.Last; p.delivered == nil {
		return
	}
	for s := range c.Services {
		if s.New == nil && !c.Last {
			// A deleted service is stale, unless its deletion failed. Then Failing of the
			// last batch lists it.
			delete(p.delivered, s.Key)
		} else {
			p.delivered[s.Key] = struct{}{}
		}
	}
	for _, key := range c.Failing {
		p.delivered[key] = struct{}{}
	}
}

// Stale reports whether the sink has to prune the records of the service with this key.
// In a Sync with Changes.Last, it returns true if the service was not delivered in this
// pass and is not in Changes.Failing. In other Syncs, it returns false.
func (p *Pass) Stale(key types.NamespacedName) bool {
	_, delivered := p.delivered[key]
	return p.last && !delivered
}
