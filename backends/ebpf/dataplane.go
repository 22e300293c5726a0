// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// dataplane plans, lists and changes the elements of the maps that the programs read, for
// package reconcile. Its objects are the elements of the maps frontends and client_counts.
// The elements of slots and members are added and deleted together with the frontends that
// need them. A dataplane is not safe for concurrent use.
type dataplane struct {
	planner
	tables
	// capacity is the size of the maps, and the field used has the numbers of their
	// elements.
	capacity, used size
	reconciler     reconcile.Reconciler
	// drifted is called with true if another program has added elements.
	drifted func(bool)

	// lists has the lists in the kernel by their digests. It is nil if they are unknown.
	lists map[uint64]*listRecord
	// lastID is the ID of the last new list. The first ID is random, so that a process does
	// not use the IDs of an earlier process.
	lastID uint64
	// The map "left" has the services with a frontend that did not fit into the maps. If
	// a service needs more than its share of a map, tooLarge has the reason.
	left     map[types.NamespacedName]*leftover
	tooLarge map[types.NamespacedName]string
	// owners has the service port and the list of each planned frontend, for counters. It is
	// nil without counters.
	owners map[frontendKey]owner
	// The error "full" is the last reason why a frontend did not fit.
	full error
	// freed is true if elements were deleted since sync has begun.
	freed bool
	// lostUDP is true if a UDP frontend may have lost endpoints since sync has begun.
	lostUDP bool
}

// tables are the maps that a dataplane reads and changes.
type tables struct {
	frontends table[frontendKey, list]
	slots     table[slotKey, address]
	members   table[memberKey, uint32]
	clientTables
}

// frontend is the value of an object: the digest of the list of a frontend. It is 0 for a
// cluster IP. A planned frontend also has the list.
type frontend struct {
	digest uint64
	wanted *endpointList
}

type op = reconcile.Op[frontendKey, frontend]

// listRecord is a list in the kernel.
type listRecord struct {
	id              uint64
	count, affinity uint32
	// weighted is true if slots of the list have a second endpoint, see the type slots.
	weighted bool
	// frontends is the number of frontends with this list.
	frontends uint32
	// members are in arbitrary order.
	members []address
}

func (l *listRecord) size() size {
	s := size{endpoints: int(l.count), members: len(l.members)}
	if l.weighted {
		s.endpoints *= 2
	}
	return s
}

// leftover is a service with frontends that did not fit into the maps.
type leftover struct {
	view *api.View
	// missing is the size of the frontends and lists that did not fit.
	missing size
}

// open completes d. The arguments are options of package reconcile.
func (d *dataplane) open(verifyInterval time.Duration, drifted func(bool)) *dataplane {
	d.drifted, d.lastID = drifted, rand.Uint64()
	d.reconciler = reconcile.New(d, reconcile.Options[frontendKey, frontend]{
		Equal: func(is, want frontend) bool { return is.digest == want.digest },
		Depth: func(k frontendKey) int {
			if k.isClusterIP() {
				return 1
			}
			return 0
		},
		VerifyInterval: verifyInterval, Drifted: drifted,
	})
	return d
}

// sync ignores the end of ctx, because it would have to report a partial change as an
// error.
func (d *dataplane) sync(ctx context.Context, c *sink.Changes) error {
	ctx = context.WithoutCancel(ctx)
	if c.First {
		d.left, d.tooLarge = map[types.NamespacedName]*leftover{}, map[types.NamespacedName]string{}
	}
	hadSpace := len(d.left) == 0
	before := map[types.NamespacedName]string{}
	for s := range c.Services {
		delete(d.left, s.Key)
		if reason, ok := d.tooLarge[s.Key]; ok {
			before[s.Key] = reason
			delete(d.tooLarge, s.Key)
		}
	}
	d.freed, d.lostUDP = false, false
	err := d.reconciler.Sync(ctx, c)
	if err == nil && d.freed {
		err = d.retry(ctx)
	}
	for s := range c.Services {
		if reason := d.tooLarge[s.Key]; reason != before[s.Key] && reason != "" {
			klog.FromContext(ctx).Info("The service is too large for the eBPF maps and is handled without eBPF", "service", s.Key, "reason", reason)
		}
	}
	if hadSpace && len(d.left) > 0 {
		klog.FromContext(ctx).Info("Some services do not fit into the eBPF maps and are handled without eBPF", "services", len(d.left), "reason", d.full)
	}
	return err
}

// maxMisfits limits a call of retry, because the map "left" may have very many services.
// The call stops when maxMisfits services still do not fit.
const maxMisfits = 16

// retry adds, in random order, frontends of services that did not fit.
func (d *dataplane) retry(ctx context.Context) error {
	misfits := 0
	for key, l := range d.left {
		if l.missing.fits(d.room()) {
			delete(d.left, key)
			again := &sink.Changes{Services: slices.Values([]sink.Change{{Key: key, New: l.view, Unsure: true}})}
			if err := d.reconciler.Sync(context.WithoutCancel(ctx), again); err != nil {
				return err
			}
			if _, still := d.left[key]; !still {
				continue
			}
		}
		if misfits++; misfits == maxMisfits {
			break
		}
	}
	return nil
}

// room returns the number of elements that still fit into each map.
func (d *dataplane) room() size {
	room := d.capacity
	room.subtract(d.used)
	return room
}

// usage has the numbers of elements in the maps, and the number of services that have
// frontends without elements.
type usage struct{ frontends, endpoints, members, servicesLeft int }

func (d *dataplane) usage() usage {
	return usage{frontends: d.used.frontends, endpoints: d.used.endpoints, members: d.used.members, servicesLeft: len(d.left) + len(d.tooLarge)}
}

// Plan implements [reconcile.Dataplane].
func (d *dataplane) Plan(view *api.View, emit func(frontendKey, frontend)) error {
	all, tooLarge := d.planner.plan(view)
	if tooLarge != "" {
		d.tooLarge[view.Key()] = tooLarge
	}
	var counted []ipKey
	for _, w := range all {
		if ip := w.frontend.IP; w.affinity != 0 && !slices.Contains(counted, ip) {
			counted = append(counted, ip)
			emit(frontendKey{IP: ip}, frontend{})
		}
		if d.owners != nil {
			d.owners[w.frontend] = owner{view.Key(), w.port, w.endpointList}
		}
		emit(w.frontend, frontend{w.digest, w.endpointList})
	}
	return nil
}

// newList is a list that Apply adds. The error err is the reason why it does not fit, or nil.
type newList struct {
	*listRecord
	err error
}

// Apply implements [reconcile.Dataplane]. It first adds new lists, then switches frontends to
// them, and then deletes lists that no frontend has. So a program always sees a whole list.
// Frontends that do not fit are deleted, so that the other sink handles them.
func (d *dataplane) Apply(_ context.Context, ops []op) error {
	made := d.addLists(ops)
	var frontends batch[frontendKey, list]
	errs := map[frontendKey]*error{}
	affine := map[ipKey]uint64{}
	for _, o := range ops {
		switch {
		case o.New == nil:
		case o.Key.isClusterIP():
			affine[o.Key.IP] = 0
		default:
			if l := d.lists[o.New.digest]; l != nil {
				errs[o.Key] = new(error)
				frontends.add(o.Key, list{ID: l.id, Count: l.count, Affinity: l.affinity})
			} else {
				errs[o.Key] = &made[o.New.digest].err
			}
		}
	}
	d.countClients(affine)
	setAll(d.frontends, frontends, func(k frontendKey) *error { return errs[k] })
	return d.finish(ops, made, errs)
}

// addLists adds the missing lists of planned frontends, and returns them by digest.
func (d *dataplane) addLists(ops []op) map[uint64]*newList {
	made, byID := map[uint64]*newList{}, map[uint64]*newList{}
	var slots batch[slotKey, address]
	var members batch[memberKey, uint32]
	for _, o := range ops {
		if o.New == nil || o.Key.isClusterIP() || d.lists[o.New.digest] != nil || made[o.New.digest] != nil {
			continue
		}
		wanted := o.New.wanted
		l := &newList{err: d.checkRoom(wanted)}
		if made[wanted.digest] = l; l.err != nil {
			continue
		}
		d.lastID++
		l.listRecord = &listRecord{
			id: d.lastID, count: uint32(len(wanted.endpoints)), affinity: wanted.affinity, weighted: wanted.others != nil, members: wanted.members,
		}
		byID[l.id] = l
		d.used.add(l.size())
		for i, a := range wanted.all() {
			slots.add(slotKey{List: l.id, Index: i}, a)
		}
		for _, a := range wanted.members {
			members.add(memberKey{List: l.id, Endpoint: a}, 0)
		}
	}
	setAll(d.slots, slots, func(k slotKey) *error { return &byID[k.List].err })
	setAll(d.members, members, func(k memberKey) *error { return &byID[k.List].err })
	for digest, l := range made {
		if l.err == nil {
			d.lists[digest] = l.listRecord
		}
	}
	return made
}

// checkRoom returns an error if a new list does not fit. So nothing is written for a list
// that is too large for the rest of a map.
func (d *dataplane) checkRoom(l *endpointList) error {
	room, needed := d.room(), l.size()
	switch {
	case needed.endpoints > room.endpoints:
		return fmt.Errorf("map slots has room for only %d of %d elements", room.endpoints, needed.endpoints)
	case needed.members > room.members:
		return fmt.Errorf("map members has room for only %d of %d elements", room.members, needed.members)
	}
	return nil
}

// finish deletes frontends and lists that are no longer needed, and completes ops. The
// argument errs has the errors of frontends.
func (d *dataplane) finish(ops []op, made map[uint64]*newList, errs map[frontendKey]*error) error {
	var frontends []frontendKey
	var ips []ipKey
	unused := map[uint64]*listRecord{} // by digest
	missing := map[*endpointList]struct{}{}
	for i := range ops {
		o := &ops[i]
		if o.Key.isClusterIP() {
			if o.New == nil {
				ips = append(ips, o.Key.IP)
			}
			continue
		}
		if o.Old != nil {
			d.lostUDP = d.lostUDP || o.Key.Protocol == unix.IPPROTO_UDP
			d.used.frontends--
			if l := d.lists[o.Old.digest]; l != nil {
				if l.frontends--; l.frontends == 0 {
					unused[o.Old.digest] = l
				}
			}
		}
		if o.New != nil && *errs[o.Key] == nil {
			d.used.frontends++
			d.lists[o.New.digest].frontends++
			o.New = &frontend{digest: o.New.digest}
			continue
		}
		delete(d.owners, o.Key)
		if o.Old != nil {
			frontends = append(frontends, o.Key)
		}
		if o.New != nil {
			d.leave(o, *errs[o.Key], missing)
			o.New = nil
		}
	}
	for digest, l := range made {
		if l.listRecord != nil {
			unused[digest] = l.listRecord
		}
	}
	var slots []slotKey
	var members []memberKey
	for digest, l := range unused {
		if l.frontends > 0 { // used
			continue
		}
		delete(d.lists, digest)
		d.used.subtract(l.size())
		for i := range l.count {
			slots = append(slots, slotKey{List: l.id, Index: i})
			if l.weighted {
				slots = append(slots, slotKey{List: l.id, Index: othersFrom + i})
			}
		}
		for _, a := range l.members {
			members = append(members, memberKey{List: l.id, Endpoint: a})
		}
	}
	d.freed = d.freed || len(frontends)+len(slots)+len(members) > 0
	return errors.Join(d.frontends.delete(frontends), d.slots.delete(slots), d.members.delete(members), d.counts.delete(ips))
}

// leave records that a planned frontend does not fit. The set missing has the lists whose
// size was already recorded.
func (d *dataplane) leave(o *op, err error, missing map[*endpointList]struct{}) {
	l := d.left[o.Service]
	if l == nil {
		l = &leftover{view: o.New.wanted.view}
		d.left[o.Service] = l
	}
	d.full = err
	l.missing.frontends++
	wanted := o.New.wanted
	if _, ok := missing[wanted]; !ok && d.lists[wanted.digest] == nil {
		missing[wanted] = struct{}{}
		l.missing.add(wanted.size())
	}
}

// scan is the content of the maps.
type scan struct {
	frontends []found
	// affinity has the frontends with session affinity, and their timeouts in seconds.
	affinity map[frontendKey]uint32
	lists    map[uint64]*foundList // by ID
	// orphanSlots and orphanMembers belong to no frontend.
	orphanSlots   []slotKey
	orphanMembers []memberKey
}

// found is a frontend in the map. If its value contradicts another frontend, the list is
// nil.
type found struct {
	frontendKey
	list *foundList
}

type foundList struct {
	listRecord
	digest uint64
}

// List implements [reconcile.Dataplane]. It deletes slots and members that no frontend uses,
// and corrects the counts of clients.
func (d *dataplane) List(ctx context.Context, emit func(frontendKey, frontend)) error {
	s, err := d.scan(ctx)
	if err != nil {
		return err
	}
	ips, err := d.recount(ctx, s.affinity)
	if err != nil {
		return err
	}
	if err := errors.Join(d.slots.delete(s.orphanSlots), d.members.delete(s.orphanMembers)); err != nil {
		return err
	}
	if d.lists != nil && len(s.orphanSlots)+len(s.orphanMembers) > 0 {
		d.drifted(true)
	}
	d.lists = make(map[uint64]*listRecord, len(s.lists))
	d.used = size{frontends: len(s.frontends)}
	for _, l := range s.lists {
		d.used.add(l.size())
		if d.lists[l.digest] != nil { // an earlier version wrote an equal list for each frontend
			l.digest = maphash.Comparable(d.seed, l.id)
		}
		record := l.listRecord
		d.lists[l.digest] = &record
	}
	for _, f := range s.frontends {
		if f.list == nil {
			emit(f.frontendKey, frontend{})
		} else {
			emit(f.frontendKey, frontend{digest: f.list.digest})
		}
	}
	for _, ip := range ips {
		emit(frontendKey{IP: ip}, frontend{})
	}
	return nil
}

func (d *dataplane) scan(ctx context.Context) (*scan, error) {
	s := &scan{affinity: map[frontendKey]uint32{}, lists: make(map[uint64]*foundList, len(d.lists))}
	err := d.frontends.each(ctx, func(f frontendKey, value list) {
		l := s.lists[value.ID]
		if l == nil {
			l = &foundList{listRecord{id: value.ID, count: value.Count, affinity: value.Affinity}, affinityDigest(d.seed, value.Affinity)}
			s.lists[value.ID] = l
		}
		if value.Affinity != 0 {
			s.affinity[f] = value.Affinity
		}
		if value != (list{l.id, l.count, l.affinity}) { // kpng never writes such a frontend
			s.frontends = append(s.frontends, found{f, nil})
			return
		}
		l.frontends++
		s.frontends = append(s.frontends, found{f, l})
	})
	if err != nil {
		return nil, err
	}
	err = d.slots.each(ctx, func(k slotKey, a address) {
		if l := s.lists[k.List]; l != nil && k.Index%othersFrom < l.count {
			l.digest += slotDigest(d.seed, k.Index, a)
			l.weighted = l.weighted || k.Index >= othersFrom
		} else {
			s.orphanSlots = append(s.orphanSlots, k)
		}
	})
	if err != nil {
		return nil, err
	}
	err = d.members.each(ctx, func(k memberKey, _ uint32) {
		if l := s.lists[k.List]; l != nil {
			l.digest += memberDigest(d.seed, k.Endpoint)
			l.members = append(l.members, k.Endpoint)
		} else {
			s.orphanMembers = append(s.orphanMembers, k)
		}
	})
	return s, err
}
