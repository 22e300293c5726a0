// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/kpng-project/kpng/internal/lookup"
	"k8s.io/apimachinery/pkg/types"
)

// View is one node's view of a service.
type View struct {
	Service *Service
	// Endpoints are the endpoints on at least one of this node's lists (see [Scopes]). They
	// are sorted by address, then by the names and numbers of their PortOverrides.
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
	// entry is empty. If there are more than 32 PortOverrides, they are sorted by name. The
	// method TargetPort reads PortOverrides.
	PortOverrides []PortName `json:",omitempty"`
	// Local reports whether the endpoint runs on this node.
	Local bool `json:",omitempty"`
	// Scopes are the lists that contain the endpoint for at least one service port.
	Scopes Scopes `json:",omitzero"`
	// PortScopes is set if the endpoint's lists differ between service ports. A port has
	// an entry if the endpoint is on a list for this port. If there are more than 32
	// PortScopes, they are sorted by number, then protocol.
	PortScopes []PortScopes `json:",omitempty"`

	NodeName string `json:",omitempty"`
	Zone     string `json:",omitempty"`
	// Target is the pod behind the endpoint, as in [SliceEndpoint].
	Target *types.NamespacedName `json:",omitempty"`
	// Weight is the endpoint's share of new connections, relative to other endpoints: 1 to
	// 65535. 0 means [DefaultWeight]. For the weight zero, see Conditions.Drain.
	Weight int32 `json:",omitempty"`
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
	addrs := slices.Collect(j.IPs.All())
	if len(addrs) != 1 {
		return fmt.Errorf("endpoint has %d addresses, want 1", len(addrs))
	}
	*e = Endpoint(j.endpointFields)
	e.Hostname = j.Hostname
	e.Addr = addrs[0].Unmap()
	lookup.Sort(e.PortOverrides, func(a, b PortName) int { return cmp.Compare(a.Name, b.Name) })
	lookup.Sort(e.PortScopes, func(a, b PortScopes) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return nil
}

// Scopes says which lists contain an endpoint. Each list is for one kind of traffic.
type Scopes struct {
	// Internal is true if the endpoint is on the list for traffic to cluster IPs. The list
	// depends on internalTrafficPolicy.
	Internal bool `json:",omitempty"`
	// External is true if the endpoint is on the list for external frontends: external
	// IPs, load-balancer IPs and node ports. The list depends on externalTrafficPolicy.
	External bool `json:",omitempty"`
	// Cluster is true if the endpoint is on the list for traffic from this node to external
	// frontends of a service with externalTrafficPolicy Local.
	Cluster bool `json:",omitempty"`
}

// PortScopes says which lists contain an endpoint for one service port.
type PortScopes struct {
	Protocol Protocol
	Port     int32
	Scopes   `json:"Scopes"`
}

// PortName is a named port number, 1 to 65535.
type PortName struct {
	Name string `json:",omitempty"`
	Port int32  `json:",omitempty"`
}

// Key returns the namespace and name of the view's service.
func (view *View) Key() types.NamespacedName { return view.Service.Key() }

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

// TargetPort returns the endpoint's port number for the service port p, or 0 if the
// endpoint has none.
func (e *Endpoint) TargetPort(p *PortMapping) int32 {
	name := p.Name
	if name == "" {
		name = p.TargetPortName
	}
	if o := lookup.Find(e.PortOverrides, name, func(o PortName, name string) int { return cmp.Compare(o.Name, name) }); o != nil {
		return o.Port
	}
	if name == "" {
		return p.TargetPort
	}
	return 0
}

// Equal reports whether all fields of e and o are equal.
func (e *Endpoint) Equal(o *Endpoint) bool {
	return e.Hostname == o.Hostname && e.Addr == o.Addr && e.Local == o.Local &&
		slices.Equal(e.PortOverrides, o.PortOverrides) &&
		e.Scopes == o.Scopes && slices.Equal(e.PortScopes, o.PortScopes) &&
		e.NodeName == o.NodeName && e.Zone == o.Zone && e.Weight == o.Weight && equalTargets(e.Target, o.Target) && e.Conditions == o.Conditions
}

func endpointsEqual(a, b Endpoint) bool { return a.Equal(&b) }
