// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"iter"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// FullState returns a sink that calls syncAll after every change, with the views of all
// services, in order of namespace and name. It is for a dataplane that is always written
// as a whole. If you need the node, Cleanup or Verify, use [FullStateOf].
//
// A view contains the endpoints of all frontends. Some of these endpoints receive only
// traffic from this node to an external frontend (see [api.Scopes]). [nodeview.Frontends]
// computes the endpoints of each frontend.
//
// In a pass (see [Changes]) the sink collects the services and calls syncAll at the end.
// The errors of syncAll have the same meaning as those of [Sink.Sync]. Until a failed
// service is delivered again, syncAll receives the last acknowledged view of this
// service. So one bad service does not stop the others. In a pass, one call of syncAll
// receives all services. So if the call fails as a whole, the driver cannot find the
// service that is the cause. Therefore syncAll should return a [*Failed].
//
// syncAll may keep the Go slice services but must not change it. The sink holds the views
// of all services. Each Sync copies one pointer per service.
func FullState(syncAll func(ctx context.Context, services []*api.ServiceEndpoints) error) Sink {
	return Func(FullStateOf(stateFunc(syncAll)).Sync) // Func hides the optional methods of Forwarder
}

// StateSink programs the whole state of one node in each call.
type StateSink interface {
	// SyncState programs all services, which are in order of namespace and name. If the Node
	// object of this node is not known, node is nil. For the error, see [FullState].
	SyncState(ctx context.Context, node *api.Node, services []*api.ServiceEndpoints) error
}

// FullStateOf is like [FullState], but calls s.SyncState. The sink forwards the optional
// methods of s: those of [Starter], [Stopper], [Drainer], [Cleaner] and [Verifier].
func FullStateOf(s StateSink) Sink { return &fullState{Forwarder: Forwarder{s}, sink: s, inPass: true} }

type stateFunc func(ctx context.Context, services []*api.ServiceEndpoints) error

func (f stateFunc) SyncState(ctx context.Context, _ *api.Node, services []*api.ServiceEndpoints) error {
	return f(ctx, services)
}

type fullState struct {
	Forwarder
	sink StateSink
	// The state that was last acknowledged.
	acked []*api.ServiceEndpoints
	// inPass: a pass is in progress. gathered: the services delivered so far.
	inPass   bool
	gathered []*api.ServiceEndpoints
}

func (f *fullState) Sync(ctx context.Context, c *Changes) error {
	if c.First {
		f.inPass, f.gathered = true, nil
	}
	if f.inPass && !c.Last {
		f.gathered = apply(f.gathered, c.Services)
		return nil
	}
	state := f.acked
	if f.inPass {
		state = f.gathered
	}
	state = apply(state, c.Services)
	err := f.sink.SyncState(ctx, c.Node, state)
	if failed, ok := Acknowledged(err); ok {
		f.acked = revert(state, f.acked, failed)
		f.inPass, f.gathered = false, nil
	}
	return err
}

// revert returns a copy of state in which each failed service has its view from acked.
func revert(state, acked []*api.ServiceEndpoints, failed Failed) []*api.ServiceEndpoints {
	if len(failed) == 0 {
		return state
	}
	return apply(state, func(yield func(Change) bool) {
		for _, key := range slices.SortedFunc(maps.Keys(failed), api.CompareKeys) {
			c := Change{Key: key}
			if i, ok := findView(acked, key); ok {
				c.New = acked[i]
			}
			if !yield(c) {
				return
			}
		}
	})
}

// findView returns the index of a service's view in state. If there is no view, it
// returns the index at which to insert the view.
func findView(state []*api.ServiceEndpoints, key types.NamespacedName) (int, bool) {
	return slices.BinarySearchFunc(state, key, func(v *api.ServiceEndpoints, key types.NamespacedName) int {
		return api.CompareKeys(v.Key(), key)
	})
}

// apply returns a copy of state with the changes applied. Both state and changes are
// sorted by key.
func apply(state []*api.ServiceEndpoints, changes iter.Seq[Change]) []*api.ServiceEndpoints {
	next := make([]*api.ServiceEndpoints, 0, len(state)+1)
	for s := range changes {
		i, found := findView(state, s.Key)
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
