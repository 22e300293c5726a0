// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// dataplane writes the maps that the programs read. It is not safe for concurrent use.
type dataplane struct {
	annotation string
	frontends  table[frontendKey, list]
	slots      table[slotKey, address]
	members    table[memberKey, uint32]
	seed       maphash.Seed

	// records has the frontends in the kernel. It is nil while the frontends are unknown.
	records map[frontendKey]*record
	// The map services has the services that were delivered since the latest pass began,
	// each with the list of frontends that it needs. A list may be empty.
	services map[types.NamespacedName][]frontendKey
	// The field prune is true from the end of a pass until the frontends without an owner
	// are deleted. The map awaited has the failing services that were not delivered since
	// the pass began. Until awaited is empty, sync keeps the frontends without an owner,
	// because they may belong to these services.
	awaited map[types.NamespacedName]struct{}
	prune   bool
	// The map left has the services with a frontend that did not fit into the maps.
	left map[types.NamespacedName]*api.ServiceEndpoints
	// The error full is the last reason why a frontend did not fit.
	full error
	// lastID is the ID of the last new list. The first ID is random, so that a process does
	// not use the IDs of an earlier process.
	lastID uint64
	// comparison is the comparison that has begun, or nil.
	comparison *comparison
	// endpoints counts the elements of the map slots. memberships counts the elements of the
	// map members.
	endpoints, memberships int
}

// record is a frontend in the kernel.
type record struct {
	list    list
	digest  uint64
	members []address
	// owner is the service that needs the frontend. It is empty if no such service was
	// delivered since the latest pass began.
	owner types.NamespacedName
}

// The type changes is a map from frontends to their changes. A nil change deletes the
// frontend.
type changes map[frontendKey]*change

type change struct {
	wanted
	owner types.NamespacedName
	view  *api.ServiceEndpoints
	id    uint64
	// err is the reason why the frontend does not fit into the maps, or nil.
	err error
}

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
		d.plan(all, s.Key, s.New)
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
	for key, view := range maps.Clone(d.left) {
		all := changes{}
		d.plan(all, key, view)
		if _, err := d.apply(all); err != nil {
			return err
		}
		if _, still := d.left[key]; still {
			if misfits++; misfits == maxMisfits {
				break
			}
		}
	}
	return nil
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
	d.records = s.records
	if d.lastID == 0 {
		d.lastID = rand.Uint64()
	}
	d.endpoints, d.memberships = 0, 0
	for _, r := range d.records {
		d.count(r, 1)
	}
	d.services = map[types.NamespacedName][]frontendKey{}
	d.left = map[types.NamespacedName]*api.ServiceEndpoints{}
	d.awaited, d.prune = nil, false
	return nil
}

// count adds the elements of a record to the counters, or subtracts them if sign is -1.
func (d *dataplane) count(r *record, sign int) {
	d.endpoints += sign * int(r.list.Count)
	d.memberships += sign * len(r.members)
}

func (d *dataplane) usage() Usage {
	return Usage{Frontends: len(d.records), Endpoints: d.endpoints, Members: d.memberships, ServicesLeft: len(d.left)}
}

// plan adds the changes of one service to the map all.
func (d *dataplane) plan(all changes, key types.NamespacedName, view *api.ServiceEndpoints) {
	delete(d.left, key)
	needed := plan(view, d.annotation)
	old := d.services[key]
	d.services[key] = make([]frontendKey, len(needed))
	for i, w := range needed {
		d.services[key][i] = w.frontend
		if r := d.records[w.frontend]; r != nil && r.list.Count == uint32(len(w.endpoints)) && r.list.Affinity == w.affinity && r.digest == w.digest(d.seed) {
			r.owner = key
			delete(all, w.frontend)
		} else {
			all[w.frontend] = &change{wanted: w, owner: key, view: view}
		}
	}
	if view == nil {
		delete(d.services, key)
	}
	for _, f := range old {
		// Delete a frontend that the service no longer needs, unless another service has taken
		// it over.
		if r := d.records[f]; r != nil && r.owner == key && all[f] == nil && !slices.Contains(d.services[key], f) {
			all[f] = nil
		}
	}
}

// apply writes changes to the kernel. It first adds new lists, then switches frontends to
// them, and then deletes old lists. So a program always sees a whole list. Frontends that
// do not fit are deleted, so that the other sink handles them. The result freed reports
// whether elements were deleted.
func (d *dataplane) apply(all changes) (freed bool, err error) {
	if len(all) == 0 {
		return false, nil
	}
	lists := map[uint64]*change{}
	var slots batch[slotKey, address]
	var members batch[memberKey, uint32]
	for _, c := range all {
		if c == nil {
			continue
		}
		d.lastID++
		c.id = d.lastID
		lists[c.id] = c
		for i, a := range c.endpoints {
			slots.add(slotKey{List: c.id, Index: uint32(i)}, a)
		}
		for _, a := range c.members {
			members.add(memberKey{List: c.id, Endpoint: a}, 0)
		}
	}
	setAll(d.slots, slots, func(k slotKey) *change { return lists[k.List] })
	setAll(d.members, members, func(k memberKey) *change { return lists[k.List] })
	var frontends batch[frontendKey, list]
	for f, c := range all {
		if c != nil && c.err == nil {
			frontends.add(f, c.list())
		}
	}
	setAll(d.frontends, frontends, func(k frontendKey) *change { return all[k] })
	return d.finish(all)
}

func (c *change) list() list {
	return list{ID: c.id, Count: uint32(len(c.endpoints)), Affinity: c.affinity}
}

// finish deletes frontends and lists that are no longer needed, and updates the records.
func (d *dataplane) finish(all changes) (freed bool, err error) {
	var frontends []frontendKey
	var slots []slotKey
	var members []memberKey
	unneeded := func(id uint64, n int, m []address) {
		for i := range n {
			slots = append(slots, slotKey{List: id, Index: uint32(i)})
		}
		for _, a := range m {
			members = append(members, memberKey{List: id, Endpoint: a})
		}
	}
	for f, c := range all {
		r := d.records[f]
		d.comparison.skip(c, r)
		if r != nil {
			unneeded(r.list.ID, int(r.list.Count), r.members)
			d.count(r, -1)
		}
		if c != nil && c.err == nil {
			d.records[f] = &record{list: c.list(), digest: c.digest(d.seed), members: c.members, owner: c.owner}
			d.count(d.records[f], 1)
			continue
		}
		if r != nil {
			frontends = append(frontends, f)
		}
		delete(d.records, f)
		if c != nil {
			unneeded(c.id, len(c.endpoints), c.members)
			d.left[c.owner], d.full = c.view, c.err
		}
	}
	if err := errors.Join(d.frontends.delete(frontends), d.slots.delete(slots), d.members.delete(members)); err != nil {
		d.records = nil
		return false, fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
	}
	return len(slots) > 0, nil
}

// scan is the content of the maps.
type scan struct {
	records map[frontendKey]*record
	// orphanSlots and orphanMembers belong to no frontend.
	orphanSlots   []slotKey
	orphanMembers []memberKey
}

func (d *dataplane) scan() (*scan, error) {
	s := &scan{records: map[frontendKey]*record{}}
	lists := map[uint64]*record{}
	err := each(d.frontends, func(f frontendKey, l list) {
		r := &record{list: l}
		s.records[f] = r
		if _, shared := lists[l.ID]; shared {
			r = nil // kpng never lets frontends share a list; treat this list as an orphan
		}
		lists[l.ID] = r
	})
	if err != nil {
		return nil, err
	}
	err = each(d.slots, func(k slotKey, a address) {
		if r := lists[k.List]; r != nil && k.Index < r.list.Count {
			r.digest += slotDigest(d.seed, k.Index, a)
		} else {
			s.orphanSlots = append(s.orphanSlots, k)
		}
	})
	if err != nil {
		return nil, err
	}
	err = each(d.members, func(k memberKey, _ uint32) {
		if r := lists[k.List]; r != nil {
			r.digest += memberDigest(d.seed, k.Endpoint)
			r.members = append(r.members, k.Endpoint)
		} else {
			s.orphanMembers = append(s.orphanMembers, k)
		}
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}
