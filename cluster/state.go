// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/diffstore"
	"k8s.io/apimachinery/pkg/types"
)

// State is the known state of a cluster. It is safe for concurrent use.
type State struct {
	mu       sync.Mutex
	services *diffstore.Store[types.NamespacedName, *api.Service]
	slices   *diffstore.Store[types.NamespacedName, *api.EndpointSlice]
	nodes    *diffstore.Store[string, *api.Node]
	// Readers follow this store of joined states. An entry gets a new revision if the
	// service, its slices or its lost claims change.
	states *diffstore.Store[types.NamespacedName, *api.ServiceState]
	claims claims
	// staleStore has an entry while the state is stale. Changes of this store wake readers,
	// too.
	staleStore *diffstore.Store[string, bool]

	revisions *diffstore.Revisions
	// commits is a ring buffer of the last commits.
	commits    [256]Commit
	nextCommit int
	changed    chan struct{} // closed by the next change; nil if no reader waits
	synced     chan struct{} // closed by SetSynced
	snapshot   *Snapshot     // the snapshot of the current revision, nil until requested
	objects    *Objects      // the objects of the current revision, nil until requested
	tx         Tx            // the argument of Update's function
}

// Reader contains the methods of [State] that only read.
type Reader interface {
	Snapshot() *Snapshot
	Objects() *Objects
	Changed(since diffstore.Revision) <-chan struct{}
	Synced() <-chan struct{}
	IsSynced() bool
	NewCursor() *diffstore.Cursor[types.NamespacedName, *api.ServiceState]
	Commits() []Commit
}

// Commit is an Update that changed the state.
type Commit struct {
	// First and Last are the revisions of the first and the last change of the Update.
	First, Last diffstore.Revision
	Time        time.Time
}

var _ Reader = (*State)(nil)

// Options configure a State. The zero value is right if all readers are in this process.
type Options struct {
	// With Resumable, the state also remembers deletions that no cursor needs, within the
	// limits of package diffstore. Servers set it for remote readers that resume from a
	// revision. Without Resumable, a remote reader has to start over after any deletion.
	Resumable bool
}

// New returns an empty State that is not synced.
func New(opts Options) *State {
	s := &State{claims: newClaims(), revisions: new(diffstore.Revisions), synced: make(chan struct{})}
	s.services = newStore(s, opts, api.CompareKeys, (*api.Service).Equal, s.serviceChanged)
	s.slices = newStore(s, opts, api.CompareKeys, (*api.EndpointSlice).Equal, s.sliceChanged)
	s.nodes = newStore(s, opts, strings.Compare, (*api.Node).Equal, nil)
	s.states = newStore(s, opts, api.CompareKeys, func(a, b *api.ServiceState) bool { return a == b }, nil)
	s.staleStore = newStore(s, opts, strings.Compare, func(a, b bool) bool { return a == b }, nil)
	s.tx = Tx{s}
	return s
}

func newStore[K, V any](s *State, opts Options, compare func(a, b K) int, equal func(a, b V) bool, onChange func(key K, old, new V)) *diffstore.Store[K, V] {
	return diffstore.New(diffstore.Options[K, V]{
		Compare:   compare,
		Equal:     equal,
		Revisions: s.revisions,
		OnChange:  onChange,
		Resumable: opts.Resumable,
	})
}

// Update calls f and commits the changes of f together: readers see all of them or none.
// If f panics, readers see the changes that f made before the panic. f may call the
// methods of tx, but no other method of the State.
func (s *State) Update(f func(tx *Tx)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.commit(s.revisions.Last())
	f(&s.tx)
}

// commit ends an Update. It does nothing if the Update made no change.
func (s *State) commit(before diffstore.Revision) {
	if s.revisions.Last() == before {
		return
	}
	s.snapshot, s.objects = nil, nil
	s.commits[s.nextCommit] = Commit{before + 1, s.revisions.Last(), time.Now()}
	s.nextCommit = (s.nextCommit + 1) % len(s.commits)
	if s.IsSynced() {
		s.wake()
	}
}

// SetSynced marks the state as complete: the source has written the whole cluster. Until
// then, the channels that Changed returns stay open, because woken readers might delete
// dataplane entries of services that are not written yet. Further calls have no effect.
func (s *State) SetSynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.IsSynced() {
		close(s.synced)
		s.wake()
	}
}

// Synced returns a channel that SetSynced closes.
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

// Changed returns a channel that is closed when the state is synced and its revision
// differs from the given revision. A reader without a state passes 0.
func (s *State) Changed(since diffstore.Revision) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.IsSynced() && s.revisions.Last() != since {
		return s.synced // already closed
	}
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// Snapshot returns the current state. A call is cheap, and it is free if the state has
// not changed since the last call.
func (s *State) Snapshot() *Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.latest()
}

func (s *State) latest() *Snapshot {
	if s.snapshot == nil {
		_, stale := s.staleStore.Get("")
		s.snapshot = &Snapshot{
			Revision: s.revisions.Last(),
			States:   s.states.Snapshot(),
			Nodes:    s.nodes.Snapshot(),
			Stale:    stale,
		}
	}
	return s.snapshot
}

// Objects returns the current state with its objects. Later changes cost more than after
// a call of Snapshot, because they copy parts of more stores.
func (s *State) Objects() *Objects {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects == nil {
		s.objects = &Objects{s.latest(), s.services.Snapshot(), s.slices.Snapshot()}
	}
	return s.objects
}

// Commits returns the last commits, oldest first. Their number is at most 256.
func (s *State) Commits() []Commit {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Concat(s.commits[s.nextCommit:], s.commits[:s.nextCommit])
	return slices.DeleteFunc(all, func(c Commit) bool { return c.Last == 0 })
}

// NewCursor returns a cursor on the joined states, for a reader that needs every changed
// service. The caller closes it.
func (s *State) NewCursor() *diffstore.Cursor[types.NamespacedName, *api.ServiceState] {
	return s.states.NewCursor()
}

// serviceChanged updates the service's joined state and claims, and the joined states of
// services that won or lost claims.
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
			state.Lost = updateLost(nil, outcomes[:n])
		} else {
			other := s.state(claimant.Key())
			other.Lost = updateLost(other.Lost, outcomes[:n])
			s.setState(claimant.Key(), other)
		}
		outcomes = outcomes[n:]
	}
	s.setState(key, state)
}

// updateLost returns the sorted lost claims of a service, updated by these outcomes.
func updateLost(lost []api.LostClaim, outcomes []outcome) []api.LostClaim {
	lost = slices.Clone(lost)
	for _, o := range outcomes {
		i, found := slices.BinarySearchFunc(lost, o.Claim, func(l api.LostClaim, c api.Claim) int { return compareClaims(l.Claim, c) })
		if found {
			lost = slices.Delete(lost, i, i+1)
		}
		if o.owner != o.claimant {
			lost = slices.Insert(lost, i, api.LostClaim{Claim: o.Claim, Winner: o.owner.Key()})
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return lost
}

// sliceChanged moves a slice from the joined state of its old service to the joined state
// of its new service. Usually, both are the same service.
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

// state returns a copy of a service's joined state. The caller may modify the copy.
func (s *State) state(key types.NamespacedName) api.ServiceState {
	if state, ok := s.states.Get(key); ok {
		return *state
	}
	return api.ServiceState{}
}

func (s *State) setState(key types.NamespacedName, state api.ServiceState) {
	if state.Service == nil && len(state.Slices) == 0 {
		s.states.Delete(key)
		return
	}
	s.states.Set(key, &state)
}

// Snapshot is the state at one revision. It is immutable, and readers need no lock.
type Snapshot struct {
	Revision diffstore.Revision
	// States has the joined state of each service, with the revision of its last change.
	States *diffstore.Snapshot[types.NamespacedName, *api.ServiceState]
	Nodes  *diffstore.Snapshot[string, *api.Node]
	// Stale is true if the source lost its connection long ago (see [Tx.SetStale]).
	Stale bool
}

// Objects is a snapshot for programs that copy the state. It also has the services and
// slices as separate objects, each with the revision of its last change.
type Objects struct {
	*Snapshot
	Services *diffstore.Snapshot[types.NamespacedName, *api.Service]
	Slices   *diffstore.Snapshot[types.NamespacedName, *api.EndpointSlice]
}

// Tx makes changes in a State. It is valid only during the Update that passes it.
type Tx struct{ s *State }

// SetService adds or changes a service.
func (tx *Tx) SetService(service *api.Service) {
	tx.s.services.Set(service.Key(), service)
}

// DeleteService removes a service.
func (tx *Tx) DeleteService(key types.NamespacedName) {
	tx.s.services.Delete(key)
}

// ReplaceServices sets the given services and deletes all other services.
func (tx *Tx) ReplaceServices(all iter.Seq[*api.Service]) {
	tx.s.services.Replace(keyed(all, (*api.Service).Key))
}

// SetSlice adds or changes a slice.
func (tx *Tx) SetSlice(slice *api.EndpointSlice) {
	tx.s.slices.Set(slice.Key(), slice)
}

// DeleteSlice removes a slice.
func (tx *Tx) DeleteSlice(key types.NamespacedName) {
	tx.s.slices.Delete(key)
}

// ReplaceSlices sets the given slices and deletes all other slices.
func (tx *Tx) ReplaceSlices(all iter.Seq[*api.EndpointSlice]) {
	tx.s.slices.Replace(keyed(all, (*api.EndpointSlice).Key))
}

// SetNode adds or changes a node.
func (tx *Tx) SetNode(node *api.Node) {
	tx.s.nodes.Set(node.Name, node)
}

// DeleteNode removes a node.
func (tx *Tx) DeleteNode(name string) {
	tx.s.nodes.Delete(name)
}

// ReplaceNodes sets the given nodes and deletes all other nodes.
func (tx *Tx) ReplaceNodes(all iter.Seq[*api.Node]) {
	tx.s.nodes.Replace(keyed(all, func(n *api.Node) string { return n.Name }))
}

// SetStale marks the state as stale or not stale. The state is stale if the source lost
// its connection so long ago that another server may have a newer state. SetStale does
// not change the objects.
func (tx *Tx) SetStale(stale bool) {
	if stale {
		tx.s.staleStore.Set("", true)
	} else {
		tx.s.staleStore.Delete("")
	}
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
