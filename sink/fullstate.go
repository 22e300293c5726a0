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

// FullState returns a sink that calls sync with the views of all services, in order of
// namespace and name, after every change. It is for a dataplane that is always written as
// a whole. For a type that needs the node, cleanup or Verify, use [FullStateOf].
//
// A view contains the endpoints of all its lists. Some of them receive only traffic from
// this node to an external frontend (see [api.Scopes]). [nodeview.Frontends] computes the
// endpoints of each frontend.
//
// In a pass (see [Changes]) the sink collects the services and calls sync at the end. An
// error of sync means what an error of Sync means: see [Sink]. Until a failed service is
// delivered again, sync receives its last acknowledged view. So one bad service does not
// stop the others. In a pass the sink cannot find the service that makes sync fail as a
// whole, so sync should return a [*Failed].
//
// sync may keep the slice and must not change it. The sink holds the views of all
// services. Each Sync copies one pointer per service.
func FullState(sync func(ctx context.Context, services []*api.ServiceEndpoints) error) Sink {
	return Func(FullStateOf(stateFunc(sync)).Sync) // without optional methods, which a function cannot have
}

// StateSink programs the whole state of one node in each call.
type StateSink interface {
	// SyncState makes the dataplane agree with services, which are in order of namespace
	// and name. The argument node is this node, or nil if it is not known. For the error
	// see [FullState].
	SyncState(ctx context.Context, node *api.Node, services []*api.ServiceEndpoints) error
}

// FullStateOf returns a sink that calls s as [FullState] calls its function. It forwards
// the optional methods of s: those of [Starter], [Stopper], [Drainer], [Cleaner] and
// [Verifier].
func FullStateOf(s StateSink) Sink { return &fullState{Forwarder: Forwarder{s}, sink: s, inPass: true} }

type stateFunc func(ctx context.Context, services []*api.ServiceEndpoints) error

func (f stateFunc) SyncState(ctx context.Context, _ *api.Node, services []*api.ServiceEndpoints) error {
	return f(ctx, services)
}

type fullState struct {
	Forwarder
	sink StateSink
	// acked is the state last acknowledged.
	acked []*api.ServiceEndpoints
	// The flag inPass reports that a pass is in progress. The list gathered has the
	// services that the pass has delivered.
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

// findView returns the index of a service's view in state, or where it would be inserted.
func findView(state []*api.ServiceEndpoints, key types.NamespacedName) (int, bool) {
	return slices.BinarySearchFunc(state, key, func(v *api.ServiceEndpoints, key types.NamespacedName) int {
		return api.CompareKeys(v.Key(), key)
	})
}

// apply returns a copy of state with changes applied. Both are sorted by key.
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
