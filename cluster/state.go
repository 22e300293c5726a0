// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"iter"
	"slices"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/diffstore"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

// State is what is known of the cluster. It is safe for concurrent use.
type State struct {
	mu       sync.Mutex
	services *diffstore.Store[types.NamespacedName, *api.Service]
	slices   *diffstore.Store[types.NamespacedName, *api.EndpointSlice]
	nodes    *diffstore.Store[string, *api.Node]
	// states joins services, slices and claims. Its revisions are what readers
	// follow: those at which anything of a service last changed.
	states *diffstore.Store[types.NamespacedName, *api.ServiceState]
	claims claims

	revisions *diffstore.Revisions
	changed   chan struct{} // closed by the next change; nil while nobody waits
	synced    chan struct{} // closed by SetSynced
	snapshot  *Snapshot     // of the current revision, nil until somebody asks
}

// Options configure a State. The zero value is fine.
type Options struct {
	// Clock tells how long deletions are kept for readers that lag. Default:
	// the real one.
	Clock clock.PassiveClock
}

// New returns an empty State that has not synced.
func New(opts Options) *State {
	s := &State{claims: newClaims(), revisions: new(diffstore.Revisions), synced: make(chan struct{})}
	s.services = newStore(s, opts, api.CompareKeys, (*api.Service).Equal, s.serviceChanged)
	s.slices = newStore(s, opts, api.CompareKeys, (*api.EndpointSlice).Equal, s.sliceChanged)
	s.nodes = newStore(s, opts, strings.Compare, (*api.Node).Equal, nil)
	s.states = newStore(s, opts, api.CompareKeys, func(a, b *api.ServiceState) bool { return a == b }, nil)
	return s
}

func newStore[K, V any](s *State, opts Options, compare func(a, b K) int, equal func(a, b V) bool, onChange func(key K, old, new V)) *diffstore.Store[K, V] {
	return diffstore.New(diffstore.Options[K, V]{
		Compare:   compare,
		Equal:     equal,
		Revisions: s.revisions,
		Clock:     opts.Clock,
		OnChange:  onChange,
		Resumable: true, // for readers in other processes, who come back with a revision
	})
}

// Update changes the state by one commit: readers see all that write did or
// nothing of it. It must not call any method of the State but those of tx.
func (s *State) Update(write func(tx *Tx)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.revisions.Last()
	write(&Tx{s})
	if s.revisions.Last() == before {
		return
	}
	s.snapshot = nil
	if s.IsSynced() {
		s.wake()
	}
}

// SetSynced says that all of the cluster has been written once. Until then,
// Changed stays quiet: a reader that acted on half of the cluster would take
// down what the other half is about to bring. Further calls do nothing.
func (s *State) SetSynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.IsSynced() {
		close(s.synced)
		s.wake()
	}
}

// Synced is closed once SetSynced was called.
func (s *State) Synced() <-chan struct{} { return s.synced }

// IsSynced reports whether SetSynced was called.
func (s *State) IsSynced() bool {
	select {
	case <-s.synced:
		return true
	default:
		return false
	}
}

func (s *State) wake() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// Changed returns a channel that is closed once the state has synced and its
// revision is not the given one.
func (s *State) Changed(since diffstore.Revision) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.IsSynced() && s.revisions.Last() != since {
		return s.synced // which is closed
	}
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// Snapshot returns the state as it is now. It costs next to nothing, and
// nothing at all if the state has not changed since the last call.
func (s *State) Snapshot() *Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.snapshot == nil {
		s.snapshot = &Snapshot{
			Revision: s.revisions.Last(),
			Services: s.services.Snapshot(),
			Slices:   s.slices.Snapshot(),
			Nodes:    s.nodes.Snapshot(),
			States:   s.states.Snapshot(),
		}
	}
	return s.snapshot
}

// NewCursor returns a cursor on the joined states, for a reader that has to
// learn of each service that changes. Its limits are diffstore's defaults. What
// is deleted is remembered within these limits even if every cursor has passed
// it, so that a reader may also come back with a revision and go on with
// Snapshot.States.Since.
func (s *State) NewCursor() *diffstore.Cursor[types.NamespacedName, *api.ServiceState] {
	return s.states.NewCursor()
}

// serviceChanged brings the service's joined state and its claims up to date,
// and the joined states of the services that won or lost claims by it.
func (s *State) serviceChanged(key types.NamespacedName, old, new *api.Service) {
	outcomes, changed := s.claims.replace(old, new)
	state := s.state(key)
	state.Service = new
	if changed {
		state.Lost = nil
	}
	slices.SortStableFunc(outcomes, func(a, b outcome) int { return byAge(a.claimant, b.claimant) })
	for len(outcomes) > 0 {
		claimant := outcomes[0].claimant
		n := 1
		for n < len(outcomes) && outcomes[n].claimant == claimant {
			n++
		}
		if claimant == new {
			state.Lost = settle(nil, outcomes[:n])
		} else {
			other := s.state(claimant.Key())
			other.Lost = settle(other.Lost, outcomes[:n])
			s.setState(claimant.Key(), other)
		}
		outcomes = outcomes[n:]
	}
	s.setState(key, state)
}

// settle returns what a service has lost, in order, after some outcomes.
func settle(lost []api.LostClaim, outcomes []outcome) []api.LostClaim {
	lost = slices.Clone(lost)
	for _, o := range outcomes {
		i, found := slices.BinarySearchFunc(lost, o.Claim, func(l api.LostClaim, c api.Claim) int { return compareClaims(l.Claim, c) })
		if found {
			lost = slices.Delete(lost, i, i+1)
		}
		if o.holder != o.claimant {
			lost = slices.Insert(lost, i, api.LostClaim{Claim: o.Claim, Winner: o.holder.Key()})
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return lost
}

// sliceChanged moves the slice from the state of its former service to that of
// its present one, most often the same.
func (s *State) sliceChanged(key types.NamespacedName, old, new *api.EndpointSlice) {
	if old != nil && (new == nil || old.ServiceName != new.ServiceName) {
		state := s.state(old.ServiceKey())
		if i, found := state.FindSlice(key.Name); found {
			state.Slices = slices.Concat(state.Slices[:i], state.Slices[i+1:])
			s.setState(old.ServiceKey(), state)
		}
	}
	if new == nil {
		return
	}
	state := s.state(new.ServiceKey())
	i, found := state.FindSlice(key.Name)
	next := i
	if found {
		next++
	}
	state.Slices = slices.Concat(state.Slices[:i], []*api.EndpointSlice{new}, state.Slices[next:])
	s.setState(new.ServiceKey(), state)
}

// state returns a copy of the service's joined state, to be changed and set.
func (s *State) state(key types.NamespacedName) api.ServiceState {
	if state, ok := s.states.Get(key); ok {
		return *state
	}
	return api.ServiceState{}
}

func (s *State) setState(key types.NamespacedName, state api.ServiceState) {
	if state.Service == nil && len(state.Slices) == 0 {
		s.states.Delete(0, key)
		return
	}
	s.states.Set(0, key, &state)
}

// Snapshot is the state at one revision. It is immutable and read without locks.
type Snapshot struct {
	Revision diffstore.Revision
	Services *diffstore.Snapshot[types.NamespacedName, *api.Service]
	Slices   *diffstore.Snapshot[types.NamespacedName, *api.EndpointSlice]
	Nodes    *diffstore.Snapshot[string, *api.Node]
	// States joins the others: everything about one service in one value, with
	// the revision at which anything of it last changed.
	States *diffstore.Snapshot[types.NamespacedName, *api.ServiceState]
}

// Tx is one commit. It is valid within Update only.
//
// A scope names a writer, a watch for example. Set takes an object over from
// the scope that wrote it last; Delete does nothing if another scope wrote it
// last; Replace makes what the scope wrote equal to all.
type Tx struct{ s *State }

// SetService adds or changes a service.
func (tx *Tx) SetService(scope diffstore.Scope, service *api.Service) {
	tx.s.services.Set(scope, service.Key(), service)
}

// DeleteService removes a service.
func (tx *Tx) DeleteService(scope diffstore.Scope, key types.NamespacedName) {
	tx.s.services.Delete(scope, key)
}

// ReplaceServices makes the scope's services equal to all.
func (tx *Tx) ReplaceServices(scope diffstore.Scope, all iter.Seq[*api.Service]) {
	tx.s.services.Replace(scope, keyed(all, (*api.Service).Key))
}

// SetSlice adds or changes a slice.
func (tx *Tx) SetSlice(scope diffstore.Scope, slice *api.EndpointSlice) {
	tx.s.slices.Set(scope, slice.Key(), slice)
}

// DeleteSlice removes a slice.
func (tx *Tx) DeleteSlice(scope diffstore.Scope, key types.NamespacedName) {
	tx.s.slices.Delete(scope, key)
}

// ReplaceSlices makes the scope's slices equal to all.
func (tx *Tx) ReplaceSlices(scope diffstore.Scope, all iter.Seq[*api.EndpointSlice]) {
	tx.s.slices.Replace(scope, keyed(all, (*api.EndpointSlice).Key))
}

// SetNode adds or changes a node.
func (tx *Tx) SetNode(scope diffstore.Scope, node *api.Node) {
	tx.s.nodes.Set(scope, node.Name, node)
}

// DeleteNode removes a node.
func (tx *Tx) DeleteNode(scope diffstore.Scope, name string) {
	tx.s.nodes.Delete(scope, name)
}

// ReplaceNodes makes the scope's nodes equal to all.
func (tx *Tx) ReplaceNodes(scope diffstore.Scope, all iter.Seq[*api.Node]) {
	tx.s.nodes.Replace(scope, keyed(all, func(n *api.Node) string { return n.Name }))
}

func keyed[K, V any](all iter.Seq[V], key func(V) K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for v := range all {
			if !yield(key(v), v) {
				return
			}
		}
	}
}
