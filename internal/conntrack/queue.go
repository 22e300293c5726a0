// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/shrink"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// queue has the destinations whose flows the next pass checks. Sync queues destinations
// in groups that share their verdict. So the time for a change of endpoints does not
// depend on the number of the service's addresses.
type queue struct {
	mu sync.Mutex
	// udp has all UDP destinations. tcp has only queued groups, because TCP connections
	// need a check in only two cases: their destination gets its first endpoint, or the
	// connections to a lost endpoint are reset.
	udp, tcp index
	// prunes is true if records may be stale at the end of a pass: there were some when the
	// pass began. Otherwise pass is not used, which has the key of every delivered service.
	prunes bool
	pass   sink.Pass
	// due has the queued groups. removed has the UDP destinations without a service, with
	// the value that count had when they were queued.
	due     map[*group]struct{}
	removed map[destination]uint64
	// count is the number of calls of the method add that queued destinations.
	count uint64
}

// index finds the group of a destination.
type index struct {
	protocol uint8
	records  map[types.NamespacedName]*record
	// groups maps each destination to a group of the last service that was delivered with
	// the destination.
	groups map[destination]*group
	// The largest sizes of records and groups.
	mostRecords, mostGroups shrink.Size
}

// record is the last delivery of a service.
type record struct {
	view   *api.View // without its endpoints
	groups []*group
	// displaced is true if another service has taken over a destination. The driver will
	// deliver or prune this service.
	displaced bool
}

// group is a class of a service. The destinations of the class are in an index. Each
// delivery of the service updates the verdict. So a pass keeps flows to an endpoint that
// was added after the group was queued.
type group struct {
	record *record
	class  class
	kind   kind
	filter filter
	verdict
	count uint64 // queue.count after the call of add that queued the group, or 0
	// overlaps is true if a destination may also be an endpoint.
	overlaps bool
}

// addDestination records that d is one of the destinations of g.
func (g *group) addDestination(d destination) {
	g.filter = g.filter.union(filterOf(d))
	g.overlaps = g.overlaps || !d.addr.IsValid() || g.existing.Has(netip.AddrPortFrom(d.addr, d.port))
}

// dropEndpoints drops the endpoints if no flow needs them. If TCP connections are never
// reset, only untranslated connections are checked. Their endpoint is the destination.
// Without this, the queue would have the views of thousands of services during a pass.
func (g *group) dropEndpoints() {
	if g.kind.protocol == unix.IPPROTO_TCP && !g.resets && !g.overlaps {
		g.existing = nodeview.Existing{}
	}
}

func newIndex(protocol uint8) index {
	return index{protocol: protocol, records: map[types.NamespacedName]*record{}, groups: map[destination]*group{}}
}

func newQueue() *queue {
	return &queue{
		udp: newIndex(unix.IPPROTO_UDP), tcp: newIndex(unix.IPPROTO_TCP),
		due: map[*group]struct{}{}, removed: map[destination]uint64{},
	}
}

// add queues the destinations of flows that may be stale after the changes c. It reports
// whether it queued a destination.
func (q *queue) add(c *sink.Changes) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	count := q.count + 1
	var removed []destination
	if c.First {
		q.prunes = len(q.udp.records)+len(q.tcp.records) > 0
	}
	if q.prunes {
		q.pass.Begin(c)
	}
	for s := range c.Services {
		removed = append(removed, q.change(newDelivery(s, count))...)
	}
	if q.prunes && c.Last {
		for _, x := range []*index{&q.udp, &q.tcp} {
			for key := range x.records {
				if q.pass.Stale(key) {
					removed = append(removed, q.change(newDelivery(sink.Change{Key: key}, count))...)
				}
			}
		}
	}
	for _, d := range removed {
		if q.udp.groups[d] == nil {
			q.removed[d] = count
			q.count = count
		}
	}
	return q.count == count
}

// delivery is the change of a service in the call of add with the number count.
type delivery struct {
	key         types.NamespacedName
	old, new    *api.View // old is nil if it is not known
	same        bool      // old and new have the same frontends
	before, now verdicts
	compared    comparison
	count       uint64
	// oldFrontends has the frontends of the view old. It is nil before the first call of the
	// method added.
	oldFrontends map[nodeview.FrontendKey]struct{}
}

func newDelivery(s sink.Change, count uint64) *delivery {
	c := &delivery{key: s.Key, old: s.Old, new: s.New, count: count}
	if s.Unsure {
		c.old = nil
	}
	c.same = frontends.Same(c.old, c.new)
	c.before, c.now = verdictsOf(c.old), verdictsOf(c.new)
	return c
}

// added reports whether the frontend f is missing in the view old.
func (c *delivery) added(f nodeview.FrontendKey) bool {
	switch {
	case c.same:
		return false
	case c.old == nil:
		return true
	case c.oldFrontends == nil:
		c.oldFrontends = map[nodeview.FrontendKey]struct{}{}
		for f := range frontends.Keys(c.old) {
			c.oldFrontends[f] = struct{}{}
		}
	}
	_, had := c.oldFrontends[f]
	return !had
}

// change records the delivery of a service and queues destinations. It returns the removed
// UDP destinations, except those that another service has taken over.
func (q *queue) change(c *delivery) (removed []destination) {
	q.changeIndex(&q.tcp, c)
	return q.changeIndex(&q.udp, c)
}

// changeIndex is the method change for one protocol. If only endpoints have changed, its
// cost does not depend on the number of addresses.
func (q *queue) changeIndex(x *index, c *delivery) (removed []destination) {
	stale := c.compared.stale(c.before[x.protocol], c.now[x.protocol], x.protocol)
	was := x.records[c.key]
	// The TCP index may lack stale groups.
	complete := x.protocol == unix.IPPROTO_UDP || len(stale) == 0
	switch {
	case complete && was == nil && c.same:
		return nil
	case complete && was != nil && !was.displaced && (c.same || c.old == nil) && frontends.Same(was.view, c.new):
		was.view = frontends.Of(c.new)
		for _, g := range was.groups {
			g.verdict = c.now[x.protocol][g.class]
			if stale[g.class] {
				q.enqueue(g, c.count)
			}
		}
		return nil
	default:
		return q.replace(x, c, stale)
	}
}

// replace records a delivery with other frontends, or with other TCP groups to queue.
func (q *queue) replace(x *index, c *delivery, stale map[class]bool) (removed []destination) {
	var queuedBefore map[class]uint64 // the field count of the groups
	if was := x.records[c.key]; was != nil {
		removed = q.remove(x, c.key, was)
		queuedBefore = map[class]uint64{}
		for _, g := range was.groups {
			queuedBefore[g.class] = g.count
		}
	}
	now := c.now[x.protocol]
	if len(now) == 0 {
		return removed
	}
	s := &record{view: frontends.Of(c.new)}
	groups := map[class]*group{}
	for f, d := range x.destinations(c.new) {
		k := classOf(f)
		_, unowned := q.removed[d]
		count := queuedBefore[k]
		if stale[k] || unowned || c.added(f) && (x.protocol == unix.IPPROTO_UDP || now[k].forwards) {
			count = c.count
		}
		if count == 0 && x.protocol == unix.IPPROTO_TCP {
			continue
		}
		g := groups[k]
		if g == nil {
			g = &group{record: s, class: k, kind: kind{d.family, d.protocol}, filter: filterOf(d), verdict: now[k]}
			groups[k] = g
			s.groups = append(s.groups, g)
		}
		g.addDestination(d)
		if count > g.count {
			q.enqueue(g, count)
		}
		if other := x.groups[d]; other != nil {
			other.record.displaced = true
		}
		x.groups[d] = g
		delete(q.removed, d)
	}
	for _, g := range s.groups {
		g.dropEndpoints()
	}
	if len(s.groups) > 0 {
		x.records[c.key] = s
	}
	return removed
}

// remove removes a service from x. It returns the removed destinations.
func (q *queue) remove(x *index, key types.NamespacedName, s *record) (removed []destination) {
	for _, d := range x.destinations(s.view) {
		if g := x.groups[d]; g != nil && g.record == s {
			delete(x.groups, d)
			removed = append(removed, d)
		}
	}
	for _, g := range s.groups {
		delete(q.due, g)
	}
	delete(x.records, key)
	x.records, x.groups = shrink.Map(x.records, &x.mostRecords), shrink.Map(x.groups, &x.mostGroups)
	return removed
}

func (q *queue) enqueue(g *group, count uint64) {
	g.count = count
	q.due[g] = struct{}{}
	q.count = max(q.count, count)
}

// isStale reports whether a flow has to be deleted. The most specific queued destination
// decides. The function first looks up the flow's address and port, then the address
// without a port. If nodeAddrs contains the address, it finally looks up the node port.
func (q *queue) isStale(f flow, nodeAddrs map[netip.Addr]bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	addr, port := f.to.Addr(), f.to.Port()
	d := destination{api.FamilyOf(addr), addr, port, f.protocol}
	if v, ok := q.queued(d); ok {
		return v.isStale(f)
	}
	d.port = 0
	if v, ok := q.queued(d); ok {
		return v.isStale(f)
	}
	if nodeAddrs[addr] {
		d.addr, d.port = netip.Addr{}, port
		if v, ok := q.queued(d); ok {
			return v.isStale(f)
		}
	}
	return false
}

// queued returns the verdict of a destination if the destination is queued.
func (q *queue) queued(d destination) (v verdict, ok bool) {
	x := &q.udp
	if d.protocol == unix.IPPROTO_TCP {
		x = &q.tcp
	}
	if g := x.groups[d]; g != nil {
		return g.verdict, g.count != 0
	}
	_, ok = q.removed[d]
	return verdict{}, ok
}

// pending returns the filters for the queued destinations and the present value of q.count.
func (q *queue) pending() (filters map[kind]filter, count uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	filters = map[kind]filter{}
	add := func(k kind, f filter) {
		if other, ok := filters[k]; ok {
			f = f.union(other)
		}
		filters[k] = f
	}
	for g := range q.due {
		f := g.filter
		f.established = g.verdict.resets
		add(g.kind, f)
	}
	for d := range q.removed {
		add(kind{d.family, d.protocol}, filterOf(d))
	}
	return filters, q.count
}

// removeUpTo removes the destinations that calls of the method add have queued, up to the
// call with the number count.
func (q *queue) removeUpTo(count uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for g := range q.due {
		if g.count <= count {
			g.count = 0
			delete(q.due, g)
		}
	}
	maps.DeleteFunc(q.removed, func(_ destination, n uint64) bool { return n <= count })
	q.tcp.removeChecked()
	// Free the memory, which is large if a sink pass queued every service.
	if len(q.due) == 0 {
		q.due = map[*group]struct{}{}
	}
	if len(q.removed) == 0 {
		q.removed = map[destination]uint64{}
	}
	if len(q.tcp.groups) == 0 {
		q.tcp = newIndex(q.tcp.protocol)
	}
}

// removeChecked removes the groups that are not queued.
func (x *index) removeChecked() {
	checked := func(g *group) bool { return g.count == 0 }
	maps.DeleteFunc(x.groups, func(_ destination, g *group) bool { return checked(g) })
	maps.DeleteFunc(x.records, func(_ types.NamespacedName, s *record) bool {
		s.groups = slices.DeleteFunc(s.groups, checked)
		return len(s.groups) == 0
	})
}

// destinations yields the frontends of a view with their destinations in x.
func (x *index) destinations(view *api.View) iter.Seq2[nodeview.FrontendKey, destination] {
	return func(yield func(nodeview.FrontendKey, destination) bool) {
		for f := range frontends.Keys(view) {
			if tracks(x.protocol, f.Protocol) && !yield(f, destination{f.Family, f.Addr, uint16(f.Port), x.protocol}) {
				return
			}
		}
	}
}
