// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"k8s.io/apimachinery/pkg/types"
)

// servicePort is a service port whose connections are counted.
type servicePort struct {
	service  types.NamespacedName
	name     string
	protocol api.Protocol
	// inFlows is true if the service has session affinity. Then the flows of the endpoints
	// count the connections, and otherwise the buckets of a group.
	inFlows bool
}

// counter counts the connections to the endpoints of a group. The group belongs to a list,
// or to a part of a list. A change of the group makes a new counter.
type counter struct {
	servicePort
	// endpoints has the endpoint of each bucket, in the order of the switch. An endpoint
	// is invalid if the bucket is another group.
	endpoints []netip.AddrPort
	// before has, for each endpoint, the number of connections that its earlier buckets
	// counted.
	before map[netip.AddrPort]uint64
}

// listCounts has, for each changed list, the number of connections to each endpoint.
type listCounts map[name]map[netip.AddrPort]uint64

// countsBefore returns the counts that the switch forgets when ops change buckets. The
// switch keeps the count of a bucket until the bucket is changed or its group is replaced.
// Connections to these buckets between this call and the change are not counted.
func (d *dataplane) countsBefore(ctx context.Context, ops []op) (listCounts, error) {
	if !d.opts.Stats {
		return nil, nil
	}
	before := listCounts{}
	for _, o := range ops {
		if id, ok := o.Key.(groupID); ok && o.Old != nil {
			before[d.numbers.listOf(uint32(id))] = map[netip.AddrPort]uint64{}
		}
	}
	for _, o := range ops {
		if id, ok := o.Key.(groupID); ok && o.New != nil {
			if list := before[d.numbers.listOf(uint32(id))]; list != nil {
				for _, b := range (*o.New).(*group).buckets {
					list[openflow.TranslatedTo(b.Actions)] = 0
				}
			}
		}
	}
	var ids []uint32
	var lost [][]netip.AddrPort // for each group, the endpoints of the buckets whose numbers are lost
	for _, o := range ops {
		id, ok := o.Key.(groupID)
		if !ok || o.Old == nil || (*o.Old).(*group).foreign {
			continue
		}
		old, next := (*o.Old).(*group), &group{}
		if o.New != nil {
			next = (*o.New).(*group)
		}
		_, replaced := changeGroup(uint32(id), old, next)
		endpoints, some := make([]netip.AddrPort, len(old.buckets)), false
		for i, b := range old.sorted() {
			e, list := openflow.TranslatedTo(b.Actions), before[d.numbers.listOf(uint32(id))]
			if _, stays := list[e]; !e.IsValid() || !stays {
				continue
			}
			if c := d.counters[uint32(id)]; c != nil {
				list[e] += c.before[e]
			}
			if replaced || next.buckets[b.ID] != b {
				endpoints[i], some = e, true
			}
		}
		if some {
			ids, lost = append(ids, uint32(id)), append(lost, endpoints)
		}
	}
	counts, err := d.conn.GroupCounts(ctx, ids)
	for i := range counts {
		for j, e := range lost[i] {
			if e.IsValid() && len(counts[i]) == len(lost[i]) {
				before[d.numbers.listOf(ids[i])][e] += counts[i][j]
			}
		}
	}
	return before, err
}

// listOf returns the name of the list to which a group belongs.
func (n *numbers) listOf(id uint32) name {
	list := n.names[id].name
	list.part = 0
	return list
}

// recordCounter records that a group was changed. The argument before is a result of
// countsBefore.
func (d *dataplane) recordCounter(id uint32, g *group, before listCounts) {
	c := g.counter()
	if old := d.counters[id]; old != nil {
		c.servicePort = old.servicePort
	}
	list := before[d.numbers.listOf(id)]
	for _, e := range c.endpoints {
		if list[e] > 0 {
			if c.before == nil {
				c.before = map[netip.AddrPort]uint64{}
			}
			c.before[e] = list[e]
		}
	}
	d.counters[id] = c
}

// counter returns a counter for a group.
func (g *group) counter() *counter {
	c := &counter{endpoints: make([]netip.AddrPort, len(g.buckets))}
	for i, b := range g.sorted() {
		c.endpoints[i] = openflow.TranslatedTo(b.Actions)
	}
	return c
}

// recordPort records the service port of a group.
func (d *dataplane) recordPort(id uint32, port servicePort) {
	c := &counter{}
	if old := d.counters[id]; old != nil {
		*c = *old
	} else if g := d.groups[id]; g != nil { // the group existed when the backend started
		c = g.counter()
	}
	c.servicePort = port
	d.counters[id] = c
}

// reading has the numbers of the buckets of a group.
type reading struct {
	counter *counter
	counts  []uint64
}

// Stats implements [backends.Counter]. It yields the numbers of new connections. The
// buckets of groups count them or, with session affinity, the flows of endpoints. Packets
// that the datapath handles alone are counted up to a second later. The switch counts
// neither bytes nor present connections.
//
// Stats reads the switch through a connection of its own, group by group, so that groups of
// other programs have no effect. A Sync waits only while Stats looks for changed groups.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("read counters of Open vSwitch: the option Stats is not set")
	}
	if err := b.stats(ctx, yield); err != nil {
		return fmt.Errorf("read counters of Open vSwitch: %w", err)
	}
	return nil
}

func (b *backend) stats(ctx context.Context, yield func(backends.Stats) bool) error {
	conn, err := openflow.Dial(ctx, b.opts.socket(), b.opts.writtenCookies())
	if err != nil {
		return err
	}
	defer conn.Close()
	// A group may change while its counters are read. Then they are read again. If only few
	// groups have changed, no group can change during this reading. So all readings are from
	// one moment.
	const maxAttempts = 10
	readings := map[uint32]reading{}
	for attempt := range maxAttempts {
		more, err := b.read(ctx, conn, readings, attempt > 0)
		if err != nil {
			return err
		}
		if !more {
			return b.yieldStats(ctx, conn, readings, yield)
		}
	}
	return errors.New("the groups change too often")
}

// read reads the counters that are missing in readings, and reports whether other
// counters may have changed meanwhile. If only few counters are missing, and the argument
// "again" is true, no group can change meanwhile.
func (b *backend) read(ctx context.Context, conn *openflow.Conn, readings map[uint32]reading, again bool) (more bool, err error) {
	const few = 64
	b.mu.Lock()
	next := b.dataplane.unread(readings)
	if more = len(next) > few || !again && len(next) > 0; more {
		b.mu.Unlock()
	} else {
		defer b.mu.Unlock()
	}
	counts, err := conn.GroupCounts(ctx, next)
	for i := range counts {
		r := readings[next[i]]
		r.counts = counts[i]
		readings[next[i]] = r
	}
	return more, err
}

// unread adds the groups whose counters must be read, or read again, and returns their
// numbers. It deletes the readings of other groups.
func (d *dataplane) unread(readings map[uint32]reading) (next []uint32) {
	for id := range readings {
		if d.counters[id] == nil || d.groups[id] == nil {
			delete(readings, id)
		}
	}
	for id, c := range d.counters {
		if old := readings[id]; old.counter != c && d.groups[id] != nil && c.service.Name != "" {
			readings[id] = reading{c, old.counts}
			if !c.inFlows {
				next = append(next, id)
			}
		}
	}
	slices.Sort(next)
	return next
}

func (b *backend) yieldStats(ctx context.Context, conn *openflow.Conn, readings map[uint32]reading, yield func(backends.Stats) bool) error {
	one := func(c *counter, e netip.AddrPort, connections uint64) bool {
		return yield(backends.Stats{
			Service: c.service, Port: c.name, Protocol: c.protocol, Endpoint: e,
			Connections: int64(connections), Active: -1, FromClients: -1, ToClients: -1,
		})
	}
	inFlows := false
	for _, r := range readings {
		if r.counter.inFlows {
			inFlows = true
			continue
		}
		for i, e := range r.counter.endpoints {
			n := r.counter.before[e]
			if len(r.counts) == len(r.counter.endpoints) { // no other program has changed the group
				n += r.counts[i]
			}
			if e.IsValid() && !one(r.counter, e, n) {
				return nil
			}
		}
	}
	if !inFlows {
		return nil
	}
	flows, err := conn.Flows(ctx, b.opts.FirstTable+memberTable)
	for _, f := range flows {
		r, ok := readings[uint32(openflow.Register64(f.Match, listRegister/2))]
		if e := openflow.TranslatedTo(f.Actions); ok && r.counter.inFlows && e.IsValid() && !one(r.counter, e, f.Packets) {
			return nil
		}
	}
	return err
}
