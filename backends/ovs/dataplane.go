// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/kpng-project/kpng/backends/internal/kernelnode"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// dataplane programs the bridge. It compares the flows and groups that plans want with
// those that it has written, and writes the differences. Calls must not overlap.
type dataplane struct {
	opts    *Options
	planner planner
	conn    *openflow.Conn // nil if there is no connection

	// known is true if the fields flows and groups describe the switch.
	known bool
	// flows are the flows of the instance in the switch, except learned flows. The field
	// groups has the buckets of its groups, with their IDs.
	flows  flowSet
	groups map[uint32]map[openflow.Actions]uint32

	// plans are the plans of the services that were delivered since the pass began. The plan
	// of nodeKey has the flows that do not depend on services. The fields wantedFlows and
	// wantedGroups are computed from the plans.
	plans        map[types.NamespacedName]*plan
	wantedFlows  map[openflow.FlowKey]*wantedFlow
	wantedGroups map[uint32]wantedGroup
	// ids has the IDs of the groups of lists, and taken has the lists of IDs.
	ids   map[list]uint32
	taken map[uint32]list
	// leftovers records whether the last pass kept unwanted flows because services failed.
	leftovers kernelnode.Leftovers
	// cannotForget is true if the switch does not support the deletion of connections.
	cannotForget bool
	// cannotWait is true if send could not wait for the datapath.
	cannotWait bool
	// repeat are connections that Verify makes the switch forget again at repeatAt. A packet
	// may have restored them, because the datapath did not follow the flows yet.
	repeat   staleConnections
	repeatAt time.Time
}

// list identifies a list of endpoints, or a part of it. Part 0 is the whole list. Ports of
// a service may share a list, but not with session affinity, because their clients may have
// different endpoints. Then port is the affinity's number for the port.
type list struct {
	service types.NamespacedName
	id      nodeview.ListID
	port    uint32
	part    int
}

// nodeKey is the key of the plan that does not belong to a service.
var nodeKey types.NamespacedName

// wantedFlow is a flow of one or more plans. If the plans have different actions, those of
// the plan that was made last apply. This plan is the owner. Shared flows belong to nodeKey.
type wantedFlow struct {
	actions openflow.Actions
	owner   types.NamespacedName
	plans   int
}

type wantedGroup struct {
	owner   types.NamespacedName
	buckets []openflow.Actions
}

func newDataplane(opts *Options) *dataplane {
	d := &dataplane{opts: opts}
	d.planner = planner{opts: opts, group: d.groupOf}
	return d
}

func (d *dataplane) close() error {
	d.known = false
	if d.conn == nil {
		return nil
	}
	conn := d.conn
	d.conn = nil
	if err := conn.Close(); !errors.Is(err, net.ErrClosed) { // closed if it was lost
		return err
	}
	return nil
}

// open connects to the switch if there is no connection.
func (d *dataplane) open(ctx context.Context) error {
	if d.conn != nil {
		select {
		case <-d.conn.Lost():
			d.close()
		default:
			return nil
		}
	}
	conn, err := openflow.Dial(ctx, d.opts.socket())
	if err != nil {
		return fmt.Errorf("connect to bridge %s: %w", d.opts.Bridge, err)
	}
	d.conn = conn
	return nil
}

// begin begins a pass: it reads the switch and forgets all plans.
func (d *dataplane) begin(ctx context.Context) error {
	if err := d.read(ctx); err != nil {
		return err
	}
	d.plans = map[types.NamespacedName]*plan{}
	d.wantedFlows, d.wantedGroups = map[openflow.FlowKey]*wantedFlow{}, map[uint32]wantedGroup{}
	d.ids, d.taken = map[list]uint32{}, map[uint32]list{}
	d.known = true
	return nil
}

// read reads the flows and groups of the instance from the switch.
func (d *dataplane) read(ctx context.Context) error {
	d.known = false
	flows, err := d.conn.Flows(ctx, d.opts.writtenCookies())
	if err != nil {
		return err
	}
	groups, err := d.conn.Groups(ctx)
	if err != nil {
		return err
	}
	d.flows = make(flowSet, len(flows))
	for _, f := range flows {
		d.flows[f.FlowKey] = f.Actions
	}
	d.groups = map[uint32]map[openflow.Actions]uint32{}
	for _, g := range groups {
		if d.opts.ownsGroup(g.ID) {
			buckets := make(map[openflow.Actions]uint32, len(g.Buckets))
			for _, b := range g.Buckets {
				buckets[b.Actions] = b.ID
			}
			if len(buckets) < len(g.Buckets) {
				buckets[""] = 0 // two buckets are equal: no plan wants this
			}
			d.groups[g.ID] = buckets
		}
	}
	return nil
}

// groupOf returns the ID of the group of a list. The ID depends on the list alone, except
// that two lists may collide. So the IDs are usually the same after a restart.
func (d *dataplane) groupOf(l list) uint32 {
	if group, ok := d.ids[l]; ok {
		return group
	}
	h := fnv.New32a()
	fmt.Fprintf(h, "%s/%d/%d/%d", l.service, l.id, l.port, l.part)
	n := h.Sum32()
	for ; ; n++ {
		group := d.opts.firstGroup() + (n^n>>24)%groupCount
		if _, taken := d.taken[group]; !taken {
			d.ids[l], d.taken[group] = group, l
			return group
		}
	}
}

// touched are flows and groups whose wanted state may differ from the switch.
type touched struct {
	flows  map[openflow.FlowKey]bool
	groups map[uint32]bool
}

// setPlan replaces the plan of a service, and records in t what it touches. A nil plan
// deletes the service.
func (d *dataplane) setPlan(key types.NamespacedName, p *plan, t *touched) {
	old := d.plans[key]
	if p != nil {
		d.plans[key] = p
		d.want(p.flows, key, t)
		d.want(p.shared, nodeKey, t)
		for id, buckets := range p.groups {
			d.wantedGroups[id] = wantedGroup{key, buckets}
			t.groups[id] = true
		}
	}
	if old == nil {
		return
	}
	if p == nil {
		delete(d.plans, key)
	}
	d.unwant(old.flows, t)
	d.unwant(old.shared, t)
	for id := range old.groups {
		if p == nil || p.groups[id] == nil {
			t.groups[id] = true
			delete(d.wantedGroups, id)
			delete(d.ids, d.taken[id])
			delete(d.taken, id)
		}
	}
}

func (d *dataplane) want(flows flowSet, owner types.NamespacedName, t *touched) {
	for key, actions := range flows {
		w := d.wantedFlows[key]
		if w == nil {
			w = &wantedFlow{}
			d.wantedFlows[key] = w
		}
		w.actions, w.owner = actions, owner
		w.plans++
		t.flows[key] = true
	}
}

func (d *dataplane) unwant(flows flowSet, t *touched) {
	for key := range flows {
		t.flows[key] = true
		if w := d.wantedFlows[key]; w != nil {
			if w.plans--; w.plans == 0 {
				delete(d.wantedFlows, key)
			}
		}
	}
}

// unit is what a service, or the node, changes in the switch.
type unit struct {
	key  types.NamespacedName
	old  *plan
	plan *plan
	touched
	// messages are the changes. If the switch has executed them, flows and groups are the
	// new records. A flow that was deleted has no actions and is in the set deleted.
	messages []openflow.Message
	set      flowSet
	deleted  map[openflow.FlowKey]bool
	groupsTo map[uint32]map[openflow.Actions]uint32
}

func newUnit(key types.NamespacedName) *unit {
	return &unit{key: key, touched: touched{map[openflow.FlowKey]bool{}, map[uint32]bool{}}}
}

// prepare computes the messages of a unit.
func (d *dataplane) prepare(u *unit) {
	u.messages, u.set, u.deleted, u.groupsTo = nil, flowSet{}, map[openflow.FlowKey]bool{}, map[uint32]map[openflow.Actions]uint32{}
	var deletions []openflow.Message
	for _, id := range slices.Sorted(maps.Keys(u.touched.groups)) {
		wanted, ok := d.wantedGroups[id]
		present, exists := d.groups[id]
		switch {
		case ok:
			messages, buckets := changeGroup(id, present, exists, wanted.buckets)
			if len(messages) > 0 {
				u.messages = append(u.messages, messages...)
				u.groupsTo[id] = buckets
			}
		case exists:
			deletions = append(deletions, openflow.DeleteGroup(id))
			u.groupsTo[id] = nil
		}
	}
	for key := range u.touched.flows {
		w := d.wantedFlows[key]
		actions, exists := d.flows[key]
		switch {
		case w == nil && exists:
			u.deleted[key] = true
			u.messages = append(u.messages, openflow.DeleteFlow(key, d.opts.allCookies()))
		case w != nil && (w.owner == u.key || w.owner == nodeKey) && (!exists || actions != w.actions):
			u.set[key] = w.actions
			u.messages = append(u.messages, openflow.AddFlow(openflow.Flow{FlowKey: key, Cookie: d.opts.cookie(), Actions: w.actions}))
		}
	}
	if u.old != nil {
		for a := range u.old.affinities {
			if u.plan == nil || !u.plan.affinities[a] {
				u.messages = append(u.messages, d.forgetClients(a))
			}
		}
	}
	u.messages = append(u.messages, deletions...)
}

// forgetClients deletes the learned flows of a service port.
func (d *dataplane) forgetClients(a affinity) openflow.Message {
	m := openflow.Match{EtherType: etherType(a.family)}
	m.Registers[affinityRegister/2] = openflow.Bits{Value: uint64(a.port) << 32, Mask: 0xffffffff << 32}
	return openflow.DeleteFlows(d.opts.FirstTable+clientTable, m.Encode(), d.opts.allCookies())
}

// changeGroup returns messages that give a group these buckets, and the IDs of the buckets
// afterwards.
func changeGroup(id uint32, present map[openflow.Actions]uint32, exists bool, wanted []openflow.Actions) (messages []openflow.Message, ids map[openflow.Actions]uint32) {
	ids = make(map[openflow.Actions]uint32, len(wanted))
	used := make(map[uint32]bool, len(wanted))
	var missing []openflow.Actions
	for _, actions := range wanted {
		if bucket, ok := present[actions]; ok {
			ids[actions], used[bucket] = bucket, true
		} else {
			missing = append(missing, actions)
		}
	}
	unwanted := len(present) - len(ids)
	if exists && len(missing)+unwanted == 0 {
		return nil, ids
	}
	replace := !exists || unwanted > len(ids)
	next := uint32(0)
	var added []openflow.Bucket
	for _, actions := range missing {
		for next++; used[next]; next++ {
		}
		ids[actions] = next
		added = append(added, openflow.Bucket{ID: next, Actions: actions})
	}
	if !replace {
		// The IDs of removed buckets must be unused before buckets with these IDs are added.
		for actions, bucket := range present {
			if _, ok := ids[actions]; !ok {
				messages = append(messages, openflow.RemoveBucket(id, bucket))
			}
		}
		return append(messages, openflow.InsertBuckets(id, added)...), ids
	}
	all := make([]openflow.Bucket, 0, len(ids))
	for actions, bucket := range ids {
		all = append(all, openflow.Bucket{ID: bucket, Actions: actions})
	}
	slices.SortFunc(all, func(a, b openflow.Bucket) int { return int(a.ID) - int(b.ID) })
	return openflow.SetGroup(openflow.Group{ID: id, Buckets: all}), ids
}

// commit sends the messages of units as one bundle, and records them if it succeeds.
func (d *dataplane) commit(ctx context.Context, units ...*unit) error {
	var messages []openflow.Message
	for _, u := range units {
		d.prepare(u)
		messages = append(messages, u.messages...)
	}
	if len(messages) > 0 {
		if err := d.send(ctx, messages); err != nil {
			return err
		}
	}
	var stale staleConnections
	for _, u := range units {
		d.collectStale(u, &stale)
	}
	for _, u := range units {
		for key := range u.deleted {
			delete(d.flows, key)
		}
	}
	for _, u := range units {
		maps.Copy(d.flows, u.set)
		for id, buckets := range u.groupsTo {
			if buckets == nil {
				delete(d.groups, id)
			} else {
				d.groups[id] = buckets
			}
		}
	}
	return d.forget(ctx, stale)
}

// sync programs the changes c. Its errors are those of Sync in [sink.Sink].
func (d *dataplane) sync(ctx context.Context, c *sink.Changes) error {
	var failed sink.Failed
	common := newUnit(nodeKey)
	d.setPlan(nodeKey, &plan{flows: d.opts.flows(&d.planner.node)}, &common.touched)
	units := []*unit{common}
	for ch := range c.Services {
		failed.Do(ch.Key, func() error {
			u := newUnit(ch.Key)
			u.old = d.plans[ch.Key]
			if ch.New != nil {
				u.plan = d.planner.plan(ch.New)
			}
			d.setPlan(ch.Key, u.plan, &u.touched)
			units = append(units, u)
			return nil
		})
	}
	if c.Last && len(c.Failing)+len(failed) == 0 {
		units = append(units, d.unwanted())
	}
	err := d.commit(ctx, units...)
	var refused *openflow.Refused
	if errors.As(err, &refused) {
		// Find the services that cause the error. The last unit deletes flows and groups that no
		// plan wants. Failed services may still use them.
		err = nil
		for _, u := range units {
			if u != common && u.key == nodeKey && len(failed) > 0 {
				break
			}
			switch unitErr := d.commit(ctx, u); {
			case unitErr == nil:
			case !errors.As(unitErr, &refused), u.key == nodeKey:
				return d.lost(unitErr)
			default:
				failed.Add(u.key, unitErr)
			}
		}
	}
	if err != nil {
		return d.lost(err)
	}
	failing := len(c.Failing)+len(failed) > 0
	if c.Last {
		d.leftovers.Exist = failing
		d.leftovers.RecordPass(time.Now(), failing)
	} else if len(failed) > 0 {
		d.leftovers.Exist = true
	}
	return failed.Err()
}

// lost handles an error after which the state of the switch is unknown.
func (d *dataplane) lost(err error) error {
	d.known = false
	return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
}

// unwanted returns a unit that deletes all flows and groups that no plan wants.
func (d *dataplane) unwanted() *unit {
	u := newUnit(nodeKey)
	for key := range d.flows {
		if d.wantedFlows[key] == nil {
			u.touched.flows[key] = true
		}
	}
	for id := range d.groups {
		if _, ok := d.wantedGroups[id]; !ok {
			u.touched.groups[id] = true
		}
	}
	return u
}

// compare compares the switch with the plans and repairs differences.
func (d *dataplane) compare(ctx context.Context) error {
	flows, groups := d.flows, d.groups
	if err := d.read(ctx); err != nil {
		return d.lost(err)
	}
	u := newUnit(nodeKey)
	for key, actions := range flows {
		if now, ok := d.flows[key]; !ok || now != actions {
			u.touched.flows[key] = true
		}
	}
	for key := range d.flows {
		if _, ok := flows[key]; !ok {
			u.touched.flows[key] = true
		}
	}
	for id, buckets := range groups {
		if now, ok := d.groups[id]; !ok || !maps.Equal(now, buckets) {
			u.touched.groups[id] = true
		}
	}
	for id := range d.groups {
		if _, ok := groups[id]; !ok {
			u.touched.groups[id] = true
		}
	}
	d.known = true
	if n := len(u.touched.flows) + len(u.touched.groups); n > 0 {
		return d.lost(fmt.Errorf("another program changed %d flows and groups of bridge %s", n, d.opts.Bridge))
	}
	return nil
}

// cleanup deletes all flows and groups of the instance.
func (d *dataplane) cleanup(ctx context.Context) error {
	d.known = false
	if err := d.open(ctx); err != nil {
		return err
	}
	groups, err := d.conn.Groups(ctx)
	if err != nil {
		return err
	}
	messages := []openflow.Message{openflow.DeleteFlows(openflow.AllTables, "", d.opts.allCookies())}
	for _, g := range groups {
		if d.opts.ownsGroup(g.ID) {
			messages = append(messages, openflow.DeleteGroup(g.ID))
		}
	}
	return d.conn.Commit(ctx, messages)
}
