// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"iter"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/diffstore"
	"k8s.io/apimachinery/pkg/types"
)

type (
	diffRevision = diffstore.Revision
	states       = diffstore.Snapshot[types.NamespacedName, *api.ServiceState]
	statesDelta  = diffstore.Delta[types.NamespacedName, *api.ServiceState]
	statesCursor = diffstore.Cursor[types.NamespacedName, *api.ServiceState]
)

// change is what became of the state of one service; nil is none.
type change struct {
	key      types.NamespacedName
	old, new *api.ServiceState
}

// changesOf keeps the changes of the step that streams took last: those that are
// in step take the same.
type changesOf struct {
	mu       sync.Mutex
	from, to diffRevision
	list     []change
}

// step returns the services that changed, in order.
func (c *changesOf) step(d statesDelta) []change {
	from, to := d.Old.Revision(), d.New.Revision()
	if from == to {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.list == nil || c.from != from || c.to != to {
		c.from, c.to, c.list = from, to, changes(d)
	}
	return c.list
}

func changes(d statesDelta) []change {
	list := []change{}
	for c := range d.Changes() {
		old, _ := d.Old.Get(c.Key)
		if old != c.Value {
			list = append(list, change{c.Key, old, c.Value})
		}
	}
	slices.SortFunc(list, func(a, b change) int { return api.CompareKeys(a.key, b.key) })
	return list
}

// everything returns all services of both snapshots as changes, for a node that
// sees all of them with other eyes.
func everything(d statesDelta) iter.Seq[change] {
	return func(yield func(change) bool) {
		for key, new := range d.New.All() {
			old, _ := d.Old.Get(key)
			if !yield(change{key, old, new}) {
				return
			}
		}
		for c := range d.Changes() {
			if !c.Deleted {
				continue
			}
			if old, ok := d.Old.Get(c.Key); ok && !yield(change{c.Key, old, nil}) {
				return
			}
		}
	}
}
