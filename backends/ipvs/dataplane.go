// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// dataplane plans, lists and changes the objects of the instance, for package reconcile.
// Calls must not overlap.
//
// If a part of an object cannot be programmed, Apply records the present state of the
// kernel, and the service fails. So the next delivery of the service tries the rest
// again.
type dataplane struct {
	opts       *options
	observer   backends.Observer
	planner    planner
	reconciler reconcile.Reconciler
	conn       virtualServers
	table      *table
	local      localRoutes

	// known is true if the fields servers, elements and routes describe the kernel. If passing
	// is true, the next listing begins a pass.
	known, passing bool
	// servers has the recorded frontends, elements has the elements of the table, and
	// routes has the local addresses in the form of localAddresses.list.
	servers  map[serverID]*frontendState
	elements map[element]bool
	routes   map[netip.Addr]bool
	// leaving has the virtual servers with destinations that get no new connections.
	leaving map[serverID]bool
	// departing has virtual servers that no service needs, but that still have
	// connections. They are not in servers. The addresses in kept are local only because
	// of these virtual servers.
	departing map[netip.Addr]map[serverID]bool
	kept      map[netip.Addr]bool
	// compared is the generation of nf_tables in which the table was equal to the records, or
	// 0. The field checked is the generation in which checkLoss found the table.
	compared, checked uint32
	// serverLost is true if checkLoss has found that a virtual server does not exist.
	serverLost bool

	// lists are the lists of source ranges. Until awaited is empty, they include lists from
	// before the pass. The field awaited has the services that have failed and, during the
	// pass, endOfPass.
	lists   *sourcelists.Lists
	awaited map[types.NamespacedName]bool
	claims  claims
	// ports are the service ports of virtual servers, or nil without Options.Stats.
	ports map[serverID]servicePort

	// The fields below belong to one Sync. The map plans has the plans of the delivered
	// views, and failed has the services that could be programmed only in part. The
	// changes of source-range lists in edits are not written yet.
	plans  map[*api.View]*plan
	failed sink.Failed
	edits  map[types.NamespacedName]*sourcelists.Change
	// unsuitable are the delivered services that IPVS cannot serve.
	unsuitable map[types.NamespacedName]bool
}

// virtualServers are the virtual servers in the kernel, and localRoutes are the local
// addresses. They are interfaces only for tests.
type (
	virtualServers interface {
		open() error
		close() error
		checkConntrack() error
		list() (map[serverID]*server, error)
		read(serverID) (*server, error)
		readDestinations(serverID, *server) error
		set(id serverID, create bool, s settings) error
		setDestination(id serverID, at netip.AddrPort, create bool, weight uint32) error
		deleteDestination(serverID, netip.AddrPort) error
		delete(serverID) error
	}
	localRoutes interface {
		open() error
		close()
		list() (map[netip.Addr]bool, error)
		add(netip.Addr) error
		remove(netip.Addr) error
		lost() bool
		lostRoute(netip.Addr) (bool, error)
		delete() error
		useNodeSource() error
		connectedSockets() (int, error)
	}
)

// routes is the kind of the routes that make addresses local. These routes are not in the
// table.
const routes = setKinds

// objectValue is the value of an object. The key of an object is an element without its
// value. For a frontend, it is an element of the set frontends. For a local route, it is an
// element of the kind routes.
type objectValue struct {
	// data is the data of an element of a map. For a route, it is empty if the route is right.
	data     string
	frontend *frontendState
}

func equalValues(is, want objectValue) bool {
	return is.data == want.data && (is.frontend == want.frontend || is.frontend != nil && want.frontend != nil && is.frontend.equal(want.frontend))
}

func newDataplane(opts *options) *dataplane {
	opts.Observer = backendoptions.Observe(opts.Observer)
	d := &dataplane{
		opts: opts,
		planner: planner{
			scheduler: opts.Scheduler, annotation: opts.SchedulerAnnotation,
			owner: owner(opts.tableName()), healthzPort: opts.HealthzPort, nodeNetworks: opts.NodeNetworks,
		},
		observer: opts.Observer,
		conn:     &conn{netNS: opts.NetNS},
		table:    newTable(opts),
		lists:    sourcelists.New(nil),
		local:    &localAddresses{name: opts.Interface, owner: opts.tableName(), netNS: opts.NetNS},
	}
	if opts.servers != nil {
		d.conn = opts.servers(d.conn)
	}
	if opts.routes != nil {
		d.local = opts.routes(d.local)
	}
	d.reconciler = reconcile.New(d, reconcile.Options[element, objectValue]{
		Equal: equalValues,
		Depth: func(e element) int {
			if e.set.kind == frontends || e.set.kind == routes {
				return 0
			}
			return 1
		},
		VerifyInterval: cmp.Or(opts.verifyInterval, verifyInterval), Drifted: d.observer.Drifted,
	})
	return d
}

func (d *dataplane) close() error {
	d.known = false
	d.local.close()
	return errors.Join(d.table.conn.Close(), d.conn.close())
}

// begin begins a pass: it creates the table and the interface, and reads the kernel.
func (d *dataplane) begin(ctx context.Context) (err error) {
	d.known, d.passing = false, true
	if err := d.local.open(); err != nil {
		return err
	}
	d.departing, d.kept = map[netip.Addr]map[serverID]bool{}, map[netip.Addr]bool{}
	d.leaving, d.awaited = map[serverID]bool{}, map[types.NamespacedName]bool{endOfPass: true}
	d.claims = newClaims()
	if d.opts.Stats {
		d.ports = map[serverID]servicePort{}
	}
	d.compared, d.checked, d.serverLost = 0, 0, false
	d.lists = sourcelists.New(d.planner.nodeAddrs)
	all, err := d.read(ctx, d.readTable)
	if err != nil {
		return err
	}
	d.findLists()
	if err := d.refuseWithoutServers(ctx, all); err != nil {
		return err
	}
	d.record(all, nil)
	return nil
}

// read reads the kernel. It returns the virtual servers, without their elements, and records
// everything else.
func (d *dataplane) read(ctx context.Context, readElements func(context.Context) (map[element]bool, error)) (map[serverID]*frontendState, error) {
	elements, err := readElements(ctx)
	if err != nil {
		return nil, err
	}
	routes, err := d.local.list()
	if err != nil {
		return nil, err
	}
	all := map[serverID]*frontendState{}
	err = d.readServers(ctx, func(id serverID, s *server) {
		if d.departing[id.Addr()][id] {
			return
		}
		f := newFrontend(id, s)
		if old := d.servers[id]; old != nil && slices.Equal(f.endpoints, old.endpoints) {
			f.endpoints = old.endpoints // frontends share the slice
			if slices.Equal(f.weights, old.weights) {
				f.weights = old.weights
			}
		}
		all[id] = f
	})
	if err == nil {
		d.elements, d.routes = elements, routes
	}
	return all, err
}

// readTable returns the elements of the table. If another program or another version of
// kpng has changed the table, readTable creates it again with the recorded elements. If
// there are no records, it uses the elements of the changed table. It never joins both,
// because some elements exclude each other.
func (d *dataplane) readTable(ctx context.Context) (map[element]bool, error) {
	elements, err := d.table.read(ctx)
	if errors.Is(err, errChanged) {
		if d.elements != nil {
			elements = maps.Clone(d.elements)
		}
		err = d.table.create(elements)
	}
	return elements, err
}

// startOver returns an error that requests a new pass.
func startOver(err error) error { return fmt.Errorf("%w (%w)", err, sink.ErrStartOver) }

// readServers calls found for the virtual servers of this instance. The kernel's listing may
// be incomplete. The function omitForeign finds a missing virtual server that a service
// needs. The function deleteServer finds a missing virtual server whose element is in the
// table.
func (d *dataplane) readServers(ctx context.Context, found func(serverID, *server)) error {
	servers, err := d.conn.list()
	if err != nil {
		return err
	}
	for id, s := range servers {
		if !d.owns(id, s) {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := d.conn.readDestinations(id, s); err != nil {
			return err
		}
		found(id, s)
		delete(servers, id) // so that the memory of its destinations is free
	}
	return nil
}

// owns reports whether a virtual server in the kernel belongs to this instance. A virtual
// server in the records belongs to the instance even if another program has changed its
// flags.
func (d *dataplane) owns(id serverID, s *server) bool {
	return s != nil && (s.flags&ownerMask == d.planner.owner || d.exists(id))
}

// exists reports whether a virtual server is in the records.
func (d *dataplane) exists(id serverID) bool { return d.servers[id] != nil && d.servers[id].exists }

// refuseWithoutServers removes the elements of the table that let packets pass to virtual
// servers that do not exist. These packets would reach programs of the node. Another
// program may have deleted the virtual servers while kpng did not run.
func (d *dataplane) refuseWithoutServers(ctx context.Context, all map[serverID]*frontendState) error {
	var remove []element
	for e := range d.elements {
		id, ok := d.awaits(e)
		if !ok || all[id] != nil {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s, err := d.conn.read(id) // the listing may have omitted it
		if err != nil {
			return err
		}
		if d.owns(id, s) {
			all[id] = newFrontend(id, s)
		} else {
			remove = append(remove, e)
		}
	}
	for chunk := range slices.Chunk(remove, d.table.maxElements) {
		if err := d.changeTable(chunk, nil); err != nil {
			return err
		}
	}
	return nil
}

// awaits returns the virtual server that must exist before the table may have e. If e needs
// no virtual server, the second result is false.
func (d *dataplane) awaits(e element) (serverID, bool) {
	if e.set.kind != frontends {
		return serverID{}, false
	}
	return e.server(), d.elements[addressElement(e.addr())] // whether the address was made local
}

// record adds the recorded elements to their frontends, and records the frontends. It
// also records those frontends of the argument kept that have no objects in the kernel.
func (d *dataplane) record(all, kept map[serverID]*frontendState) {
	for e := range d.elements {
		if e.set.kind.describesFrontend() {
			id := e.server()
			if all[id] == nil {
				all[id] = newFrontend(id, nil)
			}
			all[id].elements = append(all[id].elements, e)
		}
	}
	for id, f := range kept {
		if all[id] == nil && !f.exists && len(f.elements) == 0 {
			all[id] = f
		}
	}
	for id, f := range all {
		slices.SortFunc(f.elements, element.compare)
		// The Reconciler keeps equal records, so that all records must stay the same pointers.
		if old := d.servers[id]; old != nil && old.equal(f) {
			all[id] = old
		}
		if len(f.others) > 0 {
			d.leaving[id] = true
		}
	}
	d.servers = all
}

// List implements [reconcile.Dataplane].
func (d *dataplane) List(ctx context.Context, emit func(element, objectValue)) error {
	if !d.passing {
		d.failed = nil
		if err := d.conn.checkConntrack(); err != nil {
			return startOver(err) // a pass corrects the setting
		}
		all, err := d.read(ctx, d.readElements)
		if err != nil {
			return err
		}
		d.record(all, d.servers)
	}
	d.passing = false
	for id, f := range d.servers {
		emit(id.element(), objectValue{frontend: f})
	}
	for e := range d.elements {
		if e.set.kind != sources && !e.set.kind.describesFrontend() && !(e.set.kind == addresses && d.kept[e.addr()]) {
			emit(e.group(), objectValue{data: e.value})
		}
	}
	for addr, ok := range d.routes {
		if d.kept[addr] {
			continue
		}
		v := objectValue{}
		if !ok {
			v.data = "another source"
		}
		emit(routeObject(addr), v)
	}
	return nil
}

// routeObject returns the key of the route that makes an address local.
func routeObject(addr netip.Addr) element {
	return element{set: setOf(routes, addr), key: addrKey(addr)}
}

// follow copies the addresses of the machine from the argument next. It returns false if
// plans depend on addresses that have changed, so that a new pass is needed.
func (d *dataplane) follow(next planner) bool {
	p := &d.planner
	if !slices.Equal(p.nodePortAddrs, next.nodePortAddrs) || !slices.Equal(p.nodeAddrs, next.nodeAddrs) {
		return false
	}
	if slices.Equal(p.machineAddrs, next.machineAddrs) {
		return true
	}
	for id := range d.servers {
		if p.hasMachine(id.Addr()) != next.hasMachine(id.Addr()) {
			return false
		}
	}
	if slices.ContainsFunc(next.machineAddrs, p.isOtherNode) {
		return false // plans may have omitted this address because another node had it
	}
	p.machineAddrs = next.machineAddrs
	return true
}

// endOfPass stands for the end of a pass in dataplane.awaited.
var endOfPass types.NamespacedName

// sync programs the changes c. It returns the same errors as Sync of [sink.Sink].
func (d *dataplane) sync(ctx context.Context, c *sink.Changes) error {
	if c.First {
		if err := d.begin(ctx); err != nil {
			return err
		}
	}
	d.plans, d.failed = map[*api.View]*plan{}, nil
	d.edits, d.unsuitable = map[types.NamespacedName]*sourcelists.Change{}, map[types.NamespacedName]bool{}
	d.planServices(c)
	lists := slices.Collect(maps.Values(d.edits))
	err := d.writeLists()
	if err == nil {
		d.known = false
		err = d.reconciler.Sync(ctx, c)
	}
	failed, ok := sink.Acknowledged(err)
	for _, list := range lists {
		failed := !ok || failed[list.Service] != nil && d.edits[list.Service] != nil
		if list.End(failed); failed {
			delete(d.edits, list.Service)
		}
	}
	d.plans = nil
	if !ok {
		return err
	}
	// The frontends of the remaining services stay as they are.
	if err := d.changeInParts(rangesOf(d.edits)); err != nil {
		return startOver(err)
	}
	d.known, d.edits = true, nil
	for ch := range c.Services {
		delete(d.awaited, ch.Key)
	}
	if c.Last {
		delete(d.awaited, endOfPass)
	}
	for _, key := range slices.AppendSeq(slices.Clone(c.Failing), maps.Keys(failed)) {
		d.awaited[key] = true
	}
	if len(d.awaited) == 0 && d.lists.HasKept() {
		d.lists.EndPass()
	}
	if err := d.reapLists(context.Background(), maxUnused); err != nil {
		return err
	}
	d.observer.Holds("servers", len(d.servers))
	d.observer.Holds("elements", len(d.elements))
	for key, err := range failed {
		d.fail(key, err)
	}
	all := d.failed
	d.failed = nil
	return all.Err()
}

// planServices plans the delivered services.
func (d *dataplane) planServices(c *sink.Changes) {
	for ch := range c.Services {
		list := d.lists.Begin(ch.Key, ch.Old, ch.New)
		d.edits[ch.Key], d.unsuitable[ch.Key] = list, isUnsuitable(ch.New)
		d.failed.Do(ch.Key, func() error {
			p, err := d.planner.plan(ch.New, list.Number)
			if p == nil {
				return nil // Plan returns the error
			}
			d.plans[ch.New] = p
			d.claims.set(ch.Key, p, d.planner.nodePortAddrs)
			return err
		})
	}
	for ch := range c.Services {
		p := d.plans[ch.New]
		if p == nil {
			continue
		}
		for _, id := range d.claims.of[ch.Key] {
			if loser, ok := d.claims.addresses[id]; ok && d.claims.nodePorts[id] == ch.Key && d.edits[loser] == nil {
				d.fail(loser, d.claims.conflict(id))
			}
		}
		d.fail(ch.Key, errors.Join(d.claims.resolve(p), d.omitForeign(p)))
		if d.opts.Stats {
			for i := range p.frontends {
				d.ports[p.frontends[i].id] = servicePort{ch.Key, p.frontends[i].port}
			}
		}
	}
}

// fail records that a service fails. The objects of the service that were planned and
// programmed stay.
func (d *dataplane) fail(key types.NamespacedName, err error) {
	d.failed.Add(key, errors.Join(d.failed[key], err))
}

// errForeign means that a virtual server was created by another program.
var errForeign = errors.New("belongs to another program")

// omitForeign removes from p the frontends whose virtual servers belong to other
// programs. It returns an error that names these virtual servers.
func (d *dataplane) omitForeign(p *plan) error {
	var errs []error
	p.frontends = slices.DeleteFunc(p.frontends, func(f frontendPlan) bool {
		if d.exists(f.id) {
			return false
		}
		is, err := d.readFrontend(f.id)
		if errs = append(errs, err); err == nil && is.exists {
			d.servers[f.id] = is // the listing of the pass was incomplete
		}
		return err != nil
	})
	return errors.Join(errs...)
}

// readFrontend reads the virtual server of a frontend. The frontend has the recorded
// elements.
func (d *dataplane) readFrontend(id serverID) (*frontendState, error) {
	s, err := d.conn.read(id)
	if s != nil && !d.owns(id, s) {
		s, err = nil, fmt.Errorf("virtual server %s %w", id, errForeign)
	}
	f := newFrontend(id, s)
	if old := d.servers[id]; old != nil {
		f.elements = old.elements
	}
	return f, err
}

// Plan implements [reconcile.Dataplane]. If a service fails for another reason than its
// number of destinations, its plan has the other objects, and sync reports the failure.
func (d *dataplane) Plan(view *api.View, emit func(element, objectValue)) error {
	p := d.plans[view]
	if p == nil {
		var err error
		if p, err = d.planner.plan(view, func(f *nodeview.Frontend) uint32 { return d.lists.Of(view.Key(), f) }); p == nil {
			return err
		}
		d.claims.resolve(p)
		d.omitForeign(p)
	}
	for i := range p.frontends {
		f := &p.frontends[i]
		own := make([]element, 0, len(f.elements))
		for _, e := range f.elements {
			if e.set.kind.describesFrontend() {
				own = append(own, e)
			} else {
				emit(e.group(), objectValue{data: e.value})
			}
		}
		slices.SortFunc(own, element.compare)
		if f.local {
			emit(routeObject(f.id.Addr()), objectValue{})
		}
		emit(f.id.element(), objectValue{frontend: &frontendState{
			wanted: f.wanted, planned: true, exists: true, protocol: f.id.protocol, elements: own,
		}})
	}
	for _, e := range p.elements {
		emit(e.group(), objectValue{data: e.value})
	}
	return nil
}

// changeTable removes and adds elements of the table, in one transaction. If that fails
// and another program has changed the table, the error requests a new pass. If no program
// has changed the table, one of the elements causes the error.
func (d *dataplane) changeTable(remove, add []element) error {
	if len(remove)+len(add) == 0 {
		return nil
	}
	err := d.table.change(remove, add)
	d.observer.Wrote(len(remove)+len(add), err)
	if err != nil {
		elements, readErr := d.readElements(context.Background())
		if readErr == nil && !maps.Equal(elements, d.elements) {
			readErr = d.changed("table inet " + d.table.conn.Table)
		}
		return errors.Join(err, readErr)
	}
	for _, e := range remove {
		delete(d.elements, e)
	}
	for _, e := range add {
		d.elements[e] = true
	}
	return nil
}

// changeInParts removes and adds elements in transactions of limited size. The elements of
// one frontend are in one transaction, and so are all source ranges. If one of several
// transactions fails, the error requests a new pass.
func (d *dataplane) changeInParts(remove, add []element) error {
	if len(remove)+len(add) <= d.table.maxElements {
		return d.changeTable(remove, add)
	}
	groups := map[element][2][]element{}
	for i, list := range [...][]element{remove, add} {
		for _, e := range list {
			group := e.group()
			if e.set.kind == sources {
				group = element{}
			}
			changes := groups[group]
			changes[i] = append(changes[i], e)
			groups[group] = changes
		}
	}
	remove, add = nil, nil
	for i, group := range slices.SortedFunc(maps.Keys(groups), element.compare) {
		changes := groups[group]
		remove, add = append(remove, changes[0]...), append(add, changes[1]...)
		if len(remove)+len(add) < d.table.maxElements && i < len(groups)-1 {
			continue
		}
		if err := d.changeTable(remove, add); err != nil {
			d.known = false
			return startOver(err)
		}
		remove, add = nil, nil
	}
	return nil
}

// element returns the element of a virtual server in the set frontends.
func (id serverID) element() element {
	return element{set: setOf(frontends, id.Addr()), key: frontendKey(id)}
}

// cleanup deletes the virtual servers, the interface and the table of the instance. With
// Options.Drain, it first waits for connections.
func (d *dataplane) cleanup(ctx context.Context) error {
	if d.opts.Drain > 0 {
		if err := d.drain(ctx); err != nil {
			return err
		}
	}
	interfaceErr := d.local.delete()
	if interfaceErr != nil && !errors.Is(interfaceErr, errForeignInterface) {
		return interfaceErr // the addresses are still local, so they need the table and the virtual servers
	}
	if err := d.deleteServers(ctx); err != nil {
		// The remaining virtual servers need the table: it checks source ranges and masquerades.
		return errors.Join(interfaceErr, err)
	}
	return errors.Join(interfaceErr, d.table.conn.Delete(ctx))
}

// deleteServers deletes all virtual servers of the instance.
func (d *dataplane) deleteServers(ctx context.Context) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		servers, err := d.conn.list()
		if errors.Is(err, errNoIPVS) {
			return nil
		}
		if err != nil {
			return err
		}
		var errs []error
		deleted := 0
		for id, s := range servers {
			if d.owns(id, s) {
				errs = append(errs, d.conn.delete(id))
				deleted++
			}
		}
		// A listing may be incomplete, so list again until nothing is found.
		if err := errors.Join(errs...); err != nil || deleted == 0 {
			return err
		}
	}
}
