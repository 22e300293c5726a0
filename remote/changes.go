// SPDX-License-Identifier: Apache-2.0

package remote

import (
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

// change is the change of the state of one service; nil is none.
type change = diffstore.Change[types.NamespacedName, *api.ServiceState]

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
		c.from, c.to, c.list = from, to, slices.AppendSeq([]change{}, d.Changes())
	}
	return c.list
}
