// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// dataplane programs the bridge. It compares the flows and groups that plans want with
// those that it has written, and writes the differences. Calls must not overlap.
type dataplane struct {
	opts     *Options
	observer backends.Observer
	planner  planner
	conn     *openflow.Conn // nil if there is no connection

	// known is true if the fields flows and groups describe the switch.
	known bool
	// flows are the flows of the instance in the switch, except learned flows, and groups are
	// its groups.
	flows  flowSet
	groups map[uint32]group

	// plans are the plans of the services that were delivered since the pass began. The plan
	// of nodeKey has the flows that do not depend on services. The fields wantedFlows,
	// wantedGroups and datagrams are computed from the plans.
	plans        map[types.NamespacedName]*plan
	wantedFlows  map[openflow.FlowKey]*wantedFlow
	wantedGroups map[uint32]wantedGroup
	datagrams    map[netip.AddrPort]*datagrams
	numbers      numbers
	// unwritten has the changes of the services that failed. The next change of such a service
	// includes them, so it also deletes what only the last written plan needs.
	unwritten map[types.NamespacedName]*unit
	// leftovers records whether the last pass kept unwanted flows because services failed.
	leftovers kernelnode.Leftovers
	// cannotWatch is true if the switch does not report changes of flows.
	cannotWatch bool
	// cannotForget is true if the switch does not support the deletion of connections.
	cannotForget bool
	// cannotWait is true if send could not wait for the datapath.
	cannotWait bool
	// repeat has what Verify repeats, in the order of time.
	repeat []repetition
	// waiting are connections that the switch has to forget later.
	waiting staleConnections
	// maxListed is the largest number of connections of a listing.
	maxListed int
}

// group is a group in the switch.
type group struct {
	seed uint64
	// buckets has the IDs of the buckets.
	buckets map[openflow.Actions]uint32
	// foreign is true if another program has changed the group so that it must be replaced.
	foreign bool
}

func (g group) equal(o group) bool {
	return g.seed == o.seed && g.foreign == o.foreign && maps.Equal(g.buckets, o.buckets)
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
	seed    uint64
	buckets []openflow.Actions
}

func newDataplane(opts *Options) *dataplane {
	opts.Observer = backendoptions.Observe(opts.Observer)
	d := &dataplane{opts: opts, observer: opts.Observer, maxListed: maxListed}
	d.planner = planner{opts: opts, number: d.numberOf, maxGroups: maxGroups}
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
	conn, err := openflow.Dial(ctx, d.opts.socket(), d.opts.writtenCookies())
	if err != nil {
		return fmt.Errorf("connect to bridge %s: %w", d.opts.Bridge, err)
	}
	d.conn = conn
	return d.watch(ctx)
}

// watch makes the switch report changes of flows by other programs.
func (d *dataplane) watch(ctx context.Context) error {
	if d.cannotWatch {
		return nil
	}
	var watched []uint8
	for table := range uint8(tables) {
		if table != clientTable { // its flows come and go
			watched = append(watched, d.opts.FirstTable+table)
		}
	}
	err := d.conn.Watch(ctx, watched)
	var unsupported openflow.Error
	if errors.As(err, &unsupported) {
		d.cannotWatch = true
		klog.FromContext(ctx).Info("The switch does not report changed flows; searching for changes by other programs at intervals", "bridge", d.opts.Bridge, "err", err)
		return d.open(ctx)
	}
	return err
}

// begin begins a pass: it reads the switch and forgets all plans.
func (d *dataplane) begin(ctx context.Context) error {
	if err := d.read(ctx); err != nil {
		return err
	}
	d.plans = map[types.NamespacedName]*plan{}
	d.wantedFlows, d.wantedGroups = map[openflow.FlowKey]*wantedFlow{}, map[uint32]wantedGroup{}
	d.datagrams = map[netip.AddrPort]*datagrams{}
	d.unwritten = map[types.NamespacedName]*unit{}
	d.numbers = d.newNumbers()
	d.known = true
	return nil
}

// read reads the flows and groups of the instance from the switch. It finds the IDs of the
// groups in flows, in other groups, and in the last known state. Without such a state, it
// also tries the lowest IDs.
func (d *dataplane) read(ctx context.Context) error {
	d.known = false
	flows, err := d.conn.Flows(ctx)
	if err != nil {
		return err
	}
	d.flows = make(flowSet, len(flows))
	seen := map[uint32]bool{}
	var ids []uint32
	add := func(id uint32) {
		if d.opts.ownsGroup(id) && !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, f := range flows {
		d.flows[f.FlowKey] = f.Actions
		for id := range openflow.Numbers(f.Actions) {
			add(id)
		}
	}
	before := d.groups
	for id := range before {
		add(id)
	}
	d.groups = make(map[uint32]group, len(ids))
	const firstTries, maxTries = 256, 1 << 16
	for tries := uint32(firstTries); ; tries *= 2 {
		if before == nil {
			for i := range tries {
				add(d.opts.firstGroup() + i)
			}
		}
		used := false // the upper half of the tried IDs
		for len(ids) > 0 {
			groups, err := d.conn.Groups(ctx, ids)
			if err != nil {
				d.groups = before
				return err
			}
			ids = nil
			for _, g := range groups {
				buckets := make(map[openflow.Actions]uint32, len(g.Buckets))
				for _, b := range g.Buckets {
					buckets[b.Actions] = b.ID
					for id := range openflow.Numbers(b.Actions) {
						add(id)
					}
				}
				d.groups[g.ID] = group{g.Seed, buckets, g.Foreign || len(buckets) < len(g.Buckets)}
				used = used || g.ID-d.opts.firstGroup() >= tries/2
			}
		}
		if before != nil || !used || tries == maxTries {
			return nil
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
			d.wantedGroups[id] = wantedGroup{key, d.numbers.seed(id), buckets}
			t.groups[id] = true
		}
		maps.Copy(d.datagrams, p.datagrams)
	}
	if old == nil {
		return
	}
	for frontend, before := range old.datagrams {
		if d.datagrams[frontend] == before {
			delete(d.datagrams, frontend)
		}
	}
	if p == nil {
		delete(d.plans, key)
	}
	d.unwant(old.flows, t)
	d.unwant(old.shared, t)
	for id := range old.groups {
		if p != nil {
			if _, ok := p.groups[id]; ok {
				continue
			}
		}
		t.groups[id] = true
		delete(d.wantedGroups, id)
		d.release(id)
	}
}

// release takes a number away from its name.
func (d *dataplane) release(id uint32) {
	_, exists := d.groups[id]
	d.numbers.release(id, exists)
}

// makePlan makes the plan of a service. If it fails, the service keeps only the numbers of
// the plan before.
func (d *dataplane) makePlan(view *api.View, before *plan) (*plan, error) {
	d.numbers.exhausted = false
	p, err := d.planner.plan(view)
	if d.numbers.exhausted {
		err = errNumbers
	}
	if err == nil {
		return p, nil
	}
	for id := range p.groups {
		if before != nil {
			if _, ok := before.groups[id]; ok {
				continue
			}
		}
		if id != 0 { // a name that got no number
			d.release(id)
		}
	}
	return nil, err
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
	key types.NamespacedName
	// old is the last plan that was written, and plan is the plan to write.
	old, plan *plan
	touched
	// The switch executes the additions of all units before the deletions. So it never
	// deletes a group that a flow needs.
	additions, deletions []*part
}

// part is a part of the changes of a unit.
type part struct {
	messages []openflow.Message
	// If the switch has executed the messages, the following fields are the new records. A
	// flow that was deleted has no actions and is in the set deleted.
	set      flowSet
	deleted  map[openflow.FlowKey]bool
	groupsTo map[uint32]*group // nil: the group was deleted
}

func newUnit(key types.NamespacedName) *unit {
	return &unit{key: key, touched: touched{map[openflow.FlowKey]bool{}, map[uint32]bool{}}}
}

// maxBundle limits the messages of a bundle, because the switch handles no other requests
// while it executes one.
const maxBundle = 4096

// add adds messages to the last part, or to a new one if the last part is full.
func add(parts *[]*part, messages ...openflow.Message) *part {
	if n := len(*parts); n == 0 || len((*parts)[n-1].messages)+len(messages) > maxBundle {
		*parts = append(*parts, &part{set: flowSet{}, deleted: map[openflow.FlowKey]bool{}, groupsTo: map[uint32]*group{}})
	}
	last := (*parts)[len(*parts)-1]
	last.messages = append(last.messages, messages...)
	return last
}

// prepare computes the parts of a unit.
func (d *dataplane) prepare(u *unit) {
	u.additions, u.deletions = nil, nil
	// unneeded are groups to delete. The switch deletes their flows with them, which costs much
	// less than a message for each flow.
	var unneeded []uint32
	flowsOf := map[uint32][]openflow.FlowKey{}
	// A group whose buckets are other groups comes after them.
	depth := func(id uint32) int { return d.numbers.names[id].part }
	for _, id := range slices.SortedFunc(maps.Keys(u.touched.groups), func(a, b uint32) int {
		return cmp.Or(cmp.Compare(depth(b), depth(a)), cmp.Compare(a, b))
	}) {
		wanted, ok := d.wantedGroups[id]
		present, exists := d.groups[id]
		switch {
		case ok:
			if messages, buckets := changeGroup(id, present, exists, wanted); len(messages) > 0 {
				add(&u.additions, messages...).groupsTo[id] = &group{seed: wanted.seed, buckets: buckets}
			}
		case exists:
			unneeded = append(unneeded, id)
			flowsOf[id] = nil
		}
	}
	for key := range u.touched.flows {
		w := d.wantedFlows[key]
		actions, exists := d.flows[key]
		switch {
		case w == nil && exists:
			group := openflow.GroupOf(actions)
			if _, ok := flowsOf[group]; ok {
				flowsOf[group] = append(flowsOf[group], key)
				continue
			}
			add(&u.deletions, openflow.DeleteFlow(key, d.opts.allCookies())).deleted[key] = true
		case w != nil && (w.owner == u.key || w.owner == nodeKey) && (!exists || actions != w.actions):
			flow := openflow.Flow{FlowKey: key, Cookie: d.opts.cookie(), Actions: w.actions}
			add(&u.additions, openflow.AddFlow(flow)).set[key] = w.actions
		}
	}
	if u.old != nil {
		for a := range u.old.affinities {
			if u.plan == nil || !u.plan.affinities[a] {
				add(&u.deletions, d.forgetClients(a))
			}
		}
	}
	for _, id := range unneeded {
		messages := []openflow.Message{openflow.DeleteGroup(id)}
		if len(d.groups[id].buckets) == 0 { // it records a number, perhaps that of a service
			messages = append(messages, openflow.DeleteFlows(d.opts.FirstTable+clientTable, "", d.opts.learnedCookies(id)))
		}
		p := add(&u.deletions, messages...)
		p.groupsTo[id] = nil
		for _, key := range flowsOf[id] {
			p.deleted[key] = true
		}
	}
}

// forgetClients deletes the learned flows of a service port.
func (d *dataplane) forgetClients(a affinity) openflow.Message {
	m := openflow.Match{EtherType: etherType(a.family)}
	m.Registers[clientRegister] = openflow.Bits{Value: a.client, Mask: 1<<64 - 1}
	return openflow.DeleteFlows(d.opts.FirstTable+clientTable, m.Encode(), d.opts.learnedCookies(uint32(a.client>>32)))
}

// changeGroup returns messages that change a group into the wanted one, and the IDs of the
// buckets afterwards.
func changeGroup(id uint32, present group, exists bool, wanted wantedGroup) (messages []openflow.Message, ids map[openflow.Actions]uint32) {
	ids = make(map[openflow.Actions]uint32, len(wanted.buckets))
	replace := !exists || present.foreign || present.seed != wanted.seed
	if replace {
		present.buckets = nil
	}
	used := make(map[uint32]bool, len(wanted.buckets))
	var missing []openflow.Actions
	for _, actions := range wanted.buckets {
		if bucket, ok := present.buckets[actions]; ok {
			ids[actions], used[bucket] = bucket, true
		} else {
			missing = append(missing, actions)
		}
	}
	unwanted := len(present.buckets) - len(ids)
	if !replace && len(missing)+unwanted == 0 {
		return nil, ids
	}
	replace = replace || unwanted > len(ids)
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
		for actions, bucket := range present.buckets {
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
	return openflow.SetGroup(openflow.Group{ID: id, Seed: wanted.seed, Buckets: all}), ids
}

// commit sends the changes of units, and records what the switch has executed. It needs
// several bundles only for more than maxBundle messages.
func (d *dataplane) commit(ctx context.Context, units ...*unit) error {
	var parts []*part
	for _, u := range units {
		d.prepare(u)
		parts = append(parts, u.additions...)
	}
	var stale staleConnections
	for _, u := range units {
		parts = append(parts, u.deletions...)
		d.collectStale(u, &stale)
	}
	executed, err := d.send(ctx, parts)
	var refused *openflow.Refused
	if err != nil && !(executed && errors.As(err, &refused)) {
		return err
	}
	return errors.Join(err, d.forget(ctx, stale))
}

// send sends parts as bundles. It waits until the datapath follows the last one. If an error
// occurs, the result executed reports whether the switch has executed any bundle.
func (d *dataplane) send(ctx context.Context, parts []*part) (executed bool, err error) {
	for ; len(parts) > 0; executed = true {
		var messages []openflow.Message
		n := 0
		for n < len(parts) && (n == 0 || len(messages)+len(parts[n].messages) <= maxBundle) {
			messages = append(messages, parts[n].messages...)
			n++
		}
		commit := d.conn.Commit
		if n == len(parts) {
			commit = d.commitAndWait
		}
		err := commit(ctx, messages)
		d.observer.Wrote(len(messages), err)
		if err != nil {
			return executed, err
		}
		for _, p := range parts[:n] {
			d.record(p)
		}
		parts = parts[n:]
	}
	return executed, nil
}

// record records that the switch has executed a part.
func (d *dataplane) record(p *part) {
	for key := range p.deleted {
		delete(d.flows, key)
	}
	maps.Copy(d.flows, p.set)
	for id, to := range p.groupsTo {
		if to != nil {
			d.groups[id] = *to
		} else if g, exists := d.groups[id]; exists { // otherwise another unit has deleted it, too
			d.numbers.deleted(id, g.seed)
			delete(d.groups, id)
		}
	}
}

// sync programs the changes c. Its errors are those of Sync in [sink.Sink].
func (d *dataplane) sync(ctx context.Context, c *sink.Changes) error {
	var failed sink.Failed
	common := newUnit(nodeKey)
	d.setPlan(nodeKey, &plan{flows: d.opts.flows(&d.planner.node)}, &common.touched)
	units := []*unit{common}
	for ch := range c.Services {
		failed.Do(ch.Key, func() error {
			before := d.plans[ch.Key]
			var next *plan
			if ch.New != nil {
				var err error
				if next, err = d.makePlan(ch.New, before); err != nil {
					return err
				}
			}
			u := d.unwritten[ch.Key]
			if u == nil {
				u = newUnit(ch.Key)
				u.old = before
				d.unwritten[ch.Key] = u
			}
			u.plan = next
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
	for _, u := range units {
		if failed[u.key] == nil {
			delete(d.unwritten, u.key)
		}
	}
	failing := len(c.Failing)+len(failed) > 0
	if c.Last {
		d.leftovers.Exist = failing
		d.leftovers.RecordPass(time.Now(), failing)
		if !failing {
			d.observer.Drifted(false)
		}
	}
	d.observer.Holds("flows", len(d.flows))
	d.observer.Holds("groups", len(d.groups))
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
	for id, before := range groups {
		if now, ok := d.groups[id]; !ok || !now.equal(before) {
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
		d.observer.Drifted(true)
		return d.lost(fmt.Errorf("another program changed %d flows and groups of bridge %s", n, d.opts.Bridge))
	}
	return nil
}

// cleanup deletes all flows and groups of the instance.
func (d *dataplane) cleanup(ctx context.Context) error {
	if err := d.open(ctx); err != nil {
		return err
	}
	d.groups = nil
	if err := d.read(ctx); err != nil {
		return err
	}
	messages := []openflow.Message{openflow.DeleteFlows(openflow.AllTables, "", d.opts.allCookies())}
	for id := range d.groups {
		messages = append(messages, openflow.DeleteGroup(id))
	}
	return d.conn.Commit(ctx, messages)
}
