// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// frontendState is a virtual server, and the elements of the table that describe it.
type frontendState struct {
	// wanted.endpoints are the destinations that get new connections. In a record,
	// wanted.existing is nil.
	wanted
	protocol api.Protocol
	elements []element
	// exists is true if there is a virtual server, or if one is planned. The field
	// planned is true if this is a plan.
	exists, planned bool
	// others are the destinations in the kernel that are not in wanted.endpoints. Apply
	// keeps those that get no new connections, until removeIdle finds that their
	// connections have ended.
	others map[netip.AddrPort]destination
}

// newFrontend returns the frontend of a virtual server in the kernel, without its elements.
func newFrontend(id serverID, s *server) *frontendState {
	f := &frontendState{protocol: id.protocol, exists: s != nil}
	if s == nil {
		return f
	}
	f.settings = s.settings
	f.endpoints = make([]netip.AddrPort, 0, len(s.destinations))
	for at, to := range s.destinations {
		if to.weight != 0 && !to.edited {
			f.endpoints = append(f.endpoints, at)
			continue
		}
		if f.others == nil {
			f.others = map[netip.AddrPort]destination{}
		}
		f.others[at] = to
	}
	slices.SortFunc(f.endpoints, netip.AddrPort.Compare)
	f.weights = weightsOf(f.endpoints, func(at netip.AddrPort) uint32 { return s.destinations[at].weight })
	return f
}

// equal reports whether a recorded frontend is equal to a planned or listed one. It ignores
// the number of connections.
func (f *frontendState) equal(want *frontendState) bool {
	if f.exists != want.exists || f.settings != want.settings || !slices.Equal(f.endpoints, want.endpoints) ||
		!slices.Equal(f.weights, want.weights) || !slices.Equal(f.elements, want.elements) {
		return false
	}
	if want.planned {
		for at, to := range f.others {
			if to.weight != 0 || to.edited || !want.keeps(at, f.protocol) {
				return false
			}
		}
		return true
	}
	for at, to := range want.others {
		if is, ok := f.others[at]; !ok || is.weight != to.weight || is.edited != to.edited {
			return false
		}
	}
	return true
}

type op = reconcile.Op[element, objectValue]

// setFrontend is an operation that sets a frontend.
type setFrontend struct {
	*op
	id       serverID
	is, want *frontendState // the state in the kernel, and the needed state
}

// Apply implements [reconcile.Dataplane].
//
// Its steps interrupt no traffic. The instance first makes the virtual servers and the
// table's elements of an address. Then it makes the address local. At such an address, the table
// accepts packets to a frontend only while the frontend's virtual server exists.
// Otherwise the table refuses these packets, because they would reach programs of the
// node. The table always refuses packets to other ports of such an address. Other
// frontends have addresses that belong to the machine, and the table does not refuse
// packets to other ports of these addresses. Therefore Apply adds the elements of such a
// frontend before its virtual server, and deletes the elements after the virtual server.
// In the opposite order, IPVS would forward connections that source ranges exclude.
func (d *dataplane) Apply(_ context.Context, ops []op) error {
	var set []*setFrontend
	var remove, add []element
	edits := map[types.NamespacedName]*sourcelists.Change{}
	madeLocal := map[netip.Addr]bool{} // addresses that this call has made local
	for i := range ops {
		o := &ops[i]
		if list := d.edits[o.Service]; list != nil {
			edits[o.Service] = list
		}
		switch {
		case o.New == nil || o.Key.set.kind == routes:
		case o.Key.set.kind == frontends && o.New.frontend == nil:
			return errUnknown // a node port has taken the frontend from the service
		case o.Key.set.kind == frontends:
			f := &setFrontend{op: o, id: o.Key.server(), want: o.New.frontend, is: &frontendState{}}
			if old := d.servers[f.id]; old != nil {
				*f.is = *old
			}
			set = append(set, f)
		default:
			if add = append(add, element{o.Key.set, o.Key.key, o.New.data}); o.Old != nil {
				remove = append(remove, element{o.Key.set, o.Key.key, o.Old.data})
			}
			if o.Key.set.kind == addresses {
				madeLocal[o.Key.addr()] = true
			}
		}
	}
	// setElements changes the elements of the table. It omits elements of frontends that
	// must wait for a virtual server.
	setElements := func(remove, add []element) error {
		next := make([][]element, len(set))
		for i, f := range set {
			next[i] = slices.DeleteFunc(slices.Clone(f.want.elements), func(e element) bool {
				id, ok := d.awaits(e)
				return (ok || e.set.kind == frontends && madeLocal[f.id.Addr()]) && !d.exists(id)
			})
			remove = append(remove, without(f.is.elements, next[i])...)
			add = append(add, without(next[i], f.is.elements)...)
		}
		err := d.changeInParts(remove, add)
		if err == nil {
			for i, f := range set {
				f.is.elements = next[i]
			}
		}
		return err
	}
	removeRanges, addRanges := rangesOf(edits)
	err := setElements(append(remove, removeRanges...), append(add, addRanges...))
	switch {
	case errors.Is(err, sink.ErrStartOver):
		return err
	case err != nil:
		return reconcile.Refused(err)
	}
	for key := range edits {
		delete(d.edits, key)
	}
	for _, f := range set {
		err := d.programServer(f)
		if errors.Is(err, sink.ErrStartOver) {
			return err
		}
		d.servers[f.id] = f.is
		delete(d.departing[f.id.Addr()], f.id)
		f.New = &objectValue{frontend: f.is}
		d.fail(f.Service, err)
	}
	if err := setElements(nil, nil); err != nil {
		return err
	}
	failed := reconcile.Failed[element]{}
	for i := range ops {
		if o := &ops[i]; o.New != nil && o.Key.set.kind == routes {
			addr := o.Key.addr()
			err := d.local.add(addr)
			switch {
			case err == nil:
				d.routes[addr] = true
				delete(d.kept, addr)
			case d.local.lost():
				return errors.Join(err, d.changed("interface "+d.opts.Interface)) // a pass repairs the interface
			default:
				failed[o.Key] = err
			}
		}
	}
	if err := d.delete(ops, failed); err != nil {
		return err
	}
	if d.plans == nil && len(d.failed) > 0 {
		return d.failed.Err() // nil in a Verify, which has no failed services
	}
	if len(failed) > 0 {
		return &failed
	}
	return nil
}

// delete executes the operations that delete objects. It adds operations that fail to the
// argument failed. The comment of Apply explains why it deletes some virtual servers
// before their elements, and others after their elements.
func (d *dataplane) delete(ops []op, failed reconcile.Failed[element]) error {
	var before, after []*op
	var remove []element
	for i := range ops {
		o := &ops[i]
		if o.New != nil || o.Key.set.kind != frontends {
			continue
		}
		id := o.Key.server()
		departs, err := d.depart(id, o.Service)
		switch {
		case err != nil:
			failed[o.Key] = err
		case departs:
			remove = append(remove, d.forget(o)...)
		case d.elements[addressElement(id.Addr())]:
			after = append(after, o)
		default:
			before = append(before, o)
		}
	}
	for i := range ops {
		o := &ops[i]
		addr := o.Key.addr()
		switch {
		case o.New != nil || o.Key.set.kind == frontends:
		case o.Key.set.kind == routes && len(d.departing[addr]) > 0:
			d.kept[addr] = true
		case o.Key.set.kind == routes:
			if _, ok := d.routes[addr]; ok {
				if err := d.local.remove(addr); err != nil {
					failed[o.Key], failed[addressElement(addr)] = err, err
					continue
				}
				delete(d.routes, addr)
			}
		case o.Key.set.kind == addresses && d.kept[addr]:
		case failed[o.Key] == nil: // a route is deleted before the element of its address
			remove = append(remove, element{o.Key.set, o.Key.key, o.Old.data})
		}
	}
	deleteServers := func(list []*op) {
		for _, o := range list {
			if err := d.deleteServer(o.Key.server()); err != nil {
				failed[o.Key] = err
				continue
			}
			remove = append(remove, d.forget(o)...)
		}
	}
	deleteServers(before)
	for _, o := range after {
		remove = append(remove, o.Old.frontend.elements...)
	}
	if err := d.changeInParts(remove, nil); err != nil {
		return err
	}
	for _, o := range after {
		o.Old.frontend.elements = nil
	}
	deleteServers(after)
	return nil
}

// forget deletes the records of a frontend that the operation o deletes, and returns its
// elements.
func (d *dataplane) forget(o *op) []element {
	id := o.Key.server()
	delete(d.servers, id)
	delete(d.leaving, id)
	delete(d.ports, id)
	return o.Old.frontend.elements
}

// depart reports whether a virtual server that no service needs has connections. If so, the
// virtual server gets no new connections, and removeIdle deletes it later. UDP flows end if
// their service is deleted. They continue if the service moves to another dataplane.
func (d *dataplane) depart(id serverID, service types.NamespacedName) (bool, error) {
	if !d.exists(id) || id.protocol == api.UDP && !d.unsuitable[service] {
		return false, nil
	}
	var s server
	if err := d.conn.readDestinations(id, &s); err != nil || !s.hasConnections(id.protocol) {
		return false, err
	}
	for at, to := range s.destinations {
		if to.weight != 0 {
			if err := d.conn.setDestination(id, at, false, 0); err != nil {
				return false, err
			}
		}
	}
	if d.departing[id.Addr()] == nil {
		d.departing[id.Addr()] = map[serverID]bool{}
	}
	d.departing[id.Addr()][id] = true
	return true, nil
}

// hasConnections reports whether there are established TCP or SCTP connections, or UDP flows.
func (s *server) hasConnections(p api.Protocol) bool {
	for _, to := range s.destinations {
		if to.established > 0 || p == api.UDP && to.connections > 0 {
			return true
		}
	}
	return false
}

// deleteServer deletes a virtual server of this instance if it exists. If the pass's
// listing has omitted it, deleteServer reads it from the kernel.
func (d *dataplane) deleteServer(id serverID) error {
	if !d.exists(id) {
		if s, err := d.conn.read(id); err != nil || !d.owns(id, s) {
			return err
		}
	}
	return d.conn.delete(id)
}

// programServer brings a virtual server to its wanted state. If the kernel's error shows
// that another program has changed the virtual server, programServer tries again. After an
// error, it reads the virtual server.
func (d *dataplane) programServer(f *setFrontend) error {
	for attempt := 0; ; attempt++ {
		err := d.tryServer(f)
		if err == nil {
			return nil
		}
		elements := f.is.elements
		again := errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST)
		is, readErr := d.readFrontend(f.id)
		if readErr != nil && !errors.Is(readErr, errForeign) {
			return startOver(errors.Join(err, readErr))
		}
		is.elements, f.is = elements, is
		if readErr != nil {
			return readErr
		}
		if !again || attempt > 0 {
			return err
		}
	}
}

func (d *dataplane) tryServer(f *setFrontend) error {
	id, is, want := f.id, f.is, f.want
	var errs []error
	if !is.exists || is.settings != want.settings {
		err := d.conn.set(id, !is.exists, want.settings)
		if err != nil && !is.exists {
			if !errors.Is(err, errNoScheduler) || want.fallback == "" {
				return err
			}
			without := want.settings
			without.scheduler = want.fallback
			if fallbackErr := d.conn.set(id, true, without); fallbackErr != nil {
				return errors.Join(err, fallbackErr)
			}
		}
		errs = append(errs, err) // continue, because the virtual server still needs its endpoints
	}
	for i, at := range want.endpoints {
		if j, has := is.index(at); !has {
			_, exists := is.others[at]
			errs = append(errs, d.conn.setDestination(id, at, !exists, want.weight(i)))
		} else if is.weight(j) != want.weight(i) {
			errs = append(errs, d.conn.setDestination(id, at, false, want.weight(i)))
		}
	}
	others := map[netip.AddrPort]destination{}
	leave := func(at netip.AddrPort, to destination) {
		_, stays := want.index(at)
		switch {
		case stays:
		case !want.keeps(at, id.protocol):
			errs = append(errs, d.conn.deleteDestination(id, at))
		default:
			if others[at] = (destination{}); to.weight != 0 || to.edited {
				errs = append(errs, d.conn.setDestination(id, at, false, 0))
			}
		}
	}
	for i, at := range is.endpoints {
		leave(at, destination{weight: is.weight(i)})
	}
	for at, to := range is.others {
		leave(at, to)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if d.leaving[id] = true; len(others) == 0 {
		delete(d.leaving, id)
		others = nil
	}
	f.is = &frontendState{
		wanted: wanted{settings: want.settings, endpoints: want.endpoints, weights: want.weights}, protocol: id.protocol,
		exists: true, elements: is.elements, others: others,
	}
	return nil
}

// without returns the elements of list that are not in the list other.
func without(list, other []element) (rest []element) {
	for _, e := range list {
		if !slices.Contains(other, e) {
			rest = append(rest, e)
		}
	}
	return rest
}
