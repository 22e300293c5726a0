// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"hash/maphash"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
)

// Existing has endpoints of a frontend: existing flows through the frontend to these
// endpoints may continue. These are all endpoints of the frontend's port and family in
// the view. They include draining endpoints, and endpoints that new flows through the
// frontend do not use. A backend ends UDP flows through the frontend to all other
// endpoints.
//
// Two frontends of a view have equal values of Existing if they have the same family, and
// if their service ports lead to the same ports of all endpoints. So Existing can be a map
// key. The zero value has no endpoints.
type Existing struct {
	view   *api.View
	port   *api.PortMapping // the first port with this value
	family api.Family
}

// existingOf returns the Existing of a port and family. If an earlier port leads to the
// same ports of all endpoints, the result is the value of the earlier port.
func (l *portLists) existingOf(port *api.PortMapping, family api.Family) Existing {
	x := Existing{l.view, port, family}
	if port == nil || len(l.view.Service.Ports) == 1 {
		return x
	}
	if l.samples == nil {
		l.samples, l.firstPorts = samplesOf(l.view), make(map[uint64]*api.PortMapping, len(l.view.Service.Ports))
	}
	samples := l.samples[family]
	hash := maphash.Comparable(hashSeed, family)
	for _, e := range samples {
		hash = maphash.Comparable(hashSeed, targetHash{hash, e.TargetPort(port)})
	}
	for {
		switch first := l.firstPorts[hash]; {
		case first == nil:
			l.firstPorts[hash] = port
			return x
		case !slices.ContainsFunc(samples, func(e *api.Endpoint) bool { return e.TargetPort(first) != e.TargetPort(port) }):
			x.port = first
			return x
		}
		hash++ // a collision: other ports have this hash; practically never happens
	}
}

// hashSeed is random, so that a user cannot choose ports with equal hashes.
var hashSeed = maphash.MakeSeed()

type targetHash struct {
	before uint64
	port   int32
}

// samplesOf returns, for each family, one endpoint for each list of PortOverrides in
// memory. Endpoints of an EndpointSlice share such a list, so there are few samples.
func samplesOf(view *api.View) map[api.Family][]*api.Endpoint {
	type list struct {
		family api.Family
		ports  *api.PortName
		count  int
	}
	all := map[api.Family][]*api.Endpoint{}
	var seen distinct.Set[list]
	for _, endpoints := range [...][]api.Endpoint{view.Endpoints, view.Draining} {
		for i := range endpoints {
			e := &endpoints[i]
			l := list{family: api.FamilyOf(e.Addr), count: len(e.PortOverrides)}
			if l.count > 0 {
				l.ports = &e.PortOverrides[0]
			}
			if seen.Add(l) {
				all[l.family] = append(all[l.family], e)
			}
		}
	}
	return all
}

// All yields the endpoints, sorted by address and port. Each address and port occurs once.
func (x Existing) All() iter.Seq[Target] {
	return func(yield func(Target) bool) {
		if x.view == nil {
			return
		}
		listed, draining := x.view.Endpoints, x.view.Draining
		var same []Target // endpoints with the next address
		for len(listed) > 0 || len(draining) > 0 {
			next, other := &listed, &draining
			if len(listed) == 0 || len(draining) > 0 && draining[0].Addr.Less(listed[0].Addr) {
				next, other = other, next
			}
			addr := (*next)[0].Addr
			if !(len(*next) > 1 && (*next)[1].Addr == addr || len(*other) > 0 && (*other)[0].Addr == addr) {
				e := &(*next)[0] // usually the only endpoint with this address
				*next = (*next)[1:]
				if port, ok := x.portOf(e); ok && !yield(Target{e, port}) {
					return
				}
				continue
			}
			same = x.take(x.take(same[:0], addr, &listed), addr, &draining)
			if len(same) > 1 {
				slices.SortStableFunc(same, func(a, b Target) int { return cmp.Compare(a.Port, b.Port) })
				same = slices.CompactFunc(same, func(a, b Target) bool { return a.Port == b.Port })
			}
			for _, t := range same {
				if !yield(t) {
					return
				}
			}
		}
	}
}

// Without returns the endpoints of x that are in none of the lists.
func (x Existing) Without(lists ...[]Target) (rest []Target) {
	listed := map[netip.AddrPort]struct{}{}
	for _, list := range lists {
		for _, t := range list {
			listed[t.AddrPort()] = struct{}{}
		}
	}
	for t := range x.All() {
		if _, ok := listed[t.AddrPort()]; !ok {
			rest = append(rest, t)
		}
	}
	return rest
}

// take removes the endpoints with the address addr from the start of list. It appends those
// removed endpoints to buf that have the port and the family.
func (x Existing) take(buf []Target, addr netip.Addr, list *[]api.Endpoint) []Target {
	for len(*list) > 0 && (*list)[0].Addr == addr {
		e := &(*list)[0]
		*list = (*list)[1:]
		if port, ok := x.portOf(e); ok {
			buf = append(buf, Target{Endpoint: e, Port: port})
		}
	}
	return buf
}

// portOf returns the port of e that serves the frontend, or 0 for all ports. The second
// result reports whether e serves the frontend.
func (x Existing) portOf(e *api.Endpoint) (int32, bool) {
	switch {
	case api.FamilyOf(e.Addr) != x.family:
		return 0, false
	case x.port == nil:
		return 0, true
	default:
		port := e.TargetPort(x.port)
		return port, port != 0
	}
}

// Has reports whether existing flows to an endpoint may continue. It takes logarithmic time.
// For an all-ports service, the port of the endpoint does not matter.
func (x Existing) Has(endpoint netip.AddrPort) bool {
	if x.view == nil {
		return false
	}
	return x.has(x.view.Endpoints, endpoint, anyEndpoint) || x.has(x.view.Draining, endpoint, anyEndpoint)
}

func anyEndpoint(*api.Endpoint) bool { return true }

// The method has reports whether list has a matching endpoint at this address and port.
// An endpoint matches if the function match returns true for it.
func (x Existing) has(list []api.Endpoint, endpoint netip.AddrPort, match func(*api.Endpoint) bool) bool {
	i, _ := slices.BinarySearchFunc(list, endpoint.Addr(), func(e api.Endpoint, a netip.Addr) int { return e.Addr.Compare(a) })
	for ; i < len(list) && list[i].Addr == endpoint.Addr(); i++ {
		if port, ok := x.portOf(&list[i]); ok && (x.port == nil || port == int32(endpoint.Port())) && match(&list[i]) {
			return true
		}
	}
	return false
}

// Resets reports whether a backend resets the established TCP connections to an endpoint. It
// does so only for a service with ResetConnections, and only if the endpoint is no longer in
// the view, or is draining and not ready. Connections of a deleted service continue. Resets
// takes logarithmic time.
func (x Existing) Resets(endpoint netip.AddrPort) bool {
	if x.view == nil || !x.view.Service.ResetConnections {
		return false
	}
	return !x.has(x.view.Endpoints, endpoint, anyEndpoint) &&
		!x.has(x.view.Draining, endpoint, func(e *api.Endpoint) bool { return e.Ready })
}

// Hairpins yields the endpoints on this node to which frontends of the view send new
// connections. With each endpoint, it yields the protocol of the connections. Such an
// endpoint may connect to itself through the service. Then a backend replaces the source
// of the connection, even if the frontend's [Masquerade] does not select the connection.
// Each protocol, address and port occurs once. For an all-ports service, the protocol and
// the port are 0. If view is nil, Hairpins yields nothing.
func Hairpins(view *api.View) iter.Seq2[api.Protocol, Target] {
	type list struct {
		protocol api.Protocol
		id       ListID
	}
	type hairpin struct {
		protocol api.Protocol
		at       netip.AddrPort
	}
	return func(yield func(api.Protocol, Target) bool) {
		var lists distinct.Set[list] // frontends share them
		var hairpins distinct.Set[hairpin]
		for f := range Classes(view) {
			for _, traffic := range [...]*Traffic{&f.Elsewhere, &f.Node} {
				if !lists.Add(list{f.Protocol, traffic.List}) {
					continue
				}
				for _, t := range traffic.Endpoints {
					if t.Local && hairpins.Add(hairpin{f.Protocol, t.AddrPort()}) && !yield(f.Protocol, t) {
						return
					}
				}
			}
		}
	}
}
