// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/diffstore"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/internal/shrink"
	"k8s.io/apimachinery/pkg/types"
)

// State is the known state of a cluster. It is safe for concurrent use.
type State struct {
	opts Options
	// mu is held while an Update runs. It protects the fields down to tx.
	mu sync.Mutex
	// Readers follow this store of joined states. An entry gets a new revision if the
	// service, its slices or its lost claims change.
	states *revstore.Store[types.NamespacedName, *api.ServiceState]
	slices sliceIndex
	// own has services with a long list of slices. No snapshot contains the list, so writes
	// may modify it. The values of own are the results of targetsOf. Without own, each slice
	// in a listing would cost a copy of its service's list, and a count of the endpoints.
	own     map[types.NamespacedName]int
	nodes   *revstore.Store[string, *api.Node]
	claims  claims
	refused refused
	// sharedClaims is a copy of claims for snapshots. It is nil if claims has changed.
	sharedClaims *claims
	// objectStores is nil until a program requests separate objects.
	objectStores *objectStores
	// staleStore has an entry while the state is stale. Changes of this store wake readers,
	// too.
	staleStore *revstore.Store[string, bool]

	revisions *revstore.Revisions
	tx        Tx // the argument of Update's function

	synced chan struct{} // closed by SetSynced
	// sourceError is the argument of the last SetSourceError.
	sourceError atomic.Pointer[error]
	// published is the state after the last commit, which readers see. Its lock is never
	// held while an Update runs, so that readers do not wait for a long Update.
	published published
}

// published is the state after the last commit.
type published struct {
	mu sync.Mutex
	// Readers use available to wait for a snapshot, or for the end of an Update.
	available *sync.Cond
	revision  uint64
	changed   chan struct{} // closed by the next commit; nil if no reader waits
	// The snapshot and the objects of the revision. They are nil until they are requested or
	// the next Update begins. Only goroutines that hold State.mu replace them.
	snapshot *Snapshot
	objects  *Objects
}

// objectStores have the services and slices as separate objects, for programs that copy
// the state.
type objectStores struct {
	services *revstore.Store[types.NamespacedName, *api.Service]
	slices   *revstore.Store[types.NamespacedName, *api.EndpointSlice]
}

// Options configure a State. The zero value is right if all readers are in this process.
type Options struct {
	// With Resumable, the state also remembers deletions that no cursor needs, within the
	// limits of package diffstore. Servers set it for remote readers that resume from a
	// revision. Without Resumable, a remote reader has to start over after any deletion.
	Resumable bool

	// MaxElements limits the elements of a service: the sum of its addresses × ports, its
	// endpoints × ports, and its source ranges. A node port counts once for each family,
	// and an EndpointSlice counts as one more endpoint. The state refuses a larger
	// service, as follows. If the last accepted Service object needs fewer elements, the
	// state keeps that object. The service gets the first endpoints that fit, in the
	// order of the EndpointSlices' names. If not even one endpoint fits, and no version
	// of the Service object was accepted, the service is absent. As soon as the whole
	// service fits, the state accepts it. Default: 1,000,000.
	MaxElements int
	// OnRefused, if set, is called after an Update for each service that became too large
	// in the Update, or whose invalid fields changed. It must not block. It may call the
	// methods of the State.
	OnRefused func(key types.NamespacedName, reason error)
}

// New returns an empty State that is not synced.
func New(opts Options) *State {
	s := &State{
		opts: opts, slices: newSliceIndex(), own: map[types.NamespacedName]int{}, claims: newClaims(),
		revisions: new(revstore.Revisions), synced: make(chan struct{}),
	}
	s.states = newStore(s, ordering.Keys, func(a, b *api.ServiceState) bool { return a == b })
	s.nodes = newStore(s, strings.Compare, (*api.Node).Equal)
	s.staleStore = newStore(s, strings.Compare, func(a, b bool) bool { return a == b })
	s.refused = newRefused(s)
	if opts.Resumable {
		s.addObjectStores()
	}
	s.tx = Tx{s}
	s.published.revision = s.revisions.Last()
	s.published.available = sync.NewCond(&s.published.mu)
	return s
}

func newStore[K, V any](s *State, compare func(a, b K) int, equal func(a, b V) bool) *revstore.Store[K, V] {
	return revstore.New(revstore.Options[K, V]{
		Compare:   compare,
		Equal:     equal,
		Revisions: s.revisions,
		Resumable: s.opts.Resumable,
	})
}

func (s *State) addObjectStores() {
	s.objectStores = &objectStores{
		services: newStore(s, ordering.Keys, (*api.Service).Equal),
		slices:   newStore(s, ordering.Keys, (*api.EndpointSlice).Equal),
	}
	s.objectStores.services.Replace(keyed(s.services(), (*api.Service).Key))
	s.objectStores.slices.Replace(keyed(s.acceptedSlices(), (*api.EndpointSlice).Key))
}

// services yields all services, except refused versions, in the order of their keys.
func (s *State) services() iter.Seq[*api.Service] {
	return func(yield func(*api.Service) bool) {
		for _, state := range s.states.Snapshot().All() {
			if state.Service != nil && !yield(state.Service) {
				return
			}
		}
	}
}

// acceptedSlices yields the slices of all joined states, sorted by service.
func (s *State) acceptedSlices() iter.Seq[*api.EndpointSlice] {
	return func(yield func(*api.EndpointSlice) bool) {
		for _, state := range s.states.Snapshot().All() {
			for _, slice := range state.Slices {
				if !yield(slice) {
					return
				}
			}
		}
	}
}

// Update calls f and commits the changes of f together: readers see all of them or none.
// If f panics, readers see the changes that f made before the panic. f may call the
// methods of tx, but no other method of the State.
func (s *State) Update(f func(tx *Tx)) {
	s.mu.Lock()
	var verdicts []verdict
	defer func() { s.report(verdicts) }()
	defer s.unlock()
	before, _ := s.publish() // for readers that come while f runs, and for lastAccepted
	defer s.commit(before.Revision)
	defer func() { verdicts = s.verdicts() }()
	f(&s.tx)
}

// commit ends an Update. It does nothing if the Update made no change.
func (s *State) commit(before uint64) {
	p, last := &s.published, s.revisions.Last()
	p.mu.Lock()
	defer p.mu.Unlock()
	if last == before {
		return
	}
	p.snapshot, p.objects = nil, nil
	p.revision = last
	s.revisions.Commit(before + 1)
	if s.IsSynced() {
		p.wake()
	}
}

// SetSynced marks the state as complete: the source has written the whole cluster. Until
// then, the channels that Changed returns stay open, because woken readers might delete
// dataplane entries of services that are not written yet. Further calls have no effect.
func (s *State) SetSynced() {
	s.published.mu.Lock()
	defer s.published.mu.Unlock()
	if !s.IsSynced() {
		close(s.synced)
		s.published.wake()
	}
}

// IsSynced reports whether SetSynced was called.
func (s *State) IsSynced() bool {
	select {
	case <-s.synced:
		return true
	default:
		return false
	}
}

// SetSourceError records why the source delivers nothing now, for the reader of a status
// page. A source calls it after a failure. When the source delivers again, it calls
// SetSourceError with nil. It changes neither the objects nor the revision. See also
// [Tx.SetStale].
func (s *State) SetSourceError(err error) { s.sourceError.Store(&err) }

// SourceError returns the last error that SetSourceError has recorded, or nil.
func (s *State) SourceError() error {
	if err := s.sourceError.Load(); err != nil {
		return *err
	}
	return nil
}

func (p *published) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// Changed returns a channel that is closed when the state is synced and its revision
// differs from the given revision. A reader without a state passes 0: that channel is
// closed as soon as the state is synced.
func (s *State) Changed(since uint64) <-chan struct{} {
	p := &s.published
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.revision != since {
		return s.synced
	}
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

// Snapshot returns the state after the last Update that has ended. It does not wait for
// a running Update. A call is cheap. If the state has not changed since the last call,
// it returns the same snapshot.
func (s *State) Snapshot() *Snapshot {
	p := &s.published
	p.mu.Lock()
	for p.snapshot == nil && !s.mu.TryLock() {
		p.available.Wait() // an Update begins and is about to publish, or it ends
	}
	snapshot := p.snapshot
	p.mu.Unlock()
	if snapshot != nil {
		return snapshot
	}
	defer s.unlock()
	snapshot, _ = s.publish()
	return snapshot
}

// unlock unlocks s.mu, and wakes readers that wait for the end of an Update.
func (s *State) unlock() {
	s.mu.Unlock()
	s.published.mu.Lock()
	defer s.published.mu.Unlock()
	s.published.available.Broadcast()
}

func (p *published) get() (*Snapshot, *Objects) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.snapshot, p.objects
}

// publish returns the snapshots that readers get until the next commit, and makes them
// if they do not exist yet. The caller holds s.mu.
func (s *State) publish() (*Snapshot, *Objects) {
	snapshot, objects := s.published.get()
	if snapshot == nil {
		s.own = shrink.Cleared(s.own)
		_, stale := s.staleStore.Get("")
		if s.sharedClaims == nil {
			s.sharedClaims = s.claims.clone()
		}
		snapshot = &Snapshot{
			Revision: s.revisions.Last(),
			States:   public(s.states.Snapshot()),
			Nodes:    public(s.nodes.Snapshot()),
			Refused:  public(s.refused.reasons.Snapshot()),
			Stale:    stale,
			claims:   s.sharedClaims,
		}
	}
	if objects == nil && s.objectStores != nil {
		objects = &Objects{snapshot, public(s.objectStores.services.Snapshot()), public(s.objectStores.slices.Snapshot())}
	}
	s.published.mu.Lock()
	defer s.published.mu.Unlock()
	s.published.snapshot, s.published.objects = snapshot, objects
	s.published.available.Broadcast()
	return snapshot, objects
}

// public returns a snapshot as other modules see it.
func public[K, V any](s *revstore.Snapshot[K, V]) *diffstore.Snapshot[K, V] {
	return (*diffstore.Snapshot[K, V])(s)
}

// Objects is like Snapshot, but its result also has the services and slices as separate
// objects. Unless Options.Resumable is set, the first call counts as a change of the
// state, and takes time in proportion to the number of objects.
func (s *State) Objects() *Objects {
	if _, objects := s.published.get(); objects != nil {
		return objects
	}
	s.mu.Lock()
	defer s.unlock()
	if s.objectStores == nil {
		before := s.revisions.Last()
		s.addObjectStores()
		s.commit(before)
	}
	_, objects := s.publish()
	return objects
}

// setService sets or, if new is nil, deletes a service.
func (s *State) setService(key types.NamespacedName, new *api.Service) {
	s.forgetInvalid(key, "")
	want := s.wanted(key)
	if want.Service.Equal(new) {
		return
	}
	want.Service = new
	s.settle(key, want)
}

// setLost updates the lost claims of the services that have these outcomes.
func (s *State) setLost(outcomes []outcome) {
	slices.SortFunc(outcomes, func(a, b outcome) int {
		return cmp.Or(byAge(a.claimant, b.claimant), compareClaims(a.Claim, b.Claim))
	})
	for len(outcomes) > 0 {
		key, n := outcomes[0].claimant.Key(), 1
		for n < len(outcomes) && outcomes[n].claimant == outcomes[0].claimant {
			n++
		}
		state := s.state(key)
		if lost := updateLost(state.Lost, outcomes[:n]); !slices.Equal(lost, state.Lost) {
			state.Lost = lost
			s.setState(key, state)
		}
		outcomes = outcomes[n:]
	}
}

// updateLost returns the lost claims of a service after the given outcomes. The
// arguments and the result are sorted by claim.
func updateLost(lost []api.LostClaim, outcomes []outcome) []api.LostClaim {
	var updated []api.LostClaim
	for i, o := range outcomes {
		if i > 0 && o.Claim == outcomes[i-1].Claim {
			continue
		}
		for len(lost) > 0 && compareClaims(lost[0].Claim, o.Claim) < 0 {
			updated, lost = append(updated, lost[0]), lost[1:]
		}
		if len(lost) > 0 && lost[0].Claim == o.Claim {
			lost = lost[1:]
		}
		if o.lost {
			updated = append(updated, api.LostClaim{Claim: o.Claim})
		}
	}
	return append(updated, lost...)
}

// setSlice sets a slice. If the slice belonged to another service, setSlice removes it
// from that service.
func (s *State) setSlice(slice *api.EndpointSlice) {
	key := serviceOf(slice)
	s.forgetInvalidSlice(slice.Key(), slice)
	want := s.wanted(key)
	i, found := findSlice(want.Slices, slice.Name)
	if found && want.Slices[i].Equal(slice) {
		return
	}
	if old := s.slices.set(slice); old != nil && !found {
		s.unjoin(old)
	}
	next := i
	if found {
		next++
	}
	s.splice(key, want, i, next, slice)
}

// serviceOf returns the key of the slice's service.
func serviceOf(slice *api.EndpointSlice) types.NamespacedName {
	return types.NamespacedName{Namespace: slice.Namespace, Name: slice.ServiceName}
}

// findSlice returns the index of the slice with this name, and true. If there is no such
// slice, it returns the index at which to insert the slice, and false.
func findSlice(list []*api.EndpointSlice, name string) (int, bool) {
	return slices.BinarySearchFunc(list, name, func(s *api.EndpointSlice, name string) int { return strings.Compare(s.Name, name) })
}

func (s *State) deleteSlice(key types.NamespacedName) {
	s.forgetInvalidSlice(key, nil)
	if slice := s.slices.remove(key); slice != nil {
		s.unjoin(slice)
	}
}

// unjoin removes a slice from its service.
func (s *State) unjoin(slice *api.EndpointSlice) {
	key := serviceOf(slice)
	want := s.wanted(key)
	i, _ := findSlice(want.Slices, slice.Name)
	s.splice(key, want, i, i+1)
}

// splice replaces the slices i to next of a service by new ones. It modifies the list of
// slices if no snapshot contains the list and the service is small enough.
func (s *State) splice(key types.NamespacedName, want api.ServiceState, i, next int, new ...*api.EndpointSlice) {
	targets, owned := s.own[key]
	if !owned {
		targets = targetsOf(want.Slices)
	}
	targets += targetsOf(new) - targetsOf(want.Slices[i:next])
	_, refused := s.refused.wanted[key]
	if refused || elements.Of(want.Service, targets).Check(s.opts.MaxElements) != nil {
		want.Slices = slices.Concat(want.Slices[:i], new, want.Slices[next:])
		s.settle(key, want)
		return
	}
	if s.objectStores != nil {
		for _, slice := range want.Slices[i:next] {
			if len(new) == 0 {
				s.objectStores.slices.Delete(slice.Key())
			}
		}
		for _, slice := range new {
			s.objectStores.slices.Set(slice.Key(), slice)
		}
	}
	if owned {
		want.Slices = slices.Replace(want.Slices, i, next, new...)
	} else {
		want.Slices = slices.Concat(want.Slices[:i], new, want.Slices[next:])
	}
	if owned || len(want.Slices) > few {
		s.own[key] = targets
	}
	s.setState(key, want)
}

// few is the length up to which splice always copies a list of slices.
const few = 8

// targetsOf returns the number of slices plus the number of their endpoints.
func targetsOf(list []*api.EndpointSlice) int {
	n := len(list)
	for _, slice := range list {
		n += len(slice.Endpoints)
	}
	return n
}

// accept makes the argument next the joined state of a service. It updates the service's
// claims, and the joined states of services that won or lost claims.
func (s *State) accept(key types.NamespacedName, next api.ServiceState) {
	have := s.state(key)
	if have.Service == next.Service && slices.Equal(have.Slices, next.Slices) {
		return
	}
	if s.objectStores != nil {
		s.objectStores.update(key, &have, &next)
	}
	next.Lost = have.Lost
	if have.Service != next.Service {
		s.sharedClaims = nil
		own, others, changed := s.claims.replace(have.Service, next.Service)
		if changed {
			next.Lost = updateLost(nil, own)
		}
		s.setLost(others)
	}
	s.setState(key, next)
}

// update writes the difference between two joined states of a service.
func (o *objectStores) update(key types.NamespacedName, old, new *api.ServiceState) {
	if old.Service != new.Service {
		setOrDelete(o.services, key, new.Service)
	}
	// Usually only one slice has changed.
	a, b := old.Slices, new.Slices
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	for _, slice := range a {
		if _, found := findSlice(new.Slices, slice.Name); !found {
			o.slices.Delete(slice.Key())
		}
	}
	for _, slice := range b {
		if i, found := findSlice(old.Slices, slice.Name); !found || old.Slices[i] != slice {
			o.slices.Set(slice.Key(), slice)
		}
	}
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
	Revision uint64
	// States has the joined state of each service, with the revision of its last change.
	States *diffstore.Snapshot[types.NamespacedName, *api.ServiceState]
	Nodes  *diffstore.Snapshot[string, *api.Node]
	// Refused maps a service to the reasons why it is refused (see
	// [Options.MaxElements]), and to a description of the invalid fields that the source
	// ignores (see [Tx.SetServiceProblems]).
	Refused *diffstore.Snapshot[types.NamespacedName, string]
	// Stale is true if the source lost its connection long ago (see [Tx.SetStale]).
	Stale bool

	claims *claims
}

// WithWinners returns a joined state of this snapshot with the Winner of each lost claim. The
// states in States do not have winners. So if many services have lost a claim, and it gets
// another owner, their states remain unchanged.
func (s *Snapshot) WithWinners(state *api.ServiceState) *api.ServiceState {
	if state == nil || len(state.Lost) == 0 {
		return state
	}
	named := *state
	named.Lost = slices.Clone(state.Lost)
	for i := range named.Lost {
		if owner := s.claims.owner(named.Lost[i].Claim); owner != nil {
			named.Lost[i].Winner = owner.Key()
		}
	}
	return &named
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
	tx.s.setService(service.Key(), service)
}

// DeleteService removes a service.
func (tx *Tx) DeleteService(key types.NamespacedName) {
	tx.s.setService(key, nil)
}

// SetServiceProblems records an error for each ignored field of a service. Call it after
// SetService, in the same Update. The errors are in Snapshot.Refused until the service is
// set again or deleted.
func (tx *Tx) SetServiceProblems(key types.NamespacedName, problems []error) {
	tx.s.setInvalid(key, "", problems)
}

// ReplaceServices sets the given services and deletes all other services.
func (tx *Tx) ReplaceServices(all iter.Seq[*api.Service]) {
	replace(tx.s.wantedServices(), all, (*api.Service).Key, tx.SetService, tx.DeleteService)
}

// SetSlice adds or changes a slice.
func (tx *Tx) SetSlice(slice *api.EndpointSlice) {
	tx.s.setSlice(slice)
}

// DeleteSlice removes a slice.
func (tx *Tx) DeleteSlice(key types.NamespacedName) {
	tx.s.deleteSlice(key)
}

// SetSliceProblems is like SetServiceProblems for a slice. It does nothing if the slice
// does not exist. Snapshot.Refused has the errors for the service of the slice.
func (tx *Tx) SetSliceProblems(key types.NamespacedName, problems []error) {
	if len(problems) == 0 {
		return
	}
	if slice := tx.s.slices.get(key); slice != nil {
		tx.s.setInvalid(serviceOf(slice), slice.Name, problems)
	}
}

// ReplaceSlices sets the given slices and deletes all other slices.
func (tx *Tx) ReplaceSlices(all iter.Seq[*api.EndpointSlice]) {
	replace(tx.s.slices.all(), all, (*api.EndpointSlice).Key, tx.SetSlice, tx.DeleteSlice)
}

// ReplaceSlicesOf sets the given slices, which belong to one service, and deletes all other
// slices of this service.
func (tx *Tx) ReplaceSlicesOf(service types.NamespacedName, all iter.Seq[*api.EndpointSlice]) {
	replace(slices.Values(tx.s.wanted(service).Slices), all, (*api.EndpointSlice).Key, tx.SetSlice, tx.DeleteSlice)
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

// replace calls remove for each old object that is not in the listing, and then set for
// each object in the listing. If the listing repeats a key, the last object counts.
func replace[V any](old, listing iter.Seq[V], key func(V) types.NamespacedName, set func(V), remove func(types.NamespacedName)) {
	list := slices.Collect(listing)
	slices.SortStableFunc(list, func(a, b V) int { return ordering.Keys(key(a), key(b)) })
	var gone []types.NamespacedName
	for o := range old {
		k := key(o)
		_, listed := slices.BinarySearchFunc(list, k, func(v V, k types.NamespacedName) int { return ordering.Keys(key(v), k) })
		if !listed {
			gone = append(gone, k)
		}
	}
	for _, k := range gone {
		remove(k)
	}
	for i, v := range list {
		if i+1 == len(list) || key(list[i+1]) != key(v) {
			set(v)
		}
	}
}

func setOrDelete[K, V any](store *revstore.Store[K, *V], key K, value *V) {
	if value == nil {
		store.Delete(key)
	} else {
		store.Set(key, value)
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
