// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"encoding/json"
	"io"
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
// In a pass the sink gathers the services and calls sync with Changes.Last.
//
// What sync returns is what Sync returns: see [Sink]. After an error it gets the
// whole state again. It may keep the slice and must not change it. The sink holds
// the views of all services; what it adds to each Sync is to copy one pointer a
// service.
func FullState(sync func(ctx context.Context, services []*api.ServiceEndpoints) error) Sink {
	var state []*api.ServiceEndpoints
	inPass := true
	return Func(func(ctx context.Context, c *Changes) error {
		if c.First {
			state, inPass = nil, true
		}
		state = apply(state, c)
		if inPass && !c.Last {
			return nil
		}
		err := sync(ctx, state)
		if _, ok := Acknowledged(err); ok {
			inPass = false
		}
		return err
	})
}

// apply returns state, which is in order of keys, with c applied to it.
func apply(state []*api.ServiceEndpoints, c *Changes) []*api.ServiceEndpoints {
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

// JSON returns a sink that writes to w what its node has to proxy, one JSON
// object a service and line: at the start and again, as a whole, whenever
// something changes.
func JSON(w io.Writer) Sink {
	out := json.NewEncoder(w)
	return FullState(func(_ context.Context, services []*api.ServiceEndpoints) error {
		for _, service := range services {
			if err := out.Encode(service); err != nil {
				return err
			}
		}
		return nil
	})
}
