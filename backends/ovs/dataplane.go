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
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/reconcile"
	"k8s.io/klog/v2"
)

// dataplane plans, lists and changes the objects of the bridge, for package reconcile. Calls
// must not overlap. The types of keys and values are:
//
//	openflow.FlowKey	openflow.Actions	a flow
//	groupID			*group			a group
//	affinity		struct{}		the learned flows of a service port
//	frontendAt		*kept			a frontend whose stale connections to forget
//	counted			servicePort		a group whose connections are counted
//
// The switch cannot list the last three kinds.
type dataplane struct {
	opts       *options
	observer   backends.Observer
	planner    planner
	reconciler reconcile.Reconciler
	conn       *openflow.Conn // nil if there is no connection
	// passing is true if the next listing begins a pass.
	passing bool

	// flows is the number of the instance's flows in the switch, except learned flows, and
	// groups are its groups. The field kept has the frontends programmed since the pass began.
	flows   int
	groups  map[uint32]*group
	kept    map[frontendAt]*kept
	numbers numbers
	// counters are the counters of groups. It is empty without Options.Stats.
	counters map[uint32]*counter
	// cannotWatch is true if the switch does not report changes of flows.
	cannotWatch bool
	// cannotForget is true if the switch does not support the deletion of connections.
	cannotForget bool
	// cannotWait is true if send could not wait for the datapath.
	cannotWait bool
	// repeat has the deletions of connections that Verify repeats, in the order of time.
	repeat []repetition
	// waiting are connections that the switch has to forget later.
	waiting staleConnections
}

type (
	groupID uint32
	counted groupID
	op      = reconcile.Op[any, any]
)

// group is a group in the switch, or a wanted group.
type group struct {
	seed     uint64
	byClient bool
	// buckets has the buckets by ID. In the switch, they are ordered by ID, so that all
	// nodes make the same choice between two buckets with equal hashes.
	buckets map[uint32]openflow.Bucket
	// foreign is true if another program has changed the group so that it must be replaced.
	foreign bool
}

func (g *group) equal(o *group) bool {
	return g.seed == o.seed && g.byClient == o.byClient && g.foreign == o.foreign && maps.Equal(g.buckets, o.buckets)
}

// add adds a bucket. Its ID depends only on the key. So all nodes choose the same bucket
// for a connection, and the removal of a bucket moves no connections of other buckets. If
// the ID is taken, the bucket gets the next free ID.
func (g *group) add(key string, weight uint16, actions openflow.Actions) {
	const lastBucket = 0xffffff00
	if g.buckets == nil {
		g.buckets = map[uint32]openflow.Bucket{}
	}
	id := uint32(maglev.Hash([]byte(key)) % lastBucket)
	for taken := true; taken; {
		if _, taken = g.buckets[id]; taken {
			id = (id + 1) % lastBucket
		}
	}
	g.buckets[id] = openflow.Bucket{ID: id, Weight: weight, Actions: actions}
}

func newDataplane(opts *options) *dataplane {
	opts.Observer = backendoptions.Observe(opts.Observer)
	d := &dataplane{opts: opts, observer: opts.Observer, passing: true, counters: map[uint32]*counter{}}
	d.planner = planner{opts: opts, number: d.numberOf}
	d.reconciler = reconcile.New(d, reconcile.Options[any, any]{
		Base: func(emit func(any, any)) { opts.flows(&d.planner.node).emit(emit) },
		Equal: func(is, want any) bool {
			switch want := want.(type) {
			case *group:
				return is.(*group).equal(want)
			case *kept:
				return is == want || is.(*kept).rejects == want.rejects && slices.Equal(is.(*kept).endpoints, want.endpoints)
			default:
				return is == want
			}
		},
		Depth: func(k any) int {
			if _, ok := k.(groupID); ok {
				return 1
			}
			return 0
		},
		Virtual: func(k any) bool {
			switch k.(type) {
			case affinity, frontendAt, counted:
				return true
			}
			return false
		},
		MaxOps: maxBundle, VerifyInterval: opts.verifyInterval,
		Drifted: d.observer.Drifted,
	})
	return d
}

func (d *dataplane) close() error {
	if d.conn == nil {
		return nil
	}
	conn := d.conn
	d.conn = nil
	if err := conn.Close(); !errors.Is(err, net.ErrClosed) { // a lost connection is already closed
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
		if table != clientTable { // packets add its flows
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

// Plan implements [reconcile.Dataplane]. If it fails, it emits nothing, and the service gets
// no new numbers.
func (d *dataplane) Plan(view *api.View, emit func(any, any)) error {
	n := &d.numbers
	n.allocated, n.exhausted = n.allocated[:0], false
	p, err := d.planner.plan(view)
	if n.exhausted {
		err = errNumbers
	}
	if err != nil {
		for _, id := range n.allocated {
			n.release(id, d.groups[id] != nil)
		}
		return err
	}
	// A group whose buckets are other groups comes after these groups.
	part := func(id uint32) int { return n.names[id].part }
	for _, id := range slices.SortedFunc(maps.Keys(p.groups), func(a, b uint32) int {
		return cmp.Or(cmp.Compare(part(b), part(a)), cmp.Compare(a, b))
	}) {
		p.groups[id].seed = n.seed(id)
		emit(groupID(id), p.groups[id])
	}
	p.flows.emit(emit)
	p.shared.emit(emit)
	for a := range p.affinities {
		emit(a, struct{}{})
	}
	for frontend, k := range p.kept {
		emit(frontend, k)
	}
	for id, port := range p.counted {
		emit(counted(id), port)
	}
	return nil
}

func (s flowSet) emit(emit func(any, any)) {
	for key, actions := range s {
		emit(key, actions)
	}
}

// List implements [reconcile.Dataplane]. It finds the IDs of the groups in flows, in other
// groups, and in the last known state. Without such a state, it also tries the lowest IDs.
func (d *dataplane) List(ctx context.Context, emit func(any, any)) error {
	flows, err := d.conn.Flows(ctx, openflow.AllTables)
	if err != nil {
		return err
	}
	groups, err := d.listGroups(ctx, flows)
	if err != nil {
		return err
	}
	d.flows, d.groups = len(flows), groups
	if d.passing {
		d.passing = false
		d.kept = map[frontendAt]*kept{}
		d.numbers = d.newNumbers()
	}
	for _, f := range flows {
		emit(f.FlowKey, f.Actions)
	}
	for id, g := range groups {
		emit(groupID(id), g)
	}
	return nil
}

func (d *dataplane) listGroups(ctx context.Context, flows []openflow.Flow) (map[uint32]*group, error) {
	seen := map[uint32]bool{}
	var ids []uint32
	add := func(id uint32) {
		if d.opts.ownsGroup(id) && !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, f := range flows {
		for id := range openflow.Numbers(f.Actions) {
			add(id)
		}
	}
	for id := range d.groups {
		add(id)
	}
	groups := make(map[uint32]*group, len(ids))
	const firstTries, maxTries = 256, 1 << 16
	for tries := uint32(firstTries); ; tries *= 2 {
		if d.groups == nil {
			for i := range tries {
				add(d.opts.firstGroup() + i)
			}
		}
		used := false // true if a group has an ID in the upper half of the tried IDs
		for len(ids) > 0 {
			some, err := d.conn.Groups(ctx, ids)
			if err != nil {
				return nil, err
			}
			ids = nil
			for _, g := range some {
				buckets := make(map[uint32]openflow.Bucket, len(g.Buckets))
				for _, b := range g.Buckets {
					buckets[b.ID] = b
					for id := range openflow.Numbers(b.Actions) {
						add(id)
					}
				}
				groups[g.ID] = &group{seed: g.Seed, byClient: g.ByClient, buckets: buckets, foreign: g.Foreign || !slices.IsSortedFunc(g.Buckets, byID)}
				used = used || g.ID-d.opts.firstGroup() >= tries/2
			}
		}
		if d.groups != nil || !used || tries == maxTries {
			return groups, nil
		}
	}
}

// maxBundle limits the messages of a bundle, because the switch handles no other requests
// while it executes a bundle.
const maxBundle = 4096

// Apply implements [reconcile.Dataplane]. It needs several bundles only for more than
// maxBundle messages. It waits until the datapath follows the last bundle.
func (d *dataplane) Apply(ctx context.Context, ops []op) error {
	stale := d.collectStale(ops)
	before, err := d.countsBefore(ctx, ops)
	if err != nil {
		return err
	}
	// The switch deletes the flows of a group together with the group. That costs much
	// less than a message for each flow.
	deleted := map[uint32]bool{}
	for _, o := range ops {
		if id, ok := o.Key.(groupID); ok && o.New == nil {
			deleted[uint32(id)] = true
		}
	}
	var bundle []openflow.Message
	sent := 0 // the number of sent operations
	send := func(end int, commit func(context.Context, []openflow.Message) error) error {
		if len(bundle) > 0 {
			err := commit(ctx, bundle)
			d.observer.Wrote(len(bundle), err)
			if err != nil {
				return err
			}
		}
		for i := range ops[sent:end] {
			d.record(&ops[sent+i], before)
		}
		bundle, sent = nil, end
		return nil
	}
	for i := range ops {
		messages := d.change(&ops[i], deleted)
		if len(bundle)+len(messages) > maxBundle {
			if err = send(i, d.conn.Commit); err != nil {
				break
			}
		}
		bundle = append(bundle, messages...)
	}
	if err == nil {
		err = send(len(ops), d.commitAndWait)
	}
	var refused *openflow.Refused
	switch isRefused := errors.As(err, &refused); {
	case isRefused && sent == 0:
		return reconcile.Refused(err)
	case isRefused:
		failed := reconcile.Failed[any]{}
		for _, o := range ops[sent:] {
			failed[o.Key] = err
		}
		err = &failed
	case err != nil:
		return err
	}
	if forgetErr := d.forget(ctx, stale); forgetErr != nil {
		return forgetErr
	}
	return err
}

// change returns the messages for an operation. The argument deleted has the groups that
// other operations delete.
func (d *dataplane) change(o *op, deleted map[uint32]bool) []openflow.Message {
	switch k := o.Key.(type) {
	case openflow.FlowKey:
		if o.New != nil {
			return []openflow.Message{openflow.AddFlow(openflow.Flow{FlowKey: k, Cookie: d.opts.cookie(), Actions: (*o.New).(openflow.Actions)})}
		}
		if !deleted[openflow.GroupOf((*o.Old).(openflow.Actions))] {
			return []openflow.Message{openflow.DeleteFlow(k, d.opts.allCookies())}
		}
	case groupID:
		id := uint32(k)
		var present *group
		if o.Old != nil {
			present = (*o.Old).(*group)
		}
		if o.New != nil {
			messages, _ := changeGroup(id, present, (*o.New).(*group))
			return messages
		}
		messages := []openflow.Message{openflow.DeleteGroup(id)}
		if len(present.buckets) == 0 { // the group only records a number, perhaps of a service
			messages = append(messages, openflow.DeleteFlows(d.opts.FirstTable+clientTable, "", d.opts.learnedCookies(id)))
		}
		return messages
	case affinity:
		if o.New == nil {
			return []openflow.Message{d.forgetClients(k)}
		}
	}
	return nil
}

// record records that the switch has executed an operation. The argument before is a result
// of countsBefore.
func (d *dataplane) record(o *op, before listCounts) {
	switch k := o.Key.(type) {
	case openflow.FlowKey:
		if o.Old == nil {
			d.flows++
		}
		if o.New == nil {
			d.flows--
		}
	case groupID:
		if o.New != nil {
			d.groups[uint32(k)] = (*o.New).(*group)
			if d.opts.Stats {
				d.recordCounter(uint32(k), (*o.New).(*group), before)
			}
		} else {
			delete(d.groups, uint32(k))
			delete(d.counters, uint32(k))
			d.numbers.deleted(uint32(k), (*o.Old).(*group).seed)
		}
	case frontendAt:
		if o.New != nil {
			d.kept[k] = (*o.New).(*kept)
		} else {
			delete(d.kept, k)
		}
	case counted:
		if o.New != nil {
			d.recordPort(uint32(k), (*o.New).(servicePort))
		} else {
			delete(d.counters, uint32(k))
		}
	}
}

// forgetClients deletes the learned flows of a service port.
func (d *dataplane) forgetClients(a affinity) openflow.Message {
	m := openflow.Match{EtherType: etherType(a.family)}
	m.Registers[clientRegister] = openflow.Bits{Value: a.client, Mask: 1<<64 - 1}
	return openflow.DeleteFlows(d.opts.FirstTable+clientTable, m.Encode(), d.opts.learnedCookies(uint32(a.client>>32)))
}

func byID(a, b openflow.Bucket) int { return cmp.Compare(a.ID, b.ID) }

// sorted returns the buckets in the order of the switch.
func (g *group) sorted() []openflow.Bucket {
	all := slices.AppendSeq(make([]openflow.Bucket, 0, len(g.buckets)), maps.Values(g.buckets))
	slices.SortFunc(all, byID)
	return all
}

// changeGroup returns messages that change a group to its wanted state, and reports
// whether they replace all buckets. The argument present is nil if there is no such
// group.
func changeGroup(id uint32, present, wanted *group) (messages []openflow.Message, replaced bool) {
	all := wanted.sorted()
	set := openflow.SetGroup(openflow.Group{ID: id, Seed: wanted.seed, ByClient: wanted.byClient, Buckets: all})
	if present == nil || present.foreign || present.seed != wanted.seed || present.byClient != wanted.byClient {
		return set, true
	}
	// The IDs of removed buckets must be unused before buckets with these IDs are added.
	for bucket, b := range present.buckets {
		if wanted.buckets[bucket] != b {
			messages = append(messages, openflow.RemoveBucket(id, bucket))
		}
	}
	after := uint32(openflow.FirstBucket)
	var added []openflow.Bucket // the buckets to insert after this bucket
	for _, b := range all {
		if present.buckets[b.ID] != b {
			added = append(added, b)
			continue
		}
		messages = append(messages, openflow.InsertBuckets(id, after, added)...)
		after, added = b.ID, nil
	}
	messages = append(messages, openflow.InsertBuckets(id, after, added)...)
	if len(messages) > len(all) {
		return set, true
	}
	return messages, false
}

// cleanup deletes all flows and groups of the instance.
func (d *dataplane) cleanup(ctx context.Context) error {
	if err := d.open(ctx); err != nil {
		return err
	}
	d.groups = nil
	flows, err := d.conn.Flows(ctx, openflow.AllTables)
	if err != nil {
		return err
	}
	groups, err := d.listGroups(ctx, flows)
	if err != nil {
		return err
	}
	messages := []openflow.Message{openflow.DeleteFlows(openflow.AllTables, "", d.opts.allCookies())}
	for id := range groups {
		messages = append(messages, openflow.DeleteGroup(id))
	}
	return d.conn.Commit(ctx, messages)
}
