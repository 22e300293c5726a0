// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/hns"
)

// holdings is the state of HNS as far as the backend knows it: the last listing, updated
// with the backend's later writes.
type holdings struct {
	// name is the name of this backend. The names of the backend's endpoints begin with this
	// name.
	name       string
	endpoints  map[string]hns.Endpoint
	byAddr     map[netip.Addr][]string // endpoint IDs, the preferred ID first
	balancers  map[string]hns.LoadBalancer
	byFrontend map[frontend][]string // sorted IDs of load balancers, usually only one ID
	// endpointUses counts the load balancers of each endpoint, by the endpoint's ID. vipUses
	// counts the load balancers of each VIP. Both maps also count load balancers that this
	// backend does not own.
	endpointUses map[string]int
	vipUses      map[netip.Addr]int
	// idle contains the IDs of this backend's endpoints that no load balancer uses.
	idle map[string]bool
	// own is the number of this backend's endpoints.
	own int
}

func newHoldings(name string, endpoints []hns.Endpoint, balancers []hns.LoadBalancer) *holdings {
	h := &holdings{
		name:         name,
		endpoints:    make(map[string]hns.Endpoint, len(endpoints)),
		byAddr:       make(map[netip.Addr][]string, len(endpoints)),
		balancers:    make(map[string]hns.LoadBalancer, len(balancers)),
		byFrontend:   make(map[frontend][]string, len(balancers)),
		endpointUses: make(map[string]int, len(endpoints)),
		vipUses:      map[netip.Addr]int{},
		idle:         map[string]bool{},
	}
	// A listing may contain an object twice, so skip the second copy.
	for _, e := range endpoints {
		if _, known := h.endpoints[e.ID]; !known {
			h.addEndpoint(e)
		}
	}
	for _, lb := range balancers {
		if _, known := h.balancers[lb.ID]; !known {
			h.addBalancer(lb)
		}
	}
	return h
}

// isOwn reports whether an endpoint has a name that this backend gives to endpoints. Such
// an endpoint is not a local pod, even if HNS reports it without the flag Remote.
func (h *holdings) isOwn(e hns.Endpoint) bool {
	return len(e.Addrs) == 1 && e.Name == endpointName(h.name, e.Addrs[0])
}

// isRemote reports whether an endpoint is not a network interface of this machine.
func (h *holdings) isRemote(e hns.Endpoint) bool { return e.Remote || h.isOwn(e) }

// endpointName returns the name of the endpoint that a backend creates for an address.
func endpointName(backend string, addr netip.Addr) string { return backend + "-" + addr.String() }

func (h *holdings) addEndpoint(e hns.Endpoint) {
	h.endpoints[e.ID] = e
	for _, a := range e.Addrs {
		ids := append(h.byAddr[a], e.ID)
		// Prefer the endpoint of a local pod, for destinations whose node is unknown. Among
		// other endpoints, any stable order is enough.
		slices.SortFunc(ids, func(x, y string) int {
			return cmp.Or(h.rank(x)-h.rank(y), cmp.Compare(x, y))
		})
		h.byAddr[a] = ids
	}
	if h.isOwn(e) {
		h.own++
	}
	h.updateIdle(e)
}

func (h *holdings) rank(id string) int {
	if h.isRemote(h.endpoints[id]) {
		return 1
	}
	return 0
}

func (h *holdings) updateIdle(e hns.Endpoint) {
	if h.isOwn(e) && h.endpointUses[e.ID] == 0 && h.vipUses[e.Addrs[0]] == 0 {
		h.idle[e.ID] = true
	} else {
		delete(h.idle, e.ID)
	}
}

func (h *holdings) removeEndpoint(id string) {
	e := h.endpoints[id]
	for _, a := range e.Addrs {
		ids := slices.DeleteFunc(h.byAddr[a], func(x string) bool { return x == id })
		if len(ids) == 0 {
			delete(h.byAddr, a)
		} else {
			h.byAddr[a] = ids
		}
	}
	if h.isOwn(e) {
		h.own--
	}
	delete(h.endpoints, id)
	delete(h.idle, id)
}

// endpointAt returns the preferred endpoint with this address.
func (h *holdings) endpointAt(a netip.Addr) (e hns.Endpoint, ok bool) {
	if ids := h.byAddr[a]; len(ids) > 0 {
		return h.endpoints[ids[0]], true
	}
	return hns.Endpoint{}, false
}

func (h *holdings) hasEndpoint(id string) bool {
	_, known := h.endpoints[id]
	return known
}

// endpointFor returns the ID of the preferred endpoint for a destination. It skips stale
// endpoints, which HNS may keep although it reported their deletion. An endpoint is stale
// if it is for a pod on another node, but the address now belongs to a pod of this node.
// The reverse case is also stale.
func (h *holdings) endpointFor(d destination) (id string, ok bool) {
	for _, id := range h.byAddr[d.addr] {
		isRemote := h.isRemote(h.endpoints[id])
		if d.at == podHere && isRemote || d.otherNode && !isRemote {
			continue
		}
		return id, true
	}
	return "", false
}

// endpointNamed returns the ID of the endpoint with this name. If several endpoints have
// the name, it returns the lowest ID.
func (h *holdings) endpointNamed(name string) (id string, ok bool) {
	for _, e := range h.endpoints {
		if e.Name == name && (!ok || e.ID < id) {
			id, ok = e.ID, true
		}
	}
	return id, ok
}

func (h *holdings) addBalancer(lb hns.LoadBalancer) {
	h.balancers[lb.ID] = lb
	for _, f := range frontendsOf(lb) {
		ids := append(h.byFrontend[f], lb.ID)
		slices.Sort(ids)
		h.byFrontend[f] = ids
	}
	h.use(lb, 1)
}

func (h *holdings) removeBalancer(id string) {
	lb := h.balancers[id]
	for _, f := range frontendsOf(lb) {
		ids := slices.DeleteFunc(h.byFrontend[f], func(x string) bool { return x == id })
		if len(ids) == 0 {
			delete(h.byFrontend, f)
		} else {
			h.byFrontend[f] = ids
		}
	}
	delete(h.balancers, id)
	h.use(lb, -1)
}

// use adds n to the counts in endpointUses and vipUses for the endpoints and
// VIPs of lb. It also updates the field idle for these endpoints and, on an overlay
// network, for the endpoints of the VIPs.
func (h *holdings) use(lb hns.LoadBalancer, n int) {
	for _, id := range lb.Endpoints {
		if h.endpointUses[id] += n; h.endpointUses[id] == 0 {
			delete(h.endpointUses, id)
		}
		if e, known := h.endpoints[id]; known {
			h.updateIdle(e)
		}
	}
	for _, vip := range lb.VIPs {
		if h.vipUses[vip] += n; h.vipUses[vip] == 0 {
			delete(h.vipUses, vip)
		}
		for _, id := range h.byAddr[vip] {
			h.updateIdle(h.endpoints[id])
		}
	}
}

// users returns the sorted IDs of load balancers. Each of them contains one of these
// endpoints, or has the address of such an endpoint as a VIP.
func (h *holdings) users(endpoints []hns.Endpoint) []string {
	if len(endpoints) == 0 {
		return nil
	}
	ids, addrs := map[string]bool{}, map[netip.Addr]bool{}
	for _, e := range endpoints {
		ids[e.ID] = true
		for _, a := range e.Addrs {
			addrs[a] = true
		}
	}
	var users []string
	for id, lb := range h.balancers {
		if slices.ContainsFunc(lb.Endpoints, func(id string) bool { return ids[id] }) || slices.ContainsFunc(lb.VIPs, func(vip netip.Addr) bool { return addrs[vip] }) {
			users = append(users, id)
		}
	}
	slices.Sort(users)
	return users
}

// frontendsOf returns the frontends of a load balancer, without duplicates.
func frontendsOf(lb hns.LoadBalancer) []frontend {
	vips := lb.VIPs
	if len(vips) == 0 {
		vips = []netip.Addr{{}}
	}
	frontends := make([]frontend, 0, len(vips)*len(lb.Ports))
	for _, vip := range vips {
		family := api.IPv4
		if vip.Is6() || lb.Flags&hns.IPv6 != 0 {
			family = api.IPv6
		}
		for _, p := range lb.Ports {
			f := frontend{VIP: vip, Family: family, Protocol: p.Protocol, Port: p.External}
			if !slices.Contains(frontends, f) {
				frontends = append(frontends, f)
			}
		}
	}
	return frontends
}

// sameEndpoints reports whether two load balancers have the same set of endpoints.
func sameEndpoints(a, b hns.LoadBalancer) bool {
	return slices.Equal(endpointSet(a), endpointSet(b))
}

func endpointSet(lb hns.LoadBalancer) []string {
	return slices.Compact(slices.Sorted(slices.Values(lb.Endpoints)))
}
