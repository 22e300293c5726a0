// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"sync"

	"github.com/kpng-project/kpng/api"
)

// maxRecent limits the number of services and endpoints in one generation of views.
const maxRecent = 4096

// The type views computes the views of one node for several feeds, and keeps recent
// views, because each feed needs the same views. A nil views keeps nothing.
type views struct {
	mu   sync.Mutex
	zone string
	// recent and earlier are two generations of views. When the map recent is full, it
	// becomes the map earlier.
	recent, earlier map[*api.ServiceState]*api.ServiceEndpoints
	size            int // number of services and endpoints in recent
}

// The method of returns the view of a service on a node. The name of the node must be the
// same in all calls.
func (v *views) of(state *api.ServiceState, on view) *api.ServiceEndpoints {
	if v == nil || state == nil {
		return on.see(state)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if zone := on.node.Zone(); v.recent == nil || v.zone != zone {
		v.zone, v.recent, v.earlier, v.size = zone, map[*api.ServiceState]*api.ServiceEndpoints{}, nil, 0
	}
	if se, ok := v.recent[state]; ok {
		return se
	}
	se, ok := v.earlier[state]
	if !ok {
		se = on.see(state)
	}
	v.recent[state] = se
	v.size++
	for _, slice := range state.Slices {
		v.size += len(slice.Endpoints)
	}
	if v.size > maxRecent {
		v.recent, v.earlier, v.size = map[*api.ServiceState]*api.ServiceEndpoints{}, v.recent, 0
	}
	return se
}
