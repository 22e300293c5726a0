// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// dataplane programs the kernel and records what it has programmed. Calls must not overlap.
//
// Its records have what the kernel listed at the beginning of a pass, and the changes
// since then. dataplane compares the plan of a changed service with these records. It
// reads a virtual server from the kernel only after an error, or if the records lack it.
type dataplane struct {
	opts     *Options
	observer backends.Observer
	planner  planner
	conn     virtualServers
	nft      *netfilter.Conn
	table    *table // nil until the first pass
	local    localRoutes

	// known is true if the fields servers, elements and routes describe the kernel.
	known bool
	// servers are the virtual servers of this instance. Their flags identify the instance.
	servers map[serverID]*server
	// The field elements has the elements of the table, and routes has the local addresses as
	// localAddresses.list returns them.
	elements map[element]bool
	routes   map[netip.Addr]bool

	// lists are the lists of source ranges.
	lists *sourcelists.Lists
	// plans are the plans of the services that were delivered since the pass began. The
	// fields refs and claims are computed from the plans: refs counts the uses of each
	// element, and claims has the service of each frontend. No frontend is in two plans.
	plans  map[types.NamespacedName]*plan
	refs   map[element]int
	claims map[serverID]claim
	// unused are elements that no plan needs. They wait for deletion, together with their
	// virtual servers and local addresses.
	unused map[element]bool
	// earlier are elements that the table had when the pass began, by group. When a service
	// is delivered, the elements in the groups of its plan become unused, except those that
	// the plan needs.
	earlier map[element][]element
	// leaving are virtual servers with destinations that get no new connections.
	leaving map[serverID]bool
	// unchecked are the virtual servers that the current comparison has yet to check.
	unchecked []serverID
	// compared is the generation of nf_tables in which compareTable found the table equal to
	// the records, or 0. The field interrupted counts the consecutive comparisons of the
	// table that were interrupted.
	compared    uint32
	interrupted int
	// checked is the generation of nf_tables in which checkLoss found the table.
	checked uint32
	// leftovers records whether the last pass kept unused elements because services failed.
	leftovers kernelnode.Leftovers
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

// claim is a frontend of a service.
type claim struct {
	service types.NamespacedName
	*frontendPlan
}

func newDataplane(opts *Options) *dataplane {
	opts.Observer = backendoptions.Observe(opts.Observer)
	return &dataplane{
		opts: opts,
		planner: planner{
			scheduler: opts.Scheduler, annotation: opts.SchedulerAnnotation,
			owner: owner(opts.tableName()), healthzPort: opts.HealthzPort, nodeNetworks: opts.NodeNetworks,
		},
		observer: opts.Observer,
		conn:     &conn{netNS: opts.NetNS},
		nft:      netfilter.NewConn(opts.NetNS),
		lists:    sourcelists.New(nil),
		local:    &localAddresses{name: opts.Interface, owner: opts.tableName(), netNS: opts.NetNS},
	}
}

func (d *dataplane) close() error {
	d.known = false
	d.local.close()
	return errors.Join(d.nft.Close(), d.conn.close())
}

// begin begins a pass. It creates the table and the interface and reads the kernel.
func (d *dataplane) begin(ctx context.Context) (err error) {
	d.known = false
	if err := d.local.open(); err != nil {
		return err
	}
	if d.table == nil {
		if d.table, err = newTable(d.opts, socketBuffer); err != nil {
			return err
		}
	}
	elements, err := d.readTable(ctx)
	if err != nil {
		return err
	}
	if d.routes, err = d.local.list(); err != nil {
		return err
	}
	if d.servers, err = d.readServers(ctx); err != nil {
		return err
	}
	d.elements = elements
	d.plans, d.refs, d.claims = map[types.NamespacedName]*plan{}, map[element]int{}, map[serverID]claim{}
	d.unused, d.earlier, d.leaving = map[element]bool{}, map[element][]element{}, map[serverID]bool{}
	d.unchecked, d.compared, d.checked, d.interrupted = nil, 0, 0, 0
	d.lists = sourcelists.New(d.planner.nodeAddrs)
	for e := range elements {
		if group := e.group(); group != e {
			d.earlier[group] = append(d.earlier[group], e)
		}
	}
	d.findLists()
	if err := d.refuseWithoutServers(ctx); err != nil {
		return err
	}
	d.known = true
	return nil
}

// refuseWithoutServers removes the elements of the table that let packets pass to virtual
// servers that do not exist. These packets would reach programs of the node. Another
// program may have deleted the virtual servers while kpng did not run.
func (d *dataplane) refuseWithoutServers(ctx context.Context) error {
	var remove []element
	for e := range d.elements {
		if !d.awaitsServer(e, nil) {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		id := e.server()
		if e.set.kind == redirects {
			id = e.target()
		}
		s, err := d.conn.read(id) // the listing may have omitted it
		if err != nil {
			return err
		}
		if d.owns(id, s) {
			d.servers[id] = s
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

// readTable returns the elements of the table. If another program or another version of
// kpng has changed the table, readTable creates it again with the recorded elements. Only
// without records, it uses the elements of the changed table. A union of both could
// contain elements that exclude each other.
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
	for id, c := range d.claims {
		external := c.kind == nodeview.ExternalIP || c.kind == nodeview.LoadBalancerIP
		if external && p.hasMachine(id.Addr()) != next.hasMachine(id.Addr()) {
			return false
		}
	}
	if slices.ContainsFunc(next.machineAddrs, p.isOtherNode) {
		return false // plans may have omitted this address as that of another node
	}
	p.machineAddrs = next.machineAddrs
	return true
}

// readServers returns the virtual servers of this instance. The kernel's listing may be
// incomplete. The function omitForeign finds a missing virtual server that a service
// needs. The function deleteServer finds one whose element is in the table.
func (d *dataplane) readServers(ctx context.Context) (map[serverID]*server, error) {
	servers, err := d.conn.list()
	if err != nil {
		return nil, err
	}
	for id, s := range servers {
		if !d.owns(id, s) {
			delete(servers, id)
			continue
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := d.conn.readDestinations(id, s); err != nil {
			return nil, err
		}
	}
	return servers, nil
}

// owns reports whether a virtual server in the kernel belongs to this instance. A virtual
// server in the records belongs to the instance even if another program has changed its
// flags.
func (d *dataplane) owns(id serverID, s *server) bool {
	return s != nil && (s.flags&ownerMask == d.planner.owner || d.servers[id] != nil)
}

// element returns the element of a virtual server in the set frontends.
func (id serverID) element() element {
	return element{set: setOf(frontends, id.Addr()), key: frontendKey(id)}
}

// sync programs the changes c. Its errors are those of Sync in [sink.Sink].
//
// Its steps interrupt no traffic. The instance makes an address local after the virtual
// servers and the table's elements of this address exist. At such an address, the table
// accepts packets to a frontend only while the frontend's virtual server exists.
// Otherwise the table refuses these packets, because they would reach programs of the
// node. The table always refuses packets to other ports of such an address. Other
// frontends have addresses that belong to the machine, and the table does not refuse
// packets to other ports of these addresses. Therefore sync adds the elements of such a
// frontend before its virtual server, and deletes the elements after the virtual server.
// In the opposite order, IPVS would forward connections that source ranges exclude.
func (d *dataplane) sync(c *sink.Changes) error {
	var failed sink.Failed
	plans := map[types.NamespacedName]*plan{}
	var lists []*sourcelists.Change
	for ch := range c.Services {
		list := d.lists.Begin(ch.Key, ch.Old, ch.New)
		lists = append(lists, list)
		failed.Do(ch.Key, func() error {
			p, err := d.planner.plan(ch.New, list.Number)
			if p == nil {
				return err
			}
			err = errors.Join(err, d.omitForeign(p))
			plans[ch.Key] = p
			return err
		})
	}
	d.resolveConflicts(plans, &failed)
	err := d.writeLists()
	if err == nil {
		err = d.addElements(plans, lists)
	}
	for _, list := range lists {
		list.End(err != nil || plans[list.Service] == nil)
	}
	if err != nil {
		return err
	}
	for ch := range c.Services {
		if ch.New == nil {
			delete(d.plans, ch.Key)
		}
	}
	for key, p := range plans {
		failed.Do(key, func() error { return errors.Join(failed[key], d.programServers(p)) })
	}
	if err := d.acceptPackets(plans); err != nil {
		return err
	}
	for key, p := range plans {
		failed.Do(key, func() error { return errors.Join(failed[key], d.addAddresses(p)) })
	}
	if c.Last {
		d.endPass(slices.AppendSeq(slices.Clone(c.Failing), maps.Keys(failed)))
	}
	if err := errors.Join(d.deleteUnused(), d.reapLists(context.Background(), maxUnused)); err != nil {
		return err
	}
	if c.Last {
		d.leftovers.RecordPass(time.Now(), d.leftovers.Exist)
		if len(failed)+len(c.Failing) == 0 {
			d.observer.Drifted(false)
		}
	}
	d.observer.Holds("servers", len(d.servers))
	d.observer.Holds("elements", len(d.elements))
	return failed.Err()
}

// resolveConflicts leaves each frontend in the plan of one service. An external or
// load-balancer IP of a service may be an address of the node, and its port may be a node
// port. Then the node port wins, and the service that loses the frontend fails. All other
// conflicts are resolved before Sync, so the frontend belongs to the service that was
// delivered last. If a service that is not in plans loses a frontend, resolveConflicts
// adds the service's new plan to plans.
func (d *dataplane) resolveConflicts(plans map[types.NamespacedName]*plan, failed *sink.Failed) {
	others := map[types.NamespacedName]*plan{}
	for _, p := range plans {
		for i := range p.frontends {
			if c, ok := d.claims[p.frontends[i].id]; ok && plans[c.service] == nil && others[c.service] == nil {
				other := *d.plans[c.service]
				other.frontends = slices.Clone(other.frontends)
				others[c.service] = &other
			}
		}
	}
	winners := map[serverID]claim{}
	conflicts := map[types.NamespacedName][]error{}
	for _, nodePorts := range []bool{true, false} {
		for _, group := range []map[types.NamespacedName]*plan{plans, others} {
			for key, p := range group {
				p.frontends = slices.DeleteFunc(p.frontends, func(f frontendPlan) bool {
					if (f.kind == nodeview.NodePort) != nodePorts {
						return false
					}
					winner, taken := winners[f.id]
					if !taken {
						winners[f.id] = claim{key, &f}
					} else if !nodePorts && winner.kind == nodeview.NodePort {
						err := fmt.Errorf("%s %s: service %s has the same address and port as %s", f.kind, f.id, winner.service, winner.kind)
						conflicts[key] = append(conflicts[key], err)
					}
					return taken
				})
			}
		}
	}
	for key, errs := range conflicts {
		failed.Add(key, errors.Join((*failed)[key], errors.Join(errs...)))
	}
	maps.Copy(plans, others)
}

// errForeign is an error for a virtual server of another program.
func errForeign(id serverID) error {
	return fmt.Errorf("virtual server %s belongs to another program", id)
}

// omitForeign removes from p the frontends whose virtual servers belong to other
// programs. It returns an error that names these virtual servers.
func (d *dataplane) omitForeign(p *plan) error {
	var errs []error
	p.frontends = slices.DeleteFunc(p.frontends, func(f frontendPlan) bool {
		if d.servers[f.id] != nil {
			return false
		}
		s, err := d.conn.read(f.id)
		switch {
		case err != nil || s == nil:
		case d.owns(f.id, s):
			d.servers[f.id] = s // the listing of the pass was incomplete
		default:
			err = errForeign(f.id)
		}
		errs = append(errs, err)
		return err != nil
	})
	return errors.Join(errs...)
}

// addElements adds the elements of plans and the changes of lists of source ranges to the
// table, and records the plans. It omits elements that await a virtual server. If it fails,
// it has changed nothing, or it requests a new pass.
func (d *dataplane) addElements(plans map[types.NamespacedName]*plan, lists []*sourcelists.Change) error {
	delta := map[element]int{}
	groups := map[element]bool{}
	for key, p := range plans {
		for e := range p.all() {
			delta[e]++
			groups[e.group()] = true
		}
		for e := range d.plans[key].all() {
			delta[e]--
		}
	}
	for group := range groups {
		for _, e := range d.earlier[group] {
			delta[e] += 0 // adds the key e, so e becomes unused unless the new plan needs it
		}
	}
	for e := range d.unused {
		if e.set.kind == restricted && groups[e.group()] {
			delta[e] += 0 // its frontend may get another list
		}
	}
	var remove, add []element
	for _, list := range lists {
		if plans[list.Service] != nil {
			remove, add = append(remove, sourceElements(list.Remove)...), append(add, sourceElements(list.Add)...)
		}
	}
	for e, n := range delta {
		await := d.awaitsServer(e, delta)
		needed := d.refs[e]+n > 0 && !await
		switch {
		case needed == d.elements[e]:
		case needed:
			add = append(add, e)
		case await, e.set.kind == redirects, e.set.kind == healthChecks:
			remove = append(remove, e) // another element may get its key
		case e.set.kind == restricted && d.refs[e.group()]+delta[e.group()] > 0:
			remove = append(remove, e) // the frontend gets another list, or admits all sources
		}
	}
	if err := d.changeInParts(remove, add); err != nil {
		return err
	}
	for e, n := range delta {
		if d.refs[e] += n; d.refs[e] > 0 {
			delete(d.unused, e)
		} else {
			delete(d.refs, e)
			d.unused[e] = true
		}
	}
	d.record(plans)
	return nil
}

// awaitsServer reports whether the table must not have e because the virtual server to
// which e leads does not exist. The argument delta has the elements that are added
// together with e.
func (d *dataplane) awaitsServer(e element, delta map[element]int) bool {
	switch e.set.kind {
	case frontends:
		address := addressElement(e.addr())
		madeLocal := d.elements[address] || delta[address] > 0
		return madeLocal && d.servers[e.server()] == nil
	case redirects:
		return d.servers[e.target()] == nil // the table would not refuse the redirected packets
	default:
		return false
	}
}

// record records plans and their frontends.
func (d *dataplane) record(plans map[types.NamespacedName]*plan) {
	for key := range plans {
		if old := d.plans[key]; old != nil {
			for i := range old.frontends {
				delete(d.claims, old.frontends[i].id)
				delete(d.leaving, old.frontends[i].id)
			}
		}
	}
	for key, p := range plans {
		for i := range p.frontends {
			d.claims[p.frontends[i].id] = claim{key, &p.frontends[i]}
		}
		d.plans[key] = p
	}
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
		return errors.Join(err, d.compareTable(context.Background()))
	}
	for _, e := range remove {
		delete(d.elements, e)
	}
	for _, e := range add {
		d.elements[e] = true
	}
	return nil
}

// changeInParts removes and adds elements in transactions of limited size. Elements that
// describe one frontend, and all source ranges, change together. If one of several
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
			return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
		}
		remove, add = nil, nil
	}
	return nil
}

// programServers programs the virtual servers of a service. If one virtual server fails,
// programServers programs the others anyway.
func (d *dataplane) programServers(p *plan) error {
	var errs []error
	for i := range p.frontends {
		errs = append(errs, d.programServer(p.frontends[i].id))
	}
	return errors.Join(errs...)
}

// acceptPackets adds an element of a plan if the element's virtual server exists now, and
// removes the element if its virtual server does not exist any more.
func (d *dataplane) acceptPackets(plans map[types.NamespacedName]*plan) error {
	var remove, add []element
	for _, p := range plans {
		for e := range p.all() {
			switch await := d.awaitsServer(e, nil); {
			case !await && !d.elements[e]:
				add = append(add, e)
			case await && d.elements[e]:
				remove = append(remove, e)
			}
		}
	}
	return d.changeInParts(remove, add)
}

// addAddresses makes the addresses of a service local if their virtual servers exist.
func (d *dataplane) addAddresses(p *plan) error {
	var errs []error
	for i := range p.frontends {
		f := &p.frontends[i]
		if addr := f.id.Addr(); f.local && !d.routes[addr] && d.servers[f.id] != nil {
			err := d.local.add(addr)
			switch {
			case err == nil:
				d.routes[addr] = true
			case d.local.lost():
				err = errors.Join(err, d.changed("interface "+d.opts.Interface)) // a pass repairs the interface
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// programServer brings a virtual server to its wanted state. If the kernel's error shows
// that another program has changed the virtual server, programServer reads the virtual
// server and tries again.
func (d *dataplane) programServer(id serverID) error {
	err := d.tryServer(id)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) {
		s, readErr := d.conn.read(id)
		if readErr != nil {
			return errors.Join(err, readErr)
		}
		if s != nil && !d.owns(id, s) {
			return errForeign(id)
		}
		d.setServer(id, s)
		err = d.tryServer(id)
	}
	return err
}

// setServer records the state of a virtual server in the kernel. If s is nil, the virtual
// server does not exist.
func (d *dataplane) setServer(id serverID, s *server) {
	d.servers[id] = s
	if s == nil {
		delete(d.servers, id)
	}
}

func (d *dataplane) tryServer(id serverID) error {
	w, s := d.claims[id].wanted, d.servers[id]
	var errs []error
	if s == nil || s.settings != w.settings {
		if err := d.conn.set(id, s == nil, w.settings); err != nil {
			if s == nil {
				return err
			}
			errs = append(errs, err) // continue, because the virtual server still needs its endpoints
		} else {
			if s == nil {
				s = &server{destinations: map[netip.AddrPort]destination{}}
				d.servers[id] = s
			}
			s.settings = w.settings
		}
	}
	for _, at := range w.endpoints {
		if to, ok := s.destinations[at]; !ok || to.edited || to.weight != weight {
			errs = append(errs, d.setDestination(id, s, at, weight))
		}
	}
	for at, to := range s.destinations {
		switch {
		case w.has(at):
		case !w.keeps(at, id.protocol):
			err := d.conn.deleteDestination(id, at)
			if err == nil {
				delete(s.destinations, at)
			}
			errs = append(errs, err)
		default:
			d.leaving[id] = true
			if to.weight != 0 {
				errs = append(errs, d.setDestination(id, s, at, 0))
			}
		}
	}
	return errors.Join(errs...)
}

// weight is the weight of endpoints that get new connections.
const weight = 1

func (d *dataplane) setDestination(id serverID, s *server, at netip.AddrPort, weight uint32) error {
	to, ok := s.destinations[at]
	if err := d.conn.setDestination(id, at, !ok, weight); err != nil {
		return err
	}
	to.weight, to.edited = weight, false
	s.destinations[at] = to
	return nil
}

// endPass marks as unused everything that no delivered service needs. It marks nothing if
// one of the failing services has no plan, because that service may still need something.
func (d *dataplane) endPass(failing []types.NamespacedName) {
	d.leftovers.Exist = slices.ContainsFunc(failing, func(key types.NamespacedName) bool { return d.plans[key] == nil })
	if d.leftovers.Exist {
		return
	}
	d.earlier = nil
	d.lists.EndPass()
	mark := func(e element) {
		if d.refs[e] == 0 && e.set.kind != sources {
			d.unused[e] = true
		}
	}
	for e := range d.elements {
		mark(e)
	}
	for id := range d.servers {
		mark(id.element())
	}
	for addr := range d.routes {
		mark(addressElement(addr))
	}
}

// deleteUnused deletes unused elements with their virtual servers and addresses. Elements
// that it cannot delete stay in d.unused. The comment of sync explains why deleteUnused
// deletes some virtual servers before their elements, and others after their elements.
func (d *dataplane) deleteUnused() error {
	var errs []error
	kept := map[element]bool{}  // groups that could not be deleted
	var before, after []element // frontends whose virtual servers are deleted before or after the elements
	for e := range d.unused {
		switch {
		case e.set.kind == addresses && d.hasRoute(e.addr()):
			if err := d.local.remove(e.addr()); err != nil {
				errs, kept[e] = append(errs, err), true
				continue
			}
			delete(d.routes, e.addr())
		case e.set.kind == frontends && d.elements[addressElement(e.addr())]:
			after = append(after, e)
		case e.set.kind == frontends:
			before = append(before, e)
		}
	}
	deleteServers := func(list []element) {
		for _, e := range list {
			if err := d.deleteServer(e.server()); err != nil {
				errs, kept[e] = append(errs, err), true
			}
		}
	}
	deleteServers(before)
	var remove []element
	for e := range d.unused {
		if d.elements[e] && !kept[e.group()] {
			remove = append(remove, e)
		}
	}
	slices.SortFunc(remove, element.compare) // frontends first
	for chunk := range slices.Chunk(remove, d.table.maxElements) {
		if err := d.changeTable(chunk, nil); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
	deleteServers(after)
	maps.DeleteFunc(d.unused, func(e element, _ bool) bool { return !kept[e.group()] })
	return errors.Join(errs...)
}

// hasRoute reports whether the instance has made an address local, with any source.
func (d *dataplane) hasRoute(addr netip.Addr) bool {
	_, ok := d.routes[addr]
	return ok
}

// deleteServer deletes a virtual server of this instance if it exists. If the pass's
// listing has omitted it, deleteServer reads it from the kernel.
func (d *dataplane) deleteServer(id serverID) error {
	if d.servers[id] == nil {
		if s, err := d.conn.read(id); err != nil || !d.owns(id, s) {
			return err
		}
	}
	if err := d.conn.delete(id); err != nil {
		return err
	}
	delete(d.servers, id)
	return nil
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
	t, err := newTable(d.opts, socketBuffer)
	if err == nil {
		err = t.delete()
	}
	return errors.Join(interfaceErr, err)
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
