// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/healthport"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// planner computes the kernel objects that services need. Its results depend only on its
// fields and arguments.
type planner struct {
	scheduler, annotation string
	// owner identifies the instance in the flags of its virtual servers.
	owner uint32
	// healthzPort is the port of the program's own health checks, or 0.
	healthzPort uint16
	// nodePortAddrs are the addresses of node ports. machineAddrs are all addresses of the
	// machine, sorted. An external or load-balancer IP of a service may be an address of the
	// machine.
	nodePortAddrs, machineAddrs []netip.Addr
	// nodeAddrs are the node's addresses. Source ranges may contain them.
	nodeAddrs []netip.Addr
	// nodeNetworks are prefixes that contain the addresses of all nodes. External and
	// load-balancer IPs that are addresses of other nodes have no frontends.
	nodeNetworks []netip.Prefix
}

// hasMachine reports whether a is an address of the machine.
func (p *planner) hasMachine(a netip.Addr) bool {
	_, has := slices.BinarySearchFunc(p.machineAddrs, a, netip.Addr.Compare)
	return has
}

// isOtherNode reports whether a is an address of another node.
func (p *planner) isOtherNode(a netip.Addr) bool {
	return !p.hasMachine(a) && slices.ContainsFunc(p.nodeNetworks, func(n netip.Prefix) bool { return n.Contains(a) })
}

// firstNodePortAddr returns an address of node ports of a family.
func (p *planner) firstNodePortAddr(family api.Family) (netip.Addr, bool) {
	i := slices.IndexFunc(p.nodePortAddrs, func(a netip.Addr) bool { return api.FamilyOf(a) == family && !a.IsLoopback() })
	if i < 0 {
		return netip.Addr{}, false
	}
	return p.nodePortAddrs[i], true
}

// plan has the kernel objects that a service needs.
type plan struct {
	frontends []frontendPlan
	// elements are the elements that belong to no frontend: hairpins and health checks.
	// They are sorted.
	elements []element
}

// frontendPlan has the kernel objects that a frontend needs. A node port has one
// frontendPlan for each address of node ports.
type frontendPlan struct {
	id   serverID
	kind nodeview.Kind
	port string // the name of the service port
	// local is true if the instance has to make the address local. External and
	// load-balancer IPs may be addresses of the machine, which are local already.
	local bool
	wanted
	elements []element
}

// wanted is the wanted state of a virtual server.
type wanted struct {
	settings
	// endpoints has the endpoints that get new connections, sorted. For UDP, the
	// field existing has all endpoints to which flows may continue, sorted. Frontends with the
	// same endpoints share the Go slices.
	endpoints, existing []netip.AddrPort
	// resets says which TCP connections end. It is empty if no connections end.
	resets nodeview.Existing
	// weights has the weights of endpoints, or is nil if all are 1.
	weights []uint32
	// A new virtual server gets the scheduler fallback if the kernel lacks the scheduler
	// in settings. fallback may be empty.
	fallback string
}

// weight returns the weight of endpoints[i].
func (w *wanted) weight(i int) uint32 {
	if w.weights == nil {
		return 1
	}
	return w.weights[i]
}

// weighted maps a scheduler that ignores weights to the scheduler that replaces it if
// weights differ. The scheduler sh has 256 entries, and an endpoint of weight w would
// take w of them, so sh gets no weights.
var weighted = map[string]string{"rr": "wrr", "lc": "wlc"}

// keeps reports whether existing connections to a destination continue after the
// destination stops getting new connections. UDP flows to a removed endpoint end. TCP
// connections end if the service requests that. Without a destination, IPVS forgets a
// connection at the next packet of its client, and the kernel answers that packet with a
// reset.
func (w *wanted) keeps(at netip.AddrPort, p api.Protocol) bool {
	if p != api.UDP {
		return !w.resets.Resets(at)
	}
	_, exists := slices.BinarySearchFunc(w.existing, at, netip.AddrPort.Compare)
	return exists
}

// maxDestinations is the maximum number of destinations of a service. Virtual servers do
// not share destinations. Package cluster limits only addresses × ports and endpoints ×
// ports.
const maxDestinations = 1_000_000

// plan returns the plan for view. If view is nil, the plan is empty. If IPVS cannot serve
// the service, the plan has only the health checks of its load-balancer IPs. The function
// listOf returns the number of the list with the source ranges of a frontend. If the
// service needs more than maxDestinations, plan returns an error and no plan. Other
// errors name the missing parts of the plan, or an invalid scheduler, which the default
// scheduler replaces.
func (p *planner) plan(view *api.View, listOf func(*nodeview.Frontend) uint32) (*plan, error) {
	out := &plan{}
	if view == nil {
		return out, nil
	}
	var err error
	scheduler := cmp.Or(view.Service.Annotations[p.annotation], p.scheduler)
	if !schedulerName.MatchString(scheduler) {
		err = fmt.Errorf("annotation %s: %q is not the name of a scheduler", p.annotation, scheduler)
		scheduler = p.scheduler
	}
	lists := endpointLists{sorted: map[nodeview.ListID]endpointList{}, existing: map[nodeview.Existing][]netip.AddrPort{}}
	destinations := 0
	without := isUnsuitable(view)
	for f := range nodeview.Frontends(view) {
		external := f.Kind == nodeview.ExternalIP || f.Kind == nodeview.LoadBalancerIP
		if f.Kind == nodeview.LoadBalancerIP && !p.hasMachine(f.Addr) && !p.isOtherNode(f.Addr) {
			out.elements = append(out.elements, p.healthCheck(f.Addr, view.Service)...)
		}
		if without {
			continue
		}
		w := wanted{settings: settings{scheduler: scheduler, flags: p.owner | fallbackFlag(scheduler)}}
		if w.endpoints, w.weights = lists.of(&f); w.weights != nil && weighted[scheduler] != "" {
			w.scheduler, w.fallback = weighted[scheduler], scheduler
		} else if scheduler == "sh" {
			w.weights = nil
		}
		if f.Protocol == api.UDP {
			w.existing = lists.existingOf(f.Existing)
		} else if f.Protocol == api.TCP && view.Service.ResetConnections {
			w.resets = f.Existing
		}
		var list uint32
		if f.Sources.Restricted {
			list = listOf(&f)
		}
		for at := range f.At(p.nodePortAddrs) {
			if a := at.Addr(); !a.IsLoopback() && !(external && p.isOtherNode(a)) {
				if destinations += len(w.endpoints); destinations > maxDestinations {
					return nil, fmt.Errorf("IPVS would need more than %d destinations, the product of addresses, ports and endpoints", maxDestinations)
				}
				id := serverID{at, f.Protocol}
				fp := frontendPlan{id: id, kind: f.Kind, port: f.ServicePort.Name, wanted: w, elements: elements(id, &f)}
				if f.Sources.Restricted {
					fp.elements = append(fp.elements, element{set: setOf(restricted, a), key: frontendKey(id), value: string(nft.Native(list))})
				}
				fp.local = f.Kind == nodeview.ClusterIP || external && !p.hasMachine(a)
				if fp.local {
					fp.elements = append(fp.elements, addressElement(a))
				}
				out.frontends = append(out.frontends, fp)
			}
		}
	}
	if !without {
		for protocol, e := range nodeview.Hairpins(view) {
			out.elements = append(out.elements, element{set: setOf(hairpins, e.Addr), key: addrKey(e.Addr) + frontendKey(serverID{e.AddrPort(), protocol})})
		}
	}
	slices.SortFunc(out.elements, element.compare)
	out.elements = slices.Compact(out.elements)
	return out, err
}

// endpointLists has the lists of endpoints of a view. Frontends share them.
type endpointLists struct {
	sorted   map[nodeview.ListID]endpointList
	existing map[nodeview.Existing][]netip.AddrPort
}

// endpointList has the endpoints that get new connections, and their weights, like the
// type wanted.
type endpointList struct {
	endpoints []netip.AddrPort
	weights   []uint32
}

// of returns the endpoints of a frontend that get new connections, and their weights.
func (l *endpointLists) of(f *nodeview.Frontend) ([]netip.AddrPort, []uint32) {
	all, ok := l.sorted[f.Elsewhere.List]
	if !ok {
		weights := make(map[netip.AddrPort]uint32, len(f.Elsewhere.Endpoints))
		first, differ := uint32(0), false
		for _, t := range f.Elsewhere.Endpoints {
			w := uint32(cmp.Or(t.Weight, api.DefaultWeight))
			first = cmp.Or(first, w)
			differ = differ || w != first
			weights[t.AddrPort()] = w
		}
		all.endpoints = slices.SortedFunc(maps.Keys(weights), netip.AddrPort.Compare)
		if differ {
			all.weights = weightsOf(all.endpoints, func(at netip.AddrPort) uint32 { return weights[at] })
		}
		l.sorted[f.Elsewhere.List] = all
	}
	return all.endpoints, all.weights
}

// weightsOf returns the weights of endpoints, or nil if all are 1.
func weightsOf(endpoints []netip.AddrPort, weight func(netip.AddrPort) uint32) []uint32 {
	weights, differ := make([]uint32, len(endpoints)), false
	for i, at := range endpoints {
		weights[i] = weight(at)
		differ = differ || weights[i] != 1
	}
	if !differ {
		return nil
	}
	return weights
}

// existingOf returns the endpoints to which existing flows may continue, sorted.
func (l *endpointLists) existingOf(x nodeview.Existing) []netip.AddrPort {
	all, ok := l.existing[x]
	if !ok {
		for t := range x.All() {
			all = append(all, t.AddrPort())
		}
		l.existing[x] = all
	}
	return all
}

// elements returns the elements of the table for the frontend f, except the element for its
// source ranges.
func elements(id serverID, f *nodeview.Frontend) []element {
	key := frontendKey(id)
	elements := []element{{set: setOf(frontends, id.Addr()), key: key}}
	add := func(kind setKind) { elements = append(elements, element{set: setOf(kind, id.Addr()), key: key}) }
	if f.Kind == nodeview.ClusterIP {
		elements = append(elements, element{set: setOf(clusterIPs, id.Addr()), key: addrKey(id.Addr())})
	}
	switch f.Elsewhere.Verdict {
	case nodeview.Reject:
		add(rejects)
	case nodeview.Drop:
		add(drops)
	}
	if f.Masquerade == nodeview.MasqueradeAll {
		add(masquerades)
	}
	return elements
}

// healthCheck returns the element for the health checks that a load balancer sends to
// the address a. The element changes the destination to an address of node ports.
func (p *planner) healthCheck(a netip.Addr, s *api.Service) []element {
	port := cmp.Or(uint16(healthport.Of(s)), p.healthzPort)
	to, ok := p.firstNodePortAddr(api.FamilyOf(a))
	if port == 0 || !ok {
		return nil
	}
	key := frontendKey(serverID{netip.AddrPortFrom(a, port), api.TCP})
	return []element{{set: setOf(healthChecks, a), key: key, value: addrKey(to) + portKey(port)}}
}

// index returns the index of an endpoint in w.endpoints, and whether the endpoint is
// there.
func (w *wanted) index(at netip.AddrPort) (int, bool) {
	return slices.BinarySearchFunc(w.endpoints, at, netip.AddrPort.Compare)
}

// claims are the services with frontends at the addresses of node ports. An external or
// load-balancer IP of a service may be an address of the node, and its port may be a node
// port. Then the node port wins, and the service that loses the frontend fails. All other
// conflicts are resolved before Sync, so the frontend belongs to the service that was
// delivered last.
type claims struct {
	nodePorts, addresses map[serverID]types.NamespacedName
	of                   map[types.NamespacedName][]serverID
}

func newClaims() claims {
	return claims{map[serverID]types.NamespacedName{}, map[serverID]types.NamespacedName{}, map[types.NamespacedName][]serverID{}}
}

// set records the plan of a service.
func (c *claims) set(key types.NamespacedName, p *plan, nodePortAddrs []netip.Addr) {
	for _, id := range c.of[key] {
		for _, claimed := range []map[serverID]types.NamespacedName{c.nodePorts, c.addresses} {
			if claimed[id] == key {
				delete(claimed, id)
			}
		}
	}
	delete(c.of, key)
	for i := range p.frontends {
		f := &p.frontends[i]
		if f.kind == nodeview.ClusterIP || !slices.Contains(nodePortAddrs, f.id.Addr()) {
			continue
		}
		c.of[key] = append(c.of[key], f.id)
		if f.kind == nodeview.NodePort {
			c.nodePorts[f.id] = key
		} else {
			c.addresses[f.id] = key
		}
	}
}

// conflict returns the error of a service that loses a frontend to a node port.
func (c *claims) conflict(id serverID) error {
	return fmt.Errorf("%s: service %s has the same address and port as %s", id, c.nodePorts[id], nodeview.NodePort)
}

// resolve removes from p the frontends that belong to node ports. It returns an error
// that names these frontends.
func (c *claims) resolve(p *plan) error {
	var errs []error
	p.frontends = slices.DeleteFunc(p.frontends, func(f frontendPlan) bool {
		_, taken := c.nodePorts[f.id]
		if taken = taken && f.kind != nodeview.NodePort; taken {
			errs = append(errs, c.conflict(f.id))
		}
		return taken
	})
	return errors.Join(errs...)
}
