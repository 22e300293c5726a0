// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/types"
)

// View is one node's view of a service.
type View struct {
	Service *Service
	// Endpoints are the endpoints on at least one of this node's lists (see [Scopes]). They
	// are in the order of [Endpoint.Compare].
	Endpoints []Endpoint
	// Draining has the endpoints that still answer but are on none of the lists. They
	// receive no new connections and keep existing ones. They are sorted like Endpoints.
	Draining []Endpoint `json:",omitempty"`
	// Unusable has the pairs of service port and family for which no endpoint in the whole
	// cluster is usable. The frontends of these pairs reject connections.
	Unusable []PortFamily `json:",omitempty"`
	// Lost has the service's claims that another service owns.
	Lost []LostClaim `json:",omitempty"`
}

// MarshalJSON returns the JSON form. It never omits Endpoints, so that a reader can
// iterate over the list.
func (view View) MarshalJSON() ([]byte, error) {
	type fields View // without MarshalJSON, to prevent recursion
	if view.Endpoints == nil {
		view.Endpoints = []Endpoint{}
	}
	return json.Marshal(fields(view))
}

// PortFamily identifies a service port in one family. For the only "port" of an all-ports
// service, Protocol and Port are 0.
type PortFamily struct {
	Protocol Protocol `json:",omitempty"`
	Port     int32    `json:",omitempty"`
	Family   Family
}

// Endpoint is an endpoint as one node sees it.
type Endpoint struct {
	Hostname string `json:",omitempty"`
	// Addr is an IPv4 or IPv6 address. It is not IPv4-mapped and has no zone. JSON and the
	// wire format have a field IPs instead: an IPSet that contains only this address.
	Addr netip.Addr `json:"-"`
	// PortOverrides map service ports to port numbers of this endpoint. A named service port
	// has an entry with its own name. An unnamed service port with a named target port has
	// an entry with the target port's name. An unnamed service port with a target port
	// number has an entry only if the endpoint's port number is different. The name in this
	// entry is empty. More than 32 PortOverrides are sorted by name (see [SortPortOverrides]).
	// The method TargetPort reads PortOverrides.
	PortOverrides []PortName `json:",omitempty"`
	// Local reports whether the endpoint runs on this node.
	Local bool `json:",omitempty"`
	// Scopes are the lists that contain the endpoint for at least one service port.
	Scopes Scopes `json:",omitzero"`
	// PortScopes is set if the endpoint's lists differ between service ports. It has an
	// entry for each port for which the endpoint is on a list. More than 32 PortScopes are
	// sorted by number and protocol (see [SortPortScopes]). ScopesOf reads PortScopes.
	PortScopes []PortScopes `json:",omitempty"`

	NodeName string `json:",omitempty"`
	Zone     string `json:",omitempty"`
	// Target is the pod behind the endpoint, as in [SliceEndpoint].
	Target *types.NamespacedName `json:",omitempty"`
	Conditions
}

// endpointFields is Endpoint without its methods.
type endpointFields Endpoint

// endpointJSON is the JSON form of an Endpoint. As in the wire form, Hostname and IPs
// come first.
type endpointJSON struct {
	Hostname string `json:",omitempty"`
	IPs      IPSet
	endpointFields
}

// MarshalJSON returns the JSON form.
func (e Endpoint) MarshalJSON() ([]byte, error) {
	return json.Marshal(endpointJSON{e.Hostname, NewIPSet(e.Addr), endpointFields(e)})
}

// UnmarshalJSON reads the JSON form. It returns an error if IPs does not have exactly one
// address.
func (e *Endpoint) UnmarshalJSON(text []byte) error {
	var j endpointJSON
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	if n := j.IPs.Len(); n != 1 {
		return fmt.Errorf("endpoint has %d addresses, want 1", n)
	}
	*e = Endpoint(j.endpointFields)
	e.Hostname = j.Hostname
	for a := range j.IPs.All() {
		e.Addr = a.Unmap()
	}
	SortPortOverrides(e.PortOverrides)
	SortPortScopes(e.PortScopes)
	return nil
}

// Scopes says which lists contain an endpoint. Each list is for one kind of traffic.
type Scopes struct {
	// Internal is true if the endpoint is on the list for traffic to cluster IPs. The list
	// depends on internalTrafficPolicy.
	Internal bool `json:",omitempty"`
	// External is true if the endpoint is on the list for external frontends (external IPs,
	// load-balancer IPs and node ports), which depends on externalTrafficPolicy.
	External bool `json:",omitempty"`
	// Cluster is true if the endpoint is on the list for traffic from this node to external
	// frontends of a service with externalTrafficPolicy Local.
	Cluster bool `json:",omitempty"`
}

// PortScopes says which lists contain an endpoint for one service port.
type PortScopes struct {
	Protocol Protocol
	Port     int32
	Scopes   Scopes
}

// PortName is a named port number, 1 to 65535.
type PortName struct {
	Name string `json:",omitempty"`
	Port int32  `json:",omitempty"`
}

// maxUnsorted is the maximum length of PortOverrides and PortScopes that are not sorted.
// Longer lists are sorted, because a linear search for each of many ports takes too long.
const maxUnsorted = 32

// SortPortOverrides sorts list as [Endpoint] requires.
func SortPortOverrides(list []PortName) {
	if len(list) > maxUnsorted {
		slices.SortStableFunc(list, func(a, b PortName) int { return cmp.Compare(a.Name, b.Name) })
	}
}

// SortPortScopes sorts list as [Endpoint] requires.
func SortPortScopes(list []PortScopes) {
	if len(list) > maxUnsorted {
		slices.SortStableFunc(list, func(a, b PortScopes) int { return a.compare(b.Port, b.Protocol) })
	}
}

func (s PortScopes) compare(port int32, protocol Protocol) int {
	return cmp.Or(cmp.Compare(s.Port, port), cmp.Compare(s.Protocol, protocol))
}

// Key returns the namespace and name of the view's service.
func (view *View) Key() types.NamespacedName { return view.Service.Key() }

// LocalEndpoints returns the number of elements of Endpoints that are on this node.
func (view *View) LocalEndpoints() int {
	n := 0
	for i := range view.Endpoints {
		if view.Endpoints[i].Local {
			n++
		}
	}
	return n
}

// Equal reports whether both views have the same effect on a node. It ignores the winners of
// lost claims.
func (view *View) Equal(o *View) bool {
	if view == o {
		return true
	}
	return view != nil && o != nil &&
		view.Service.Equal(o.Service) &&
		slices.EqualFunc(view.Endpoints, o.Endpoints, endpointsEqual) &&
		slices.EqualFunc(view.Draining, o.Draining, endpointsEqual) &&
		slices.Equal(view.Unusable, o.Unusable) &&
		slices.EqualFunc(view.Lost, o.Lost, sameClaims)
}

// Key identifies the endpoint within its service by address and ports. It does not depend
// on conditions or lists, and contains no "/". Two pods in the host network of a node
// share an address but not a key.
func (e *Endpoint) Key() string {
	b := e.Addr.AppendTo(make([]byte, 0, 64))
	for i, p := range e.PortOverrides {
		if i == 0 {
			b = append(b, '#')
		} else {
			b = append(b, ',')
		}
		if p.Name != "" {
			b = append(append(b, p.Name...), '=')
		}
		b = strconv.AppendInt(b, int64(p.Port), 10)
	}
	return string(b)
}

// Compare orders endpoints by address, then by ports. It returns 0 only for equal keys.
func (e *Endpoint) Compare(o *Endpoint) int {
	if c := e.Addr.Compare(o.Addr); c != 0 {
		return c
	}
	return slices.CompareFunc(e.PortOverrides, o.PortOverrides, func(a, b PortName) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port))
	})
}

// TargetPort returns the endpoint's port number for the service port p, or 0 if the
// endpoint has none.
func (e *Endpoint) TargetPort(p *PortMapping) int32 {
	name := p.Name
	if name == "" {
		name = p.TargetPortName
	}
	if len(e.PortOverrides) > maxUnsorted {
		i, found := slices.BinarySearchFunc(e.PortOverrides, name, func(o PortName, name string) int { return cmp.Compare(o.Name, name) })
		if found {
			return e.PortOverrides[i].Port
		}
	} else {
		for _, o := range e.PortOverrides {
			if o.Name == name {
				return o.Port
			}
		}
	}
	if name == "" {
		return p.TargetPort
	}
	return 0
}

// ScopesOf returns the endpoint lists of the service port p that contain the endpoint. A
// nil p stands for the only "port" of an all-ports service.
func (e *Endpoint) ScopesOf(p *PortMapping) Scopes {
	if len(e.PortScopes) == 0 || p == nil {
		return e.Scopes
	}
	if len(e.PortScopes) > maxUnsorted {
		i, found := slices.BinarySearchFunc(e.PortScopes, p, func(s PortScopes, p *PortMapping) int { return s.compare(p.Port, p.Protocol) })
		if found {
			return e.PortScopes[i].Scopes
		}
		return Scopes{}
	}
	for _, s := range e.PortScopes {
		if s.Port == p.Port && s.Protocol == p.Protocol {
			return s.Scopes
		}
	}
	return Scopes{}
}

// Equal reports whether all fields of e and o are equal.
func (e *Endpoint) Equal(o *Endpoint) bool {
	return e.Hostname == o.Hostname && e.Addr == o.Addr && e.Local == o.Local &&
		slices.Equal(e.PortOverrides, o.PortOverrides) &&
		e.Scopes == o.Scopes && slices.Equal(e.PortScopes, o.PortScopes) &&
		e.NodeName == o.NodeName && e.Zone == o.Zone && equalTargets(e.Target, o.Target) && e.Conditions == o.Conditions
}

func endpointsEqual(a, b Endpoint) bool { return a.Equal(&b) }

// The method Or returns a Scopes with the lists that are set in s, in o or in both.
func (s Scopes) Or(o Scopes) Scopes {
	return Scopes{s.Internal || o.Internal, s.External || o.External, s.Cluster || o.Cluster}
}
