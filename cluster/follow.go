// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"iter"
	"slices"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/diffstore"
	"github.com/kpng-project/kpng/internal/revstore"
	"k8s.io/apimachinery/pkg/types"
)

// Change is the old and the new joined state of one service. A missing state is nil.
type Change = diffstore.Change[types.NamespacedName, *api.ServiceState]

// Follow calls f when the state is synced, and then after changes, until ctx ends. The
// argument snapshot is the latest snapshot. The argument "changes" yields the services
// that changed since the last call, in any order. In the first call, it yields all
// services of the snapshot. Several Updates may cause only one call. f may write to
// another State.
func (s *State) Follow(ctx context.Context, f func(snapshot *Snapshot, changes iter.Seq[Change])) {
	cursor := s.states.NewCursor()
	defer cursor.Close()
	last := new(Snapshot)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.Changed(last.Revision):
		}
		next := s.Snapshot()
		states := (*revstore.Snapshot[types.NamespacedName, *api.ServiceState])(next.States)
		delta := cursor.Until(states)
		f(next, func(yield func(Change) bool) {
			if delta.Full() && last.States != nil { // the store may no longer have the deletions since last
				for key, old := range last.States.All() {
					if _, ok := next.States.Get(key); !ok && !yield(Change{Key: key, Old: old}) {
						return
					}
				}
			}
			for c := range delta.Changes() {
				if last.States != nil {
					c.Old, _ = last.States.Get(c.Key)
				}
				if c.Old != c.New && !yield(Change(c)) {
					return
				}
			}
		})
		cursor.Advance(states)
		last = next
	}
}

// Merge keeps the State out equal to the merged services of several states until ctx
// ends. For each service that changes in a state, it calls merge with the latest
// snapshots of all states, and writes the result to out: a Service and its
// EndpointSlices. If the Service is nil, out does not get the service. A snapshot is nil
// until its state is synced. If a state becomes stale, or is no longer stale, Merge calls
// merge for all services of this state. Calls do not overlap. merge must not modify the
// objects in snapshots. Snapshot.Refused of out also contains the reasons in
// Snapshot.Refused of these states.
//
// State out gets the nodes of the first state. Merge marks out as synced when all states
// are synced. Nothing else may write to out.
func Merge(ctx context.Context, out *State, merge func(key types.NamespacedName, in []*Snapshot) (*api.Service, []*api.EndpointSlice), states ...*State) {
	var mu sync.Mutex
	in := make([]*Snapshot, len(states))
	var running sync.WaitGroup
	for i, state := range states {
		running.Go(func() {
			refused := state.refused.reasons.NewCursor()
			defer refused.Close()
			state.Follow(ctx, func(next *Snapshot, changes iter.Seq[Change]) {
				mu.Lock()
				defer mu.Unlock()
				last := in[i]
				in[i] = next
				out.Update(func(tx *Tx) {
					write := func(key types.NamespacedName) {
						service, list := merge(key, in)
						tx.s.setService(key, service)
						tx.ReplaceSlicesOf(key, slices.Values(list))
					}
					if i == 0 {
						tx.ReplaceNodes(func(yield func(*api.Node) bool) {
							for _, node := range next.Nodes.All() {
								if !yield(node) {
									return
								}
							}
						})
					}
					for c := range changes {
						write(c.Key)
					}
					if last != nil && last.Stale != next.Stale {
						for key := range next.States.All() {
							write(key)
						}
					}
					reasons := (*revstore.Snapshot[types.NamespacedName, string])(next.Refused)
					delta := refused.Until(reasons)
					if delta.Full() && last != nil { // the store may no longer have the deletions since last
						for key := range last.Refused.All() {
							tx.s.setMerged(key, reasonsFor(key, in))
						}
					}
					for c := range delta.Changes() {
						tx.s.setMerged(c.Key, reasonsFor(c.Key, in))
					}
					refused.Advance(reasons)
				})
				if !slices.Contains(in, nil) {
					out.SetSynced()
				}
			})
		})
	}
	running.Wait()
}

// reasonsFor joins the reasons that snapshots have for a service, without duplicates.
func reasonsFor(key types.NamespacedName, in []*Snapshot) string {
	var texts []string
	for _, snapshot := range in {
		if snapshot != nil {
			if text, ok := snapshot.Refused.Get(key); ok && !slices.Contains(texts, text) {
				texts = append(texts, text)
			}
		}
	}
	return strings.Join(texts, "; ")
}
