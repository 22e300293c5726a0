// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// FullState returns a sink that calls sync, whatever changed, with the views of
// all services in order of namespace and name. It is for a dataplane that is
// written anew each time.
//
// The endpoints of a view are those of all its lists, also those that only
// traffic from this node to an external frontend uses (see [api.Scopes]):
// [nodeview.Frontends] says where each frontend's traffic goes. sync is not told
// this node, only called again when it changes; a sink that needs it, say for
// its addresses, implements [Sink] and calls a FullState with each Changes.
//
// What sync returns is what Sync returns: see [Sink]. After an error it gets the
// whole state again. It may keep the slice and must not change it. The sink holds
// the views of all services; what it adds to each Sync is to copy one pointer a
// service.
func FullState(sync func(ctx context.Context, services []*api.ServiceEndpoints) error) Sink {
	var state []*api.ServiceEndpoints
	return Func(func(ctx context.Context, c *Changes) error {
		state = apply(state, c)
		return sync(ctx, state)
	})
}

// apply returns state, which is in order of keys, with c applied to it.
func apply(state []*api.ServiceEndpoints, c *Changes) []*api.ServiceEndpoints {
	if c.Full {
		state = nil
	}
	next := make([]*api.ServiceEndpoints, 0, len(state)+1)
	for s := range c.Services {
		i, found := slices.BinarySearchFunc(state, s.Key, func(v *api.ServiceEndpoints, key types.NamespacedName) int {
			return api.CompareKeys(v.Key(), key)
		})
		next = append(next, state[:i]...)
		if found {
			i++
		}
		state = state[i:]
		if s.New != nil {
			next = append(next, s.New)
		}
	}
	return append(next, state...)
}
