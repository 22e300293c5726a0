// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// holdings is what HNS has: what its last listing said, and what was written
// since.
type holdings struct {
	// name is that of the backend whose endpoints are own ones.
	name       string
	endpoints  map[string]Endpoint
	byAddr     map[netip.Addr][]string // the one to use first
	balancers  map[string]LoadBalancer
	byFrontend map[Frontend]string
	// uses counts the load balancers of an endpoint, whoever's they are.
	uses map[string]int
	// idle are own endpoints that no load balancer uses.
	idle map[string]bool
	// own counts own endpoints.
	own int
}

func newHoldings(name string, endpoints []Endpoint, balancers []LoadBalancer) *holdings {
	h := &holdings{
		name:       name,
		endpoints:  make(map[string]Endpoint, len(endpoints)),
		byAddr:     make(map[netip.Addr][]string, len(endpoints)),
		balancers:  make(map[string]LoadBalancer, len(balancers)),
		byFrontend: make(map[Frontend]string, len(balancers)),
		uses:       make(map[string]int, len(endpoints)),
		idle:       map[string]bool{},
	}
	for _, e := range endpoints {
		h.addEndpoint(e)
	}
	for _, lb := range balancers {
		h.addBalancer(lb)
	}
	return h
}

// isOwn reports whether an endpoint is one that this backend made for others'
// load balancers to be sent to: by its name, which HNS keeps.
func (h *holdings) isOwn(e Endpoint) bool {
	return e.Remote && len(e.Addrs) == 1 && e.Name == endpointName(h.name, e.Addrs[0])
}

// endpointName returns the name of the endpoint that the backend of a name makes
// for an address.
func endpointName(backend string, addr netip.Addr) string { return backend + "-" + addr.String() }

func (h *holdings) addEndpoint(e Endpoint) {
	h.endpoints[e.ID] = e
	for _, a := range e.Addrs {
		ids := append(h.byAddr[a], e.ID)
		// A pod's own endpoint is the right one, and a remote one of its address
		// a leftover; any other order would do if it is always the same.
		slices.SortFunc(ids, func(x, y string) int {
			return cmp.Or(rank(h.endpoints[x])-rank(h.endpoints[y]), cmp.Compare(x, y))
		})
		h.byAddr[a] = ids
	}
	if h.isOwn(e) {
		h.own++
		if h.uses[e.ID] == 0 {
			h.idle[e.ID] = true
		}
	}
}

func rank(e Endpoint) int {
	if e.Remote {
		return 1
	}
	return 0
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

// endpointAt returns the ID of the endpoint of an address.
func (h *holdings) endpointAt(a netip.Addr) (id string, ok bool) {
	if ids := h.byAddr[a]; len(ids) > 0 {
		return ids[0], true
	}
	return "", false
}

func (h *holdings) addBalancer(lb LoadBalancer) {
	h.balancers[lb.ID] = lb
	for _, f := range frontendsOf(lb) {
		h.byFrontend[f] = lb.ID
	}
	for _, e := range lb.Endpoints {
		h.uses[e]++
		delete(h.idle, e)
	}
}

func (h *holdings) removeBalancer(id string) {
	lb := h.balancers[id]
	for _, f := range frontendsOf(lb) {
		if h.byFrontend[f] == id {
			delete(h.byFrontend, f)
		}
	}
	for _, e := range lb.Endpoints {
		if h.uses[e]--; h.uses[e] > 0 {
			continue
		}
		delete(h.uses, e)
		if known, ok := h.endpoints[e]; ok && h.isOwn(known) {
			h.idle[e] = true
		}
	}
	delete(h.balancers, id)
}

// users returns the IDs of the load balancers that use an endpoint, in order.
func (h *holdings) users(endpoint string) []string {
	var ids []string
	for id, lb := range h.balancers {
		if slices.Contains(lb.Endpoints, endpoint) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// frontendsOf returns what a load balancer takes, each once.
func frontendsOf(lb LoadBalancer) []Frontend {
	vips := lb.VIPs
	if len(vips) == 0 {
		vips = []netip.Addr{{}}
	}
	frontends := make([]Frontend, 0, len(vips)*len(lb.Ports))
	for _, vip := range vips {
		family := api.IPv4
		if vip.Is6() || lb.Flags&IPv6 != 0 {
			family = api.IPv6
		}
		for _, p := range lb.Ports {
			f := Frontend{VIP: vip, Family: family, Protocol: p.Protocol, Port: p.External}
			if !slices.Contains(frontends, f) {
				frontends = append(frontends, f)
			}
		}
	}
	return frontends
}

// The settings that the backend decides; HNS may add its own.
const (
	knownFlags     = DSR | IPv6
	knownPortFlags = LocalRoutedVIP | UseMux | PreserveDIP | VIPExternalIP
)

// sameButEndpoints reports whether have is what want asks for, endpoints aside.
func sameButEndpoints(have, want LoadBalancer) bool {
	return (!want.SourceVIP.IsValid() || have.SourceVIP == want.SourceVIP) &&
		(have.Flags^want.Flags)&knownFlags == 0 &&
		slices.Equal(have.VIPs, want.VIPs) &&
		slices.EqualFunc(sortedPorts(have.Ports), sortedPorts(want.Ports), func(a, b PortMapping) bool {
			return a.Protocol == b.Protocol && a.External == b.External && a.Internal == b.Internal &&
				a.Distribution == b.Distribution && (a.Flags^b.Flags)&knownPortFlags == 0
		})
}

func sortedPorts(ports []PortMapping) []PortMapping {
	if len(ports) < 2 {
		return ports
	}
	return slices.SortedFunc(slices.Values(ports), func(a, b PortMapping) int {
		return cmp.Or(cmp.Compare(a.External, b.External), cmp.Compare(a.Internal, b.Internal))
	})
}

// sameEndpoints reports whether both have the same set of endpoints.
func sameEndpoints(have, want LoadBalancer) bool {
	if len(have.Endpoints) != len(want.Endpoints) {
		return false
	}
	return slices.Equal(slices.Sorted(slices.Values(have.Endpoints)), slices.Sorted(slices.Values(want.Endpoints)))
}
