// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"compress/flate"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"
)

// beginnings keeps the state with which new clients begin. So the server encodes and
// compresses it once for many clients.
type beginnings struct {
	views *views
	turns *semaphore.Weighted

	mu   sync.Mutex
	last *beginning // nil if there is none
	used time.Time
}

// beginning is a state of the cluster with which clients begin. If the state has changed
// since, they also get the changes.
type beginning struct {
	views    *views
	snapshot *cluster.Objects
	// The services that look different to all nodes of a zone.
	byZone map[string][]*api.ServiceState
	// The services with endpoints on many nodes. All nodes share their marshalled endpoints.
	large map[*api.ServiceState]*sharedState

	mu    sync.Mutex
	packs map[packKind]*pack
	room  int // for patches, in bytes
}

// packKind identifies the clients that share a pack.
type packKind struct {
	who       audience
	frontends bool
	zone      string // empty for nodes of different zones
}

// pack has all services as they look to a node without endpoints.
type pack struct {
	zone     string
	frames   []frame
	services []digested              // sorted
	own      map[string][]ownService // by node: the services that may look different to it
}

// ownService is a service whose view at a node may differ from the view in the pack.
type ownService struct {
	state *api.ServiceState
	// The operations that turn the view in the pack into the node's view. If it is nil, the
	// node's view has to be computed.
	patch frame
}

// forgetAfter is the time after which the server drops an unused beginning.
const forgetAfter = 5 * time.Minute

// maxTurns limits the clients that begin at the same time. With many more clients, each
// would receive data so slowly that its connection might fail, and it would begin
// again.
const maxTurns = 32

// maxTurnsPerPeer limits the clients of one peer that begin at the same time. So a peer
// cannot delay the clients of other peers.
const maxTurnsPerPeer = maxTurns / 4

// maxTurn is the time after which a client no longer counts towards these limits, even
// if it has not read its first answer. So malicious peers that read slowly delay other
// peers only for a limited time.
const maxTurn = 5 * time.Second

// noticeInterval is the time between two messages to a client that waits for its turn. It
// is shorter than the time after which clients leave a silent server.
const noticeInterval = 5 * time.Second

func newBeginnings(v *views) *beginnings {
	return &beginnings{views: v, turns: semaphore.NewWeighted(maxTurns)}
}

// turn waits until the client may begin. The clients of a peer wait in a queue, in the
// order of their calls. The first clients of all peers wait in a common queue. While it
// waits, it calls notify from time to time. The caller calls end when the client has
// its first answer.
func (b *beginnings) turn(ctx context.Context, ofPeer *semaphore.Weighted, notify func() error) (end func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	turn := make(chan error, 1)
	go func() {
		err := ofPeer.Acquire(ctx, 1)
		if err == nil {
			if err = b.turns.Acquire(ctx, 1); err != nil {
				ofPeer.Release(1)
			}
		}
		turn <- err
	}()
	release := func() {
		b.turns.Release(1)
		ofPeer.Release(1)
	}
	notice := time.NewTicker(noticeInterval)
	defer notice.Stop()
	for {
		select {
		case err := <-turn:
			if err != nil {
				return nil, err
			}
			timer := time.AfterFunc(maxTurn, release)
			return func() {
				if timer.Stop() {
					release()
				}
			}, nil
		case <-notice.C:
			if err := notify(); err != nil {
				cancel()
				if <-turn == nil {
					release()
				}
				return nil, err
			}
		}
	}
}

// of returns the beginning for a client that needs a snapshot. The beginning may be newer
// than the snapshot.
func (b *beginnings) of(snapshot *cluster.Objects) *beginning {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last == nil || !b.last.fits(snapshot) {
		b.last = newBeginning(b.views, snapshot)
	}
	b.used = time.Now()
	return b.last
}

// forget drops an unused beginning.
func (b *beginnings) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.used) >= forgetAfter {
		b.last = nil
	}
}

// fits reports whether at most a twentieth of the services changed between the beginning
// and a snapshot.
func (x *beginning) fits(snapshot *cluster.Objects) bool {
	changes, ok := statesOf(snapshot.Snapshot).Since(x.snapshot.Revision)
	if !ok {
		return false
	}
	changed := 0
	for range changes {
		if changed++; changed > 100+x.snapshot.States.Len()/20 {
			return false
		}
	}
	return true
}

func newBeginning(v *views, snapshot *cluster.Objects) *beginning {
	x := &beginning{
		views: v, snapshot: snapshot, packs: map[packKind]*pack{},
		byZone: map[string][]*api.ServiceState{}, large: map[*api.ServiceState]*sharedState{}, room: v.limit,
	}
	room := v.limit
	for _, state := range statesOf(snapshot.Snapshot).All() {
		if state.Service == nil {
			continue
		}
		s := newSharedState(state)
		for zone := range s.zones {
			x.byZone[zone] = append(x.byZone[zone], state)
		}
		if size := largeNode * len(s.nodes); len(s.nodes) >= manyNodes && size <= room {
			room -= size
			s.reported = true // by newPack, if it is too large
			x.large[state] = s
		}
	}
	return x
}

// If a service has endpoints on at least manyNodes nodes, a beginning keeps its marshalled
// endpoints. They need approximately largeNode bytes for each node.
const (
	manyNodes = 50
	largeNode = 1000
)

// pack returns the pack for the nodes of a zone. If few services look different to the
// zone, it shares a pack with all such zones.
func (x *beginning) pack(kind packKind) *pack {
	if 20*len(x.byZone[kind.zone]) <= x.snapshot.States.Len() {
		kind.zone = ""
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	p, ok := x.packs[kind]
	if !ok {
		p = x.newPack(kind)
		x.packs[kind] = p
	}
	return p
}

// packBytes is the approximate size of the operations that are compressed together.
const packBytes = 256 << 10

func (x *beginning) newPack(kind packKind) *pack {
	p := &pack{zone: kind.zone, own: map[string][]ownService{}}
	var ops, packed bytes.Buffer
	w, _ := flate.NewWriter(&packed, flate.BestSpeed) // fails only if the level is invalid
	flush := func() {
		packed.Reset()
		w.Reset(&packed)
		w.Write(ops.Bytes()) // a bytes.Buffer cannot fail
		w.Close()
		ops.Reset()
		p.frames = append(p.frames, newFrame(&localv1.OpItem{Op: &localv1.OpItem_Packed{Packed: packed.Bytes()}}))
	}
	for key, state := range statesOf(x.snapshot.Snapshot).All() {
		if state.Service == nil {
			continue
		}
		s := newSharedState(state)
		c := s.classOf("", kind.zone, kind.frontends)
		shown := c.view(x.snapshot.Snapshot, state)
		view := x.views.marshal(s, c, shown)
		if patches := x.room - patchSize*len(s.nodes); view != nil && !kind.frontends && patches >= 0 && onlyLocalDiffers(state) {
			x.room = patches
			p.addPatches(s, shown, kind.who)
		} else {
			for node := range s.nodes {
				p.own[node] = append(p.own[node], ownService{state: state})
			}
		}
		if view == nil {
			continue
		}
		p.services = append(p.services, newDigested(key, view.content(kind.who)))
		for _, f := range view.newWhole(kind.who) {
			if ops.Write(f); ops.Len() >= packBytes {
				flush()
			}
		}
	}
	if ops.Len() > 0 {
		flush()
	}
	sortDigested(p.services)
	return p
}

// patchSize is the approximate memory of a patch, in bytes.
const patchSize = 300

// onlyLocalDiffers reports whether all nodes have the same view of a service, except that
// the endpoints on a node are local there.
func onlyLocalDiffers(state *api.ServiceState) bool {
	if state.Service.InternalTrafficToLocal || state.Service.ExternalTrafficToLocal {
		return false
	}
	for _, slice := range state.Slices {
		for i := range slice.Endpoints {
			if d := slice.Endpoints[i].Details; d != nil && d.Hints != nil {
				return false
			}
		}
	}
	return true
}

// addPatches adds the patches of a service for which onlyLocalDiffers is true.
func (p *pack) addPatches(s *sharedState, view *api.View, who audience) {
	add := func(list []api.Endpoint, draining bool) {
		for i := range list {
			e := &list[i]
			shared, _ := s.endpoints.wire(e, draining)
			if e.NodeName == "" || !who.receives(&shared) {
				continue
			}
			own := p.own[e.NodeName]
			if len(own) == 0 || own[len(own)-1].state != s.state {
				own = append(own, ownService{state: s.state})
				p.own[e.NodeName] = own
			}
			patch := &own[len(own)-1].patch
			*patch = append(*patch, setFrame(localv1.Set_EndpointsSet, endpointPath(view.Key(), shared.key), withLocal(shared.value))...)
		}
	}
	add(view.Endpoints, false)
	add(view.Draining, true)
}

// own returns the services whose view for the client may differ from the view in the
// pack. The states are those of the beginning.
func (w *watch) own(x *beginning, p *pack, to *target) []ownService {
	own := p.own[w.name]
	if p.zone != to.zone {
		own = slices.Clip(own)
		for _, state := range x.byZone[to.zone] {
			own = append(own, ownService{state: state})
		}
	}
	return own
}

// changes returns the states of the services that have changed since the beginning, or nil
// for a deleted service.
func (x *beginning) changes(snapshot *cluster.Objects) map[types.NamespacedName]*api.ServiceState {
	changes, _ := statesOf(snapshot.Snapshot).Since(x.snapshot.Revision)
	return maps.Collect(changes)
}

// shared returns the state of a service for views of one node, which are not worth a
// place in the cache.
func (x *beginning) shared(state *api.ServiceState) *sharedState {
	if s, ok := x.large[state]; ok {
		return s
	}
	s := newSharedState(state)
	s.reported = true // by newPack, if it is too large
	return s
}

func (x *beginning) marshal(s *sharedState, c class, view *api.View) *wireView {
	s.mu.Lock()
	defer s.mu.Unlock()
	return x.views.marshal(s, c, view)
}

// sendAll brings a client without a valid token to the snapshot.
func (w *watch) sendAll(x *beginning, snapshot *cluster.Objects, to *target) {
	p := x.pack(packKind{w.who, w.frontends, to.zone})
	changes := x.changes(snapshot)
	if n := bucketCount(w.have); n > 0 {
		views := w.different(x, p, changes, to)
		if discard, few := p.compare(w.have, n, views, w.who); few {
			w.sendBuckets(p, snapshot, to, n, discard, views)
			return
		}
	}
	w.sender.ops(resetFrame())
	if to.node != nil {
		w.sendNode(to.node)
	}
	w.sender.ops(p.frames...)
	for _, o := range w.own(x, p, to) {
		if w.sender.err != nil {
			return
		}
		if _, ok := changes[o.state.Service.Key()]; ok {
			continue
		}
		if o.patch != nil {
			w.sender.ops(o.patch)
			continue
		}
		for _, frames := range w.patch(x, p, o.state, to) {
			w.sender.ops(frames...)
		}
	}
	w.sendWholes(maps.All(changes), to, true)
}

// patch returns the difference between a view in the pack and the client's view.
func (w *watch) patch(x *beginning, p *pack, state *api.ServiceState, to *target) *wireDelta {
	s := x.shared(state)
	theirs, mine := s.classOf("", p.zone, w.frontends), s.classOf(w.name, to.zone, w.frontends)
	before, after := theirs.view(x.snapshot.Snapshot, state), mine.view(x.snapshot.Snapshot, state)
	if before != nil && after != nil && !w.frontends {
		before, after = withoutEqual(before, after), withoutEqual(after, before)
	}
	old, new := x.marshal(s, theirs, before), x.marshal(s, mine, after)
	if old == nil && new == nil {
		return &wireDelta{}
	}
	return newDelta(old, new, w.who)
}

// withoutEqual returns v without the parts that equal those of another view of the same
// state. The endpoints of both views are sorted by address and ports. Of an equal
// service, only the name stays.
func withoutEqual(v, other *api.View) *api.View {
	out := *v
	if slices.Equal(v.Unusable, other.Unusable) && slices.Equal(v.Lost, other.Lost) {
		out.Service, out.Unusable, out.Lost = &api.Service{Namespace: v.Service.Namespace, Name: v.Service.Name}, nil, nil
	}
	out.Endpoints, out.Draining = notIn(v.Endpoints, other.Endpoints), notIn(v.Draining, other.Draining)
	return &out
}

func notIn(list, other []api.Endpoint) []api.Endpoint {
	var rest []api.Endpoint
	for i := range list {
		e := &list[i]
		for len(other) > 0 && ordering.Endpoints(&other[0], e) < 0 {
			other = other[1:]
		}
		if len(other) == 0 || !other[0].Equal(e) {
			rest = append(rest, *e)
		}
	}
	return rest
}

// different returns the client's views of all services that may differ from the pack. A
// view is nil if the client has none.
func (w *watch) different(x *beginning, p *pack, changes map[types.NamespacedName]*api.ServiceState, to *target) map[types.NamespacedName]*wireView {
	views := map[types.NamespacedName]*wireView{}
	for _, o := range w.own(x, p, to) {
		s := x.shared(o.state)
		c := s.classOf(w.name, to.zone, w.frontends)
		views[o.state.Service.Key()] = x.marshal(s, c, c.view(x.snapshot.Snapshot, o.state))
	}
	for key, state := range changes {
		views[key] = w.view(state, to)
	}
	return views
}

// compare returns the buckets in which the client's services differ from those of the
// pack after the changes in changed. It also reports whether at most half of the
// services are in these buckets. Tenants choose names, so one bucket may have most
// services.
func (p *pack) compare(have *localv1.Digests, n int, changed map[types.NamespacedName]*wireView, who audience) (differ []uint32, few bool) {
	all, send := 0, 0
	for bucket, services := range p.buckets(n, changed, who) {
		all += len(services)
		if !bytes.Equal(digestOf(have.GetSalt(), services), have.GetBuckets()[bucket*bucketDigest:][:bucketDigest]) {
			differ = append(differ, uint32(bucket))
			send += len(services)
		}
	}
	return differ, 2*send <= all
}

// buckets yields the services of each of n buckets: those of the pack, changed by the given
// views.
func (p *pack) buckets(n int, changed map[types.NamespacedName]*wireView, who audience) func(yield func(bucket int, services []digested) bool) {
	inBucket := map[int][]digested{}
	for key, view := range changed {
		bucket := bucketOf(orderOf(key), n)
		list := inBucket[bucket]
		if view != nil {
			list = append(list, newDigested(key, view.content(who)))
		}
		inBucket[bucket] = list
	}
	return func(yield func(int, []digested) bool) {
		for bucket, services := range bucketsOf(p.services, n) {
			if list, ok := inBucket[bucket]; ok {
				for _, s := range services {
					if _, ok := changed[s.key]; !ok {
						list = append(list, s)
					}
				}
				sortDigested(list)
				services = list
			}
			if !yield(bucket, services) {
				return
			}
		}
	}
}

// sendBuckets replaces the services in some of n buckets.
func (w *watch) sendBuckets(p *pack, snapshot *cluster.Objects, to *target, n int, buckets []uint32, changed map[types.NamespacedName]*wireView) {
	w.sendNode(to.node)
	if len(buckets) == 0 {
		return
	}
	w.sender.ops(newFrame(&localv1.OpItem{Op: &localv1.OpItem_Discard{Discard: &localv1.Buckets{Numbers: buckets}}}))
	for bucket, services := range bucketsOf(p.services, n) {
		if _, ok := slices.BinarySearch(buckets, uint32(bucket)); !ok {
			continue
		}
		for i := range services {
			if w.sender.err != nil {
				return
			}
			key := services[i].key
			if _, ok := changed[key]; !ok {
				state, _ := statesOf(snapshot.Snapshot).Get(key)
				w.sendWhole(key, w.view(state, to), false)
			}
		}
	}
	for key, view := range changed {
		if _, ok := slices.BinarySearch(buckets, uint32(bucketOf(orderOf(key), n))); ok {
			w.sendWhole(key, view, false)
		}
	}
}
