// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"context"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/ordering"
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
// In a pass (see [Changes]) the sink collects the services and calls syncAll at the
// end. The errors of syncAll have the same meaning as those of [Sink.Sync]. Until a
// failed service is delivered again, syncAll receives the last acknowledged view of
// this service. So one bad service does not stop the others. If another service has
// taken an address of this view since then, the view has no frontends at that address
// (see View.Lost). So no two services have the same claim ([api.Claim]). In a pass, one
// call of syncAll receives all services. If it returns an error that is not a
// [*Failed], the driver cannot find out which service is the cause. Therefore syncAll
// should return a *Failed.
//
// syncAll may keep the Go slice services but must not change it. The sink holds the views
// of all services. Each Sync copies one pointer per service.
func FullState(syncAll func(ctx context.Context, services []*api.View) error) Sink {
	if syncAll == nil {
		return Func(nil)
	}
	return FullStateOf(stateFunc(syncAll))
}

// StateSink programs the whole state of one node in each call.
type StateSink interface {
	// SyncState programs all services, which are in order of namespace and name. If the Node
	// object of this node is not known, node is nil. For the error, see [FullState].
	SyncState(ctx context.Context, node *api.Node, services []*api.View) error
}

// FullStateOf is like [FullState], but calls s.SyncState. The driver finds the optional
// methods of s, such as those of [Starter] and [Cleaner], with [As].
func FullStateOf(s StateSink) Sink {
	if isNil(s) {
		return Func(nil)
	}
	return &fullState{sink: s, inPass: true}
}

type stateFunc func(ctx context.Context, services []*api.View) error

func (f stateFunc) SyncState(ctx context.Context, _ *api.Node, services []*api.View) error {
	return f(ctx, services)
}

// fullState is the sink of FullStateOf.
type fullState struct {
	sink  StateSink
	acked state // the state that was last acknowledged
	// inPass: a pass is in progress. gathered: the services delivered so far.
	inPass   bool
	gathered state
}

func (f *fullState) Unwrap() any { return f.sink }

func (f *fullState) Sync(ctx context.Context, c *Changes) error {
	if c.First {
		f.inPass, f.gathered = true, state{}
	}
	before := &f.acked
	switch {
	case f.inPass:
		before = &f.gathered
		if !c.Last {
			before.track()
		}
	case c.partial || isUnsure(c.Services):
		before.track() // the driver may have split an update
	}
	next, replaced := before.with(c.Services)
	if f.inPass && !c.Last {
		before.commit(next, replaced)
		return nil
	}
	var kept state // the last acknowledged views of failing services
	if f.inPass {
		kept = f.acked.only(func(key types.NamespacedName) bool {
			_, failing := slices.BinarySearchFunc(c.Failing, key, ordering.Keys)
			return failing
		})
	}
	if len(kept.views) > 0 {
		kept.track()
		next, _ = kept.with(changesTo(next))
	}
	err := f.sink.SyncState(ctx, c.Node, next)
	failed, ok := Acknowledged(err)
	if !ok {
		return err
	}
	succeeded := c.Services
	if f.inPass {
		succeeded = changesTo(next)
		f.acked, before = f.acked.only(func(key types.NamespacedName) bool { return failed[key] != nil }), &f.acked
	}
	if len(failed) > 0 || len(kept.views) > 0 {
		succeeded = except(succeeded, failed)
		before.track()
		next, replaced = before.with(succeeded)
	}
	before.commit(next, replaced)
	f.inPass, f.gathered = false, state{}
	return err
}

// state is a set of views.
type state struct {
	views []*api.View // sorted by key
	// The owners of all claims of the views. It is nil as long as each Sync has delivered
	// a whole update of the source. Then no two views have the same claim, because this
	// is true in the source.
	owners claimOwners
}

// track begins to record the owners of the claims.
func (s *state) track() {
	if s.owners != nil {
		return
	}
	s.owners = claimOwners{}
	for _, v := range s.views {
		s.own(v)
	}
}

func (s *state) own(view *api.View) {
	for f := range frontends.Keys(view) {
		s.owners.set(f.Claim(), view.Key())
	}
}

// with returns the views after the changes. If s has owners, the changed services take
// their claims from other services, and the result replaced has the changes of all services
// that win or lose claims. The method does not modify s.
func (s *state) with(changes iter.Seq[Change]) (views []*api.View, replaced []Change) {
	if s.owners == nil {
		return apply(s.views, changes), nil
	}
	replaced = slices.Collect(changes)
	taken, losers := claimOwners{}, map[types.NamespacedName]struct{}{}
	for _, c := range replaced {
		for f := range frontends.Keys(c.New) {
			for _, loser := range s.owners.conflicting(f.Claim(), c.Key) {
				taken.set(f.Claim(), c.Key)
				losers[loser] = struct{}{}
			}
		}
	}
	for _, c := range replaced {
		delete(losers, c.Key)
	}
	for key := range losers {
		if i, ok := findView(s.views, key); ok {
			replaced = append(replaced, Change{Key: key, New: without(s.views[i], taken)})
		}
	}
	slices.SortFunc(replaced, func(a, b Change) int { return ordering.Keys(a.Key, b.Key) })
	return apply(s.views, slices.Values(replaced)), replaced
}

// commit stores the results of s.with.
func (s *state) commit(views []*api.View, replaced []Change) {
	if s.owners != nil {
		for _, c := range replaced {
			if i, ok := findView(s.views, c.Key); ok {
				for f := range frontends.Keys(s.views[i]) {
					s.owners.unset(f.Claim(), c.Key)
				}
			}
		}
		for _, c := range replaced {
			s.own(c.New)
		}
	}
	s.views = views
}

// only returns the part of s with the services for which the function has returns true.
func (s *state) only(has func(types.NamespacedName) bool) state {
	var kept state
	for _, v := range s.views {
		if has(v.Key()) {
			kept.views = append(kept.views, v)
		}
	}
	return kept
}

// without returns a copy of view. A claim that conflicts with a claim in the map taken is
// lost in the copy.
func without(view *api.View, taken claimOwners) *api.View {
	changed := *view
	changed.Lost = slices.Clone(view.Lost)
	for f := range frontends.Keys(view) {
		if winners := taken.conflicting(f.Claim(), view.Key()); len(winners) > 0 {
			changed.Lost = append(changed.Lost, api.LostClaim{Claim: f.Claim(), Winner: winners[0]})
		}
	}
	return &changed
}

// isUnsure reports whether a change is unsure.
func isUnsure(changes iter.Seq[Change]) bool {
	for c := range changes {
		if c.Unsure {
			return true
		}
	}
	return false
}

// changesTo yields a Change for each view.
func changesTo(views []*api.View) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		for _, v := range views {
			if !yield(Change{Key: v.Key(), New: v}) {
				return
			}
		}
	}
}

// except yields the changes of services that are not in the map failed.
func except(changes iter.Seq[Change], failed Failed) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		for c := range changes {
			if _, ok := failed[c.Key]; !ok && !yield(c) {
				return
			}
		}
	}
}

// findView returns the index of a service's view in state. If there is no view, it
// returns the index at which to insert the view.
func findView(state []*api.View, key types.NamespacedName) (int, bool) {
	return slices.BinarySearchFunc(state, key, func(v *api.View, key types.NamespacedName) int {
		return ordering.Keys(v.Key(), key)
	})
}

// apply returns a copy of state with the changes applied. Both state and changes are
// sorted by key.
func apply(state []*api.View, changes iter.Seq[Change]) []*api.View {
	next := make([]*api.View, 0, len(state)+1)
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
