// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"sync"

	"github.com/kpng-project/kpng/api"
)

// maxRecent limits the total size of the services in one generation of views.
const maxRecent = 4096

// The type views computes the views of one node for several feeds, and keeps recent
// views, because each feed needs the same views. A nil views keeps nothing.
type views struct {
	mu   sync.Mutex
	zone string
	// recent and earlier are two generations of views. When the map recent is full, it
	// becomes the map earlier.
	recent, earlier map[*api.ServiceState]lazyView
	size            int // size of the services in recent
}

// lazyView computes a view in the first call, and returns it in each call. The
// computation does not hold the lock of views, so a large view delays only the feeds
// that need it.
type lazyView func() *api.View

// The method "of" returns a node's view of a service. The name of the node must be the
// same in all calls.
func (v *views) of(state *api.ServiceState, from view) *api.View {
	if v == nil || state == nil {
		return from.of(state)
	}
	return v.find(state, from)()
}

func (v *views) find(state *api.ServiceState, from view) lazyView {
	v.mu.Lock()
	defer v.mu.Unlock()
	if zone := from.node.Zone(); v.recent == nil || v.zone != zone {
		v.zone, v.recent, v.earlier, v.size = zone, map[*api.ServiceState]lazyView{}, nil, 0
	}
	if shared := v.recent[state]; shared != nil {
		return shared
	}
	shared := v.earlier[state]
	if shared == nil {
		shared = sync.OnceValue(func() *api.View { return from.of(state) })
	}
	v.recent[state] = shared
	if v.size += size(state); v.size > maxRecent {
		v.recent, v.earlier, v.size = map[*api.ServiceState]lazyView{}, v.recent, 0
	}
	return shared
}
