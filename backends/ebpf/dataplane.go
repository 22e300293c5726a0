// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// dataplane writes the maps that the programs read. It is not safe for concurrent use.
type dataplane struct {
	planner
	frontends table[frontendKey, list]
	slots     table[slotKey, address]
	members   table[memberKey, uint32]
	clientTables
	// capacity is the size of the maps.
	capacity size

	// records has the frontends in the kernel. It is nil while the frontends are unknown.
	records map[frontendKey]*record
	// lists has the lists of the records, by ID.
	lists map[uint64]*listRecord
	// affine has the number of records with session affinity for each cluster IP.
	affine map[clusterIP]int
	// The map services has the services that were delivered since the latest pass began,
	// each with the list of frontends that it needs. A list may be empty.
	services map[types.NamespacedName][]frontendKey
	// The field prune is true from the end of a pass until the frontends without an owner
	// are deleted. The map awaited has the failing services that were not delivered since
	// the pass began. Until awaited is empty, sync keeps the frontends without an owner,
	// because they may belong to these services.
	awaited map[types.NamespacedName]struct{}
	prune   bool
	// The map left has the services with a frontend that did not fit into the maps. The map
	// tooLarge has the services that need more than their share of a map, with the reason.
	left     map[types.NamespacedName]*leftover
	tooLarge map[types.NamespacedName]string
	// The error full is the last reason why a frontend did not fit.
	full error
	// lastID is the ID of the last new list. The first ID is random, so that a process does
	// not use the IDs of an earlier process.
	lastID uint64
	// comparison is the comparison that has begun, or nil.
	comparison *comparison
	// used counts the elements of the maps slots and members. Its number of frontends is 0.
	used size
}

// record is a frontend in the kernel.
type record struct {
	list     *listRecord
	affinity uint32
	// owner is the service that needs the frontend. It is empty if no such service was
	// delivered since the latest pass began.
	owner types.NamespacedName
}

// listRecord is a list in the kernel.
type listRecord struct {
	id     uint64
	count  uint32
	digest uint64
	// members are in no order.
	members []address
	// frontends is the number of records with this list.
	frontends int
}

func (l *listRecord) size() size { return size{endpoints: int(l.count), members: len(l.members)} }

// equal reports whether the list in the kernel is the wanted one.
func (l *listRecord) equal(wanted *endpointList) bool {
	return int(l.count) == len(wanted.endpoints) && len(l.members) == len(wanted.members) && l.digest == wanted.digest
}

// leftover is a service with frontends that did not fit into the maps.
type leftover struct {
	view *api.View
	// missing is the size of what did not fit.
	missing size
}

// The type changes is a map from frontends to their changes. A nil change deletes the
// frontend.
type changes map[frontendKey]*change

type change struct {
	wanted
	owner types.NamespacedName
	view  *api.View
	// err is the reason why the frontend does not fit into the map, or nil.
	err error
}

// failed returns the reason why the frontend or its list does not fit, or nil.
func (c *change) failed() error { return cmp.Or(c.endpointList.err, c.err) }

func (d *dataplane) sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		if err := d.begin(); err != nil {
			return err
		}
	}
	if d.records == nil {
		return fmt.Errorf("the content of the maps is unknown (%w)", sink.ErrStartOver)
	}
	hadSpace := len(d.left) == 0
	all := changes{}
	for s := range c.Services {
		before := d.tooLarge[s.Key]
		d.plan(all, s.Key, s.New)
		if reason := d.tooLarge[s.Key]; reason != "" && reason != before {
			klog.FromContext(ctx).Info("The service is too large for the eBPF maps and is handled without eBPF", "service", s.Key, "reason", reason)
		}
		delete(d.awaited, s.Key)
	}
	if c.Last {
		d.prune = true
		d.awaited = map[types.NamespacedName]struct{}{}
		for _, key := range c.Failing {
			if _, planned := d.services[key]; !planned {
				d.awaited[key] = struct{}{}
			}
		}
	}
	if d.prune && len(d.awaited) == 0 {
		d.prune = false
		for f, r := range d.records {
			if _, changes := all[f]; r.owner == (types.NamespacedName{}) && !changes {
				all[f] = nil
			}
		}
	}
	freed, err := d.apply(all)
	if err == nil && freed {
		err = d.retry()
	}
	if hadSpace && len(d.left) > 0 {
		klog.FromContext(ctx).Info("Some services do not fit into the eBPF maps and are handled without eBPF", "services", len(d.left), "reason", d.full)
	}
	return err
}

// The method retry stops after maxMisfits services that still do not fit, because the map
// left may have very many services.
const maxMisfits = 16

// retry adds frontends of services that did not fit, in random order.
func (d *dataplane) retry() error {
	misfits := 0
	for key, l := range d.left {
		if l.missing.fits(d.room()) {
			all := changes{}
			d.plan(all, key, l.view)
			if _, err := d.apply(all); err != nil {
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
	return size{d.capacity.frontends - len(d.records), d.capacity.endpoints - d.used.endpoints, d.capacity.members - d.used.members}
}

// begin reads the maps, and deletes lists that no frontend uses.
func (d *dataplane) begin() error {
	d.records, d.comparison = nil, nil
	s, err := d.scan()
	if err == nil {
		err = errors.Join(d.slots.delete(s.orphanSlots), d.members.delete(s.orphanMembers))
	}
	if err != nil {
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	d.records, d.lists = s.records, s.lists
	if err := d.beginClients(); err != nil {
		d.records = nil
		return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	if d.lastID == 0 {
		d.lastID = rand.Uint64()
	}
	d.used = size{}
	for _, l := range d.lists {
		d.used.add(l.size())
	}
	d.services = map[types.NamespacedName][]frontendKey{}
	d.left, d.tooLarge = map[types.NamespacedName]*leftover{}, map[types.NamespacedName]string{}
	d.awaited, d.prune = nil, false
	return nil
}

// usage has the numbers of elements in the maps, and of services that have frontends without
// elements.
type usage struct{ frontends, endpoints, members, servicesLeft int }

func (d *dataplane) usage() usage {
	return usage{frontends: len(d.records), endpoints: d.used.endpoints, members: d.used.members, servicesLeft: len(d.left) + len(d.tooLarge)}
}

// plan adds the changes of one service to the map all. A list that a frontend of the
// service already has stays, and other frontends may share it.
func (d *dataplane) plan(all changes, key types.NamespacedName, view *api.View) {
	delete(d.left, key)
	delete(d.tooLarge, key)
	needed, tooLarge := d.planner.plan(view)
	if tooLarge != "" {
		d.tooLarge[key] = tooLarge
	}
	for _, w := range needed {
		if r := d.records[w.frontend]; r != nil && w.record == nil && r.list.equal(w.endpointList) {
			w.record = r.list
		}
	}
	old, keys := d.services[key], make([]frontendKey, len(needed))
	for i, w := range needed {
		keys[i] = w.frontend
		if r := d.records[w.frontend]; r != nil && r.list == w.record && r.affinity == w.affinity {
			r.owner = key
			delete(all, w.frontend)
		} else {
			all[w.frontend] = &change{wanted: w, owner: key, view: view}
		}
	}
	if view == nil {
		delete(d.services, key)
	} else {
		d.services[key] = keys
	}
	if slices.Equal(old, keys) {
		return
	}
	kept := make(map[frontendKey]struct{}, len(keys))
	for _, f := range keys {
		kept[f] = struct{}{}
	}
	for _, f := range old {
		// Delete a frontend that the service no longer needs, unless another service has taken
		// it over.
		if _, ok := kept[f]; ok || all[f] != nil {
			continue
		}
		if r := d.records[f]; r != nil && r.owner == key {
			all[f] = nil
		}
	}
}

// apply writes changes to the kernel. It first adds new lists, then switches frontends to
// them, and then deletes lists that no frontend has. So a program always sees a whole list.
// Frontends that do not fit are deleted, so that the other sink handles them. The result
// freed reports whether elements were deleted.
func (d *dataplane) apply(all changes) (freed bool, err error) {
	if len(all) == 0 {
		return false, nil
	}
	made := map[uint64]*endpointList{}
	var slots batch[slotKey, address]
	var members batch[memberKey, uint32]
	for _, c := range all {
		if c == nil || c.record != nil || c.endpointList.err != nil {
			continue
		}
		l := c.endpointList
		if c.endpointList.err = d.checkRoom(l); l.err != nil {
			continue
		}
		d.lastID++
		l.record = &listRecord{id: d.lastID, count: uint32(len(l.endpoints)), digest: l.digest, members: l.members}
		made[d.lastID], d.lists[d.lastID] = l, l.record
		d.used.add(l.record.size())
		for i, a := range l.endpoints {
			slots.add(slotKey{List: d.lastID, Index: uint32(i)}, a)
		}
		for _, a := range l.members {
			members.add(memberKey{List: d.lastID, Endpoint: a}, 0)
		}
	}
	setAll(d.slots, slots, func(k slotKey) *error { return &made[k.List].err })
	setAll(d.members, members, func(k memberKey) *error { return &made[k.List].err })
	var frontends batch[frontendKey, list]
	affine := map[clusterIP]uint64{}
	for f, c := range all {
		if c != nil && c.failed() == nil {
			if c.affinity != 0 && d.affine[f.IP] == 0 {
				affine[f.IP] = 0
			}
			frontends.add(f, list{ID: c.record.id, Count: c.record.count, Affinity: c.affinity})
		}
	}
	d.countClients(affine)
	setAll(d.frontends, frontends, func(k frontendKey) *error { return &all[k].err })
	return d.finish(all, made)
}

// checkRoom returns an error if a new list does not fit. So a list that is too large for
// the rest of a map costs nothing.
func (d *dataplane) checkRoom(l *endpointList) error {
	room := d.room()
	switch {
	case len(l.endpoints) > room.endpoints:
		return fmt.Errorf("map slots has room for only %d of %d elements", room.endpoints, len(l.endpoints))
	case len(l.members) > room.members:
		return fmt.Errorf("map members has room for only %d of %d elements", room.members, len(l.members))
	}
	return nil
}

// finish deletes frontends and lists that are no longer needed, and updates the records.
func (d *dataplane) finish(all changes, made map[uint64]*endpointList) (freed bool, err error) {
	var frontends []frontendKey
	var unused []*listRecord
	missing := map[*endpointList]struct{}{}
	for f, c := range all {
		r := d.records[f]
		if r != nil {
			d.comparison.skip(r.list.id)
			if r.list.frontends--; r.list.frontends == 0 {
				unused = append(unused, r.list)
			}
			d.addAffine(f, r.affinity, -1)
		}
		if c != nil && c.failed() == nil {
			d.comparison.skip(c.record.id)
			c.record.frontends++
			d.addAffine(f, c.affinity, 1)
			d.records[f] = &record{list: c.record, affinity: c.affinity, owner: c.owner}
			continue
		}
		if r != nil {
			frontends = append(frontends, f)
		}
		delete(d.records, f)
		if c != nil {
			d.leave(c, missing)
		}
	}
	for id, l := range made {
		if d.comparison.skip(id); l.record.frontends == 0 {
			unused = append(unused, l.record)
		}
	}
	var slots []slotKey
	var members []memberKey
	for _, l := range unused {
		if l.frontends > 0 || d.lists[l.id] != l { // used again, or deleted already
			continue
		}
		delete(d.lists, l.id)
		d.used.subtract(l.size())
		for i := range l.count {
			slots = append(slots, slotKey{List: l.id, Index: i})
		}
		for _, a := range l.members {
			members = append(members, memberKey{List: l.id, Endpoint: a})
		}
	}
	var ips []clusterIP // without session affinity
	for f, c := range all {
		if n, counted := d.affine[f.IP]; n == 0 && (counted || c != nil && c.affinity != 0) {
			ips = append(ips, f.IP)
			delete(d.affine, f.IP)
		}
	}
	if err := errors.Join(d.frontends.delete(frontends), d.slots.delete(slots), d.members.delete(members), d.counts.delete(ips)); err != nil {
		d.records = nil
		return false, fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	return len(frontends)+len(slots)+len(members) > 0, nil
}

// leave records that a frontend does not fit. The set missing has the lists whose size is
// recorded.
func (d *dataplane) leave(c *change, missing map[*endpointList]struct{}) {
	l := d.left[c.owner]
	if l == nil {
		l = &leftover{view: c.view}
		d.left[c.owner] = l
	}
	d.full = c.failed()
	l.missing.frontends++
	if _, ok := missing[c.endpointList]; !ok && c.endpointList.err != nil {
		missing[c.endpointList] = struct{}{}
		l.missing.add(size{endpoints: len(c.endpoints), members: len(c.members)})
	}
}

// scan is the content of the maps.
type scan struct {
	records map[frontendKey]*record
	lists   map[uint64]*listRecord
	// orphanSlots and orphanMembers belong to no frontend.
	orphanSlots   []slotKey
	orphanMembers []memberKey
}

func (d *dataplane) scan() (*scan, error) {
	s := &scan{records: map[frontendKey]*record{}, lists: map[uint64]*listRecord{}}
	err := each(d.frontends, func(f frontendKey, value list) {
		l := s.lists[value.ID]
		if l == nil {
			l = &listRecord{id: value.ID, count: value.Count}
			s.lists[value.ID] = l
		}
		if l.count != value.Count { // kpng never writes such a frontend; replace its list
			l = &listRecord{}
		}
		l.frontends++
		s.records[f] = &record{list: l, affinity: value.Affinity}
	})
	if err != nil {
		return nil, err
	}
	err = each(d.slots, func(k slotKey, a address) {
		if l := s.lists[k.List]; l != nil && k.Index < l.count {
			l.digest += slotDigest(d.seed, k.Index, a)
		} else {
			s.orphanSlots = append(s.orphanSlots, k)
		}
	})
	if err != nil {
		return nil, err
	}
	err = each(d.members, func(k memberKey, _ uint32) {
		if l := s.lists[k.List]; l != nil {
			l.digest += memberDigest(d.seed, k.Endpoint)
			l.members = append(l.members, k.Endpoint)
		} else {
			s.orphanMembers = append(s.orphanMembers, k)
		}
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}
