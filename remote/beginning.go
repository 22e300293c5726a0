// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"crypto/sha256"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"
)

// beginnings keeps the state with which new clients begin. So the server encodes and
// compresses this state once for many clients.
type beginnings struct {
	views *views
	turns *semaphore.Weighted

	mu   sync.Mutex
	last *beginning // nil if there is none
	used time.Time
}

// beginning is a state of the cluster with which clients begin. If the cluster has
// changed since then, these clients also get the changes.
type beginning struct {
	views    *views
	snapshot *cluster.Objects
	// The services that look different to all nodes of a zone.
	byZone map[string][]*api.ServiceState
	// The services with endpoints on many nodes. All nodes share their marshalled endpoints.
	large map[*api.ServiceState]*sharedState

	mu    sync.Mutex
	packs map[packKind]*pack
	sums  map[packKind]*sums
	room  int // remaining bytes for the parts of packs and sums that belong to single nodes
}

// packKind identifies the clients that share a pack, or that share sums.
type packKind struct {
	who       audience
	frontends bool
	zone      string // empty if the clients are on nodes of different zones
}

// pack has all services as they look to a node without endpoints.
type pack struct {
	zone   string
	frames []frame
	// By node: the operations that turn views in the pack into the node's views.
	patches map[string][]frame
	// By node: the other services whose views at the node may differ from the views in the
	// pack.
	own map[string][]*api.ServiceState
}

// sums has the digests of all services as they look to a node without endpoints.
type sums struct {
	zone     string
	services []digested // sorted
	// By node: the digests of those services whose digests differ at the node.
	patches map[string][]ownSum
	// By node: the other services whose views at the node may differ.
	own map[string][]*api.ServiceState
}

// ownSum is the digest of a service at one node.
type ownSum struct {
	state   *api.ServiceState
	content [sha256.Size]byte
}

// The server drops a beginning that was unused for the time forgetAfter.
const forgetAfter = 5 * time.Minute

// maxTurns limits the clients that begin at the same time. With many more clients, each
// client would receive data so slowly that its connection might fail. Then it would begin
// again.
const maxTurns = 32

// maxTurnsPerPeer limits the clients of one peer that begin at the same time. So a peer
// cannot delay the clients of other peers.
const maxTurnsPerPeer = maxTurns / 4

// After the time maxTurn, a client no longer counts towards these limits, even if it has
// not read its first answer. So malicious peers that read slowly delay other peers only
// for a limited time.
const maxTurn = 5 * time.Second

// noticeInterval is the time between two messages to a client that waits for its turn.
// Clients leave a silent server after a longer time.
const noticeInterval = 5 * time.Second

func newBeginnings(v *views) *beginnings {
	return &beginnings{views: v, turns: semaphore.NewWeighted(maxTurns)}
}

// turn waits until the client may begin. The clients of a peer wait in a queue, in the
// order of their calls. The first clients of all peers wait in a common queue. While turn
// waits, it calls notify from time to time, in another goroutine. The caller calls the
// result end when the client has its first answer.
func (b *beginnings) turn(ctx context.Context, ofPeer *semaphore.Weighted, notify func() error) (end func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex // locked while notify runs
	var notice *time.Timer
	mu.Lock()
	notice = time.AfterFunc(noticeInterval, func() {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		if err := notify(); err != nil {
			cancel(err)
		}
		notice.Reset(noticeInterval)
	})
	mu.Unlock()
	if err = ofPeer.Acquire(ctx, 1); err == nil {
		if err = b.turns.Acquire(ctx, 1); err != nil {
			ofPeer.Release(1)
		}
	}
	if err == nil {
		end = b.began(ofPeer)
	}
	mu.Lock() // notify no longer runs
	defer mu.Unlock()
	if ctx.Err() != nil && end != nil {
		end()
		end = nil
	}
	if end == nil {
		err = context.Cause(ctx)
	}
	cancel(nil)
	notice.Stop()
	return end, err
}

// began returns the function that ends a turn.
func (b *beginnings) began(ofPeer *semaphore.Weighted) (end func()) {
	release := func() {
		b.turns.Release(1)
		ofPeer.Release(1)
	}
	timer := time.AfterFunc(maxTurn, release)
	return func() {
		if timer.Stop() {
			release()
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

// fits reports whether few services changed between the beginning and a snapshot: at most
// a twentieth.
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
		views: v, snapshot: snapshot, packs: map[packKind]*pack{}, sums: map[packKind]*sums{},
		byZone: map[string][]*api.ServiceState{}, large: map[*api.ServiceState]*sharedState{}, room: v.limit,
	}
	room := v.limit
	for _, state := range statesOf(snapshot.Snapshot).All() {
		if state.Service == nil || endpoints(state) < manyNodes && onlyLocalDiffers(state) {
			continue
		}
		s := newSharedState(state)
		for zone := range s.zones {
			x.byZone[zone] = append(x.byZone[zone], state)
		}
		if size := largeNode * len(s.nodes); len(s.nodes) >= manyNodes && size <= room {
			room -= size
			s.reported = true // by all, if it is too large
			x.large[state] = s
		}
	}
	return x
}

func endpoints(state *api.ServiceState) (n int) {
	for _, slice := range state.Slices {
		n += len(slice.Endpoints)
	}
	return n
}

// If a service has endpoints on at least manyNodes nodes, a beginning keeps the marshalled
// endpoints. These endpoints need approximately largeNode bytes for each node.
const (
	manyNodes = 50
	largeNode = 1000
)

// packFor returns the pack for clients of a kind.
func (x *beginning) packFor(kind packKind) *pack {
	return forKind(x, x.packs, kind, x.newPack)
}

// sumsFor returns the sums for clients of a kind.
func (x *beginning) sumsFor(kind packKind) *sums {
	return forKind(x, x.sums, kind, x.newSums)
}

// forKind returns the value for clients of a kind. If only few services look different to
// the clients' zone, all such zones share a value.
func forKind[T any](x *beginning, values map[packKind]*T, kind packKind, newValue func(packKind) *T) *T {
	if 20*len(x.byZone[kind.zone]) <= x.snapshot.States.Len() {
		kind.zone = ""
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	v, ok := values[kind]
	if !ok {
		v = newValue(kind)
		values[kind] = v
	}
	return v
}

// all yields all services, each with its view for nodes without endpoints. If there is no
// view, the yielded view is nil.
func (x *beginning) all(kind packKind) iter.Seq2[*sharedState, *nodeless] {
	return func(yield func(*sharedState, *nodeless) bool) {
		for _, state := range statesOf(x.snapshot.Snapshot).All() {
			if state.Service == nil {
				continue
			}
			s := newSharedState(state)
			c := s.classOf("", kind.zone, kind.frontends)
			v := &nodeless{kind: kind, view: c.view(x.snapshot.Snapshot, state)}
			v.wire = x.views.marshal(s, c, v.view, nil)
			if !yield(s, v) {
				return
			}
		}
	}
}

// nodeless is a view for nodes without endpoints.
type nodeless struct {
	kind packKind
	view *api.View
	wire *wireView // nil if there is no view
}

// nodeEndpoint is an endpoint of a view, and its node.
type nodeEndpoint struct {
	wireEndpoint
	node string
}

// endpoints returns the endpoints that the clients receive, sorted by key. The second
// result is false if the view of any node differs from v in more than the field Local.
func (v *nodeless) endpoints(s *sharedState) ([]nodeEndpoint, bool) {
	if v.wire == nil || v.kind.frontends || !onlyLocalDiffers(s.state) {
		return nil, false
	}
	nodes := make(map[string]string, len(v.wire.endpoints)) // by key
	for _, endpoints := range [][]api.Endpoint{v.view.Endpoints, v.view.Draining} {
		for i := range endpoints {
			nodes[wireKey(&endpoints[i])] = endpoints[i].NodeName
		}
	}
	all := v.wire.received(v.kind.who)
	list := make([]nodeEndpoint, len(all))
	for i, e := range all {
		list[i] = nodeEndpoint{e, nodes[e.key]}
	}
	return list, true
}

// packBytes is the approximate size of the operations that are compressed together.
const packBytes = 256 << 10

func (x *beginning) newPack(kind packKind) *pack {
	p := &pack{zone: kind.zone, patches: map[string][]frame{}, own: map[string][]*api.ServiceState{}}
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
	for s, v := range x.all(kind) {
		if list, ok := v.endpoints(s); !ok || !x.addPatches(p, v.wire.key, list) {
			addOwn(p.own, s)
		}
		if v.wire == nil {
			continue
		}
		for _, f := range v.wire.newWhole(kind.who) {
			if ops.Write(f); ops.Len() >= packBytes {
				flush()
			}
		}
	}
	if ops.Len() > 0 {
		flush()
	}
	return p
}

// addOwn lists a service at its nodes.
func addOwn(own map[string][]*api.ServiceState, s *sharedState) {
	for node := range s.nodes {
		own[node] = append(own[node], s.state)
	}
}

// patchOverhead is the approximate size of a patch in memory, without its strings.
const patchOverhead = 50

// addPatches adds the patches of a service for the nodes of its endpoints. It returns false
// if there is no room for them.
func (x *beginning) addPatches(p *pack, key types.NamespacedName, list []nodeEndpoint) bool {
	size := 0
	for i := range list {
		size += len(key.Namespace) + len(key.Name) + len(list[i].key) + len(list[i].value) + patchOverhead
	}
	if size > x.room {
		return false
	}
	x.room -= size
	var local []byte
	for i := range list {
		if e := &list[i]; e.node != "" {
			local = appendLocal(local[:0], e.value)
			p.patches[e.node] = append(p.patches[e.node], setFrame(localv1.Set_EndpointsSet, endpointPath(key, e.key), local))
		}
	}
	return true
}

// maxHashed limits the bytes of a service that newSums hashes for all nodes of the
// service together. If a service is larger, only a client on a node with its endpoints
// waits for the digests.
const maxHashed = 256 << 10

func (x *beginning) newSums(kind packKind) *sums {
	d := &sums{zone: kind.zone, patches: map[string][]ownSum{}, own: map[string][]*api.ServiceState{}}
	var content, scratch []byte
	for s, v := range x.all(kind) {
		content = content[:0]
		if v.wire != nil {
			content = v.wire.appendContent(content, kind.who)
			d.services = append(d.services, newDigested(v.wire.key, content))
		}
		room := x.room - int(unsafe.Sizeof(ownSum{}))*len(s.nodes)
		if list, ok := v.endpoints(s); ok && room >= 0 && len(content)*len(s.nodes) <= maxHashed {
			x.room = room
			scratch = d.addPatches(s, v.wire.service, list, scratch)
		} else {
			addOwn(d.own, s)
		}
	}
	sortDigested(d.services)
	for node, list := range d.patches {
		d.patches[node] = slices.Clone(list) // without free space
	}
	return d
}

// addPatches adds the digests of a service for the nodes of its endpoints. It writes to
// the buffer scratch, and returns this buffer.
func (d *sums) addPatches(s *sharedState, service []byte, list []nodeEndpoint, scratch []byte) []byte {
	there := make([]wireEndpoint, len(list))
	for node := range s.nodes {
		scratch = scratch[:0]
		for i := range list {
			there[i] = list[i].wireEndpoint
			if list[i].node == node && node != "" {
				at := len(scratch)
				scratch = appendLocal(scratch, there[i].value)
				there[i].value = scratch[at:]
			}
		}
		if at := len(scratch); at > 0 {
			scratch = appendWhole(scratch, service, there)
			d.patches[node] = append(d.patches[node], ownSum{s.state, sha256.Sum256(scratch[at:])})
		}
	}
	return scratch
}

// onlyLocalDiffers reports whether all nodes have the same view of a service, apart from
// the field Local of endpoints.
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

// own returns a node's own services of a pack or of sums. If the pack is not for the
// node's zone, own also returns the services that look different there. The states of the
// services are from the beginning.
func (x *beginning) own(own []*api.ServiceState, zone string, to *target) []*api.ServiceState {
	if zone == to.zone {
		return own
	}
	return slices.Concat(own, x.byZone[to.zone])
}

// changes returns the states of the services that have changed since the beginning. The
// state of a deleted service is nil.
func (x *beginning) changes(snapshot *cluster.Objects) map[types.NamespacedName]*api.ServiceState {
	changes, _ := statesOf(snapshot.Snapshot).Since(x.snapshot.Revision)
	return maps.Collect(changes)
}

// shared returns the state of a service for views of one node. Such views are not worth a
// place in the cache.
func (x *beginning) shared(state *api.ServiceState) *sharedState {
	if s, ok := x.large[state]; ok {
		return s
	}
	s := newSharedState(state)
	s.reported = true // by all, if it is too large
	return s
}

func (x *beginning) marshal(s *sharedState, c class, view *api.View) *wireView {
	s.mu.Lock()
	defer s.mu.Unlock()
	return x.views.marshal(s, c, view, &s.endpoints)
}

// sendAll sends the whole snapshot to a client without a valid token.
func (w *watch) sendAll(x *beginning, snapshot *cluster.Objects, to *target) {
	kind := packKind{w.who, w.frontends, to.zone}
	changes := x.changes(snapshot)
	if n := bucketCount(w.have); n > 0 {
		d := x.sumsFor(kind)
		views := w.different(x, d, changes, to)
		if discard, few := d.at(w.name, views, w.who).compare(w.have); few {
			w.sendBuckets(d, snapshot, to, n, discard, views)
			return
		}
	}
	p := x.packFor(kind)
	w.sender.ops(resetFrame())
	if to.node != nil {
		w.sendNode(to.node)
	}
	w.sender.ops(p.frames...)
	w.sender.ops(p.patches[w.name]...) // changed services are replaced or deleted below
	for _, state := range x.own(p.own[w.name], p.zone, to) {
		if w.sender.err != nil {
			return
		}
		if _, ok := changes[state.Service.Key()]; ok {
			continue
		}
		for _, frames := range w.patch(x, p, state, to) {
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

// withoutEqual returns v without the parts that are equal in another view of the same
// state. The endpoints of both views are sorted by address and ports. If the service is
// equal, only its name stays.
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

// different returns the client's views of all services that may differ from the sums,
// except services with digests in d.patches. If the client has no view of a service, the
// view is nil.
func (w *watch) different(x *beginning, d *sums, changes map[types.NamespacedName]*api.ServiceState, to *target) map[types.NamespacedName]*wireView {
	views := map[types.NamespacedName]*wireView{}
	for _, state := range x.own(d.own[w.name], d.zone, to) {
		s := x.shared(state)
		c := s.classOf(w.name, to.zone, w.frontends)
		views[state.Service.Key()] = x.marshal(s, c, c.view(x.snapshot.Snapshot, state))
	}
	for key, state := range changes {
		views[key] = w.view(state, to)
	}
	return views
}

// nodeSums are the digests of all services at one node.
type nodeSums struct {
	services []digested // as they are at other nodes, sorted
	// The services that are different at this node, sorted. The field absent is true if the
	// service is not in the node's view.
	different []differentSum
}

type differentSum struct {
	digested
	absent bool
}

// compare sorts by order, and then by name, because tenants can choose names with the
// same order.
func (s differentSum) compare(other digested) int {
	return cmp.Or(cmp.Compare(s.order, other.order), ordering.Keys(s.key, other.key))
}

// at returns the digests at a node. The argument views has the views of services that may
// be different at the node, except services in d.patches.
func (d *sums) at(node string, views map[types.NamespacedName]*wireView, who audience) *nodeSums {
	n := &nodeSums{services: d.services}
	n.different = make([]differentSum, 0, len(d.patches[node])+len(views))
	for i := range d.patches[node] {
		p := &d.patches[node][i]
		key := p.state.Service.Key()
		if _, ok := views[key]; !ok {
			n.different = append(n.different, differentSum{digested: digested{key, orderOf(key), p.content}})
		}
	}
	for key, view := range views {
		if view == nil {
			n.different = append(n.different, differentSum{digested{key: key, order: orderOf(key)}, true})
		} else {
			n.different = append(n.different, differentSum{digested: newDigested(key, view.content(who))})
		}
	}
	slices.SortFunc(n.different, func(a, b differentSum) int { return a.compare(b.digested) })
	return n
}

// buckets divides the services into count buckets, and yields the services of each
// bucket. The yielded list is valid until the next bucket.
func (n *nodeSums) buckets(count int) iter.Seq2[int, []digested] {
	return func(yield func(int, []digested) bool) {
		different := n.different
		var list []digested
		for bucket, services := range bucketsOf(n.services, count) {
			end := 0
			for end < len(different) && bucketOf(different[end].order, count) == bucket {
				end++
			}
			if end > 0 {
				list = merge(list[:0], services, different[:end])
				services, different = list, different[end:]
			}
			if !yield(bucket, services) {
				return
			}
		}
	}
}

// merge appends the services to list. A service in the argument different replaces the
// other service of the same name.
func merge(list, services []digested, different []differentSum) []digested {
	for i := range different {
		if !different[i].absent {
			list = append(list, different[i].digested)
		}
	}
	for i := range services {
		if _, replaced := slices.BinarySearchFunc(different, services[i], differentSum.compare); !replaced {
			list = append(list, services[i])
		}
	}
	sortDigested(list)
	return list
}

// compare returns the buckets that differ: the client's services in them are not the
// services of its node. It also reports whether these buckets have at most half of the
// services. Because tenants choose names, one bucket may have most services.
func (n *nodeSums) compare(have *localv1.Digests) (differ []uint32, few bool) {
	all, send := 0, 0
	h := newBucketHash(have.GetSalt())
	for bucket, services := range n.buckets(bucketCount(have)) {
		all += len(services)
		if !bytes.Equal(h.of(services), have.GetBuckets()[bucket*bucketDigest:][:bucketDigest]) {
			differ = append(differ, uint32(bucket))
			send += len(services)
		}
	}
	return differ, 2*send <= all
}

// sendBuckets replaces the services in some of n buckets.
func (w *watch) sendBuckets(d *sums, snapshot *cluster.Objects, to *target, n int, buckets []uint32, changed map[types.NamespacedName]*wireView) {
	w.sendNode(to.node)
	if len(buckets) == 0 {
		return
	}
	w.sender.ops(newFrame(&localv1.OpItem{Op: &localv1.OpItem_Discard{Discard: &localv1.Buckets{Numbers: buckets}}}))
	for bucket, services := range bucketsOf(d.services, n) {
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
