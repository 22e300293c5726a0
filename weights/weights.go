// SPDX-License-Identifier: Apache-2.0

// Package weights divides the connections to a service among other services, its
// backends, by weight. For example, the backends are versions of a program. The share
// of a backend does not depend on its number of endpoints.
package weights

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Backend is a service that gets a part of the connections to another service.
type Backend struct {
	// Weight is 0 to 1,000,000. A backend with weight 0 gets no new connections.
	Weight int64
	// Slices are the EndpointSlices of the backend. It is empty if the backend does not exist.
	Slices []*api.EndpointSlice
	// Port is the name of the port in Slices.
	Port string
}

// closedPort is a port (tcpmux) at which no program on a node listens, so the kernel
// refuses connections.
const closedPort = 1

// Divide returns EndpointSlices for a port of a service. In each family, the endpoints
// of a backend together get a share of the connections that is proportional to the
// backend's weight. The returned slices contain copies of the endpoints, without
// topology hints, because hints would change the shares.
//
// A backend without endpoints keeps its share: these connections go to the internal
// address of the node, at port 1, and the kernel refuses them. If the node is nil or
// has no address of the family, the other backends get the share.
//
// A share differs from its exact value by at most 1 % of this value. The difference may
// be larger if a backend has so many endpoints and such a small share that its
// endpoints would need less than 1/65535 of the weight of other endpoints.
func Divide(service types.NamespacedName, port *api.PortMapping, backends []Backend, node *api.Node) (all []*api.EndpointSlice) {
	shares, groups := make([]int64, len(backends)), make([][]*api.EndpointSlice, len(backends))
	for i, b := range backends {
		add := func(name string, family api.Family, number int32, endpoints []api.SliceEndpoint) {
			groups[i] = append(groups[i], &api.EndpointSlice{
				Namespace: service.Namespace, ServiceName: service.Name, Family: family,
				Name:      fmt.Sprintf("%s:%d:%s", port.Name, i, name), // names in Kubernetes have no colon
				Ports:     []api.EndpointPort{{Name: port.Name, Protocol: port.Protocol, Port: number}},
				Endpoints: endpoints,
			})
		}
		for _, from := range b.Slices {
			j := slices.IndexFunc(from.Ports, func(p api.EndpointPort) bool { return p.Name == b.Port && p.Protocol == port.Protocol })
			if j < 0 {
				continue
			}
			endpoints := slices.Clone(from.Endpoints)
			for k := range endpoints {
				if d := endpoints[k].Details.Value(); d.Hints != nil {
					d.Hints = nil
					endpoints[k].Details = &d
				}
			}
			add(from.Name, from.Family, from.Ports[j].Port, endpoints)
		}
		for _, family := range families {
			if addr := internalIP(node, family); b.Weight > 0 && addr.IsValid() && !answers(groups[i], family) {
				refusal := api.SliceEndpoint{Addr: addr, Details: &api.EndpointDetails{NodeName: node.Name}, Conditions: api.Conditions{Ready: true, Serving: true}}
				add("refused-"+family.String(), family, closedPort, []api.SliceEndpoint{refusal})
			}
		}
		shares[i] = b.Weight
	}
	divide(shares, groups)
	return slices.Concat(groups...)
}

// internalIP returns the first internal address of a node in a family, or the zero Addr.
func internalIP(node *api.Node, family api.Family) netip.Addr {
	if node != nil {
		for _, a := range node.Addresses {
			if a.Type == "InternalIP" && api.FamilyOf(a.IP) == family {
				return a.IP
			}
		}
	}
	return netip.Addr{}
}

// answers reports whether an endpoint of the family gets connections if all other endpoints
// fail.
func answers(group []*api.EndpointSlice, family api.Family) bool {
	for e := range endpoints(group, family) {
		if (e.Ready || e.Serving) && !e.Drain {
			return true
		}
	}
	return false
}

var families = [...]api.Family{api.IPv4, api.IPv6}

// total is the sum of the weights of all endpoints, unless there are too many endpoints
// for it. Dataplanes can divide traffic this finely.
const total = 4000

// divide sets the weights of the endpoints in groups. If a group has no ready endpoint, the
// other groups get its share.
func divide(shares []int64, groups [][]*api.EndpointSlice) {
	for _, family := range families {
		ready, sum, total := make([]int64, len(groups)), int64(0), int64(total)
		for i := range groups {
			for e := range endpoints(groups[i], family) {
				if e.Drain = e.Drain || shares[i] == 0; e.Ready && !e.Drain {
					ready[i]++
				}
			}
			if ready[i] > 0 {
				sum += shares[i]
			}
		}
		for i, n := range ready {
			if n > 0 { // each endpoint has a weight of at least 1
				total = max(total, (n*sum+shares[i]-1)/shares[i])
			}
		}
		for i, n := range ready {
			share := shares[i] * total / max(sum, 1)
			for e := range endpoints(groups[i], family) {
				if e.Ready && !e.Drain {
					e.Weight = int32(min(max(share/n, 1), 65535))
					share, n = share-share/n, n-1
				}
			}
		}
	}
}

// endpoints yields the endpoints of a family.
func endpoints(group []*api.EndpointSlice, family api.Family) iter.Seq[*api.SliceEndpoint] {
	return func(yield func(*api.SliceEndpoint) bool) {
		for _, slice := range group {
			for i := range slice.Endpoints {
				if slice.Family == family && !yield(&slice.Endpoints[i]) {
					return
				}
			}
		}
	}
}
