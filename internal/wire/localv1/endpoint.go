// SPDX-License-Identifier: Apache-2.0

package localv1

import (
	"cmp"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/lookup"
	"github.com/kpng-project/kpng/internal/plain"
	"k8s.io/apimachinery/pkg/types"
)

// FromEndpoint returns the wire form of e. If draining is true, the wire form marks the
// endpoint as draining.
func FromEndpoint(e *api.Endpoint, draining bool) *Endpoint {
	ips := api.NewIPSet(e.Addr)
	x := &Endpoint{
		Hostname: e.Hostname,
		IPs:      fromIPSet(ips),
		Local:    e.Local,
		PortOverrides: convert(e.PortOverrides, func(p *api.PortName) *PortName {
			return &PortName{Name: p.Name, Port: p.Port}
		}),
		Scopes: fromScopes(e.Scopes),
		PortScopes: convert(e.PortScopes, func(p *api.PortScopes) *PortScopes {
			return &PortScopes{Protocol: Protocol(p.Protocol), Port: p.Port, Scopes: fromScopes(p.Scopes)}
		}),
		NodeName:   e.NodeName,
		Zone:       e.Zone,
		Conditions: FromConditions(e.Conditions),
		Draining:   draining,
		Weight:     e.Weight,
	}
	if e.Target != nil {
		x.Target = &PodName{Namespace: e.Target.Namespace, Name: e.Target.Name}
	}
	return x
}

// ToEndpoint converts x to an api.Endpoint, and reports whether the endpoint is draining.
// An error names the field that cannot be read.
func (x *Endpoint) ToEndpoint() (e api.Endpoint, draining bool, err error) {
	e = api.Endpoint{
		Hostname: x.GetHostname(),
		Local:    x.GetLocal(),
		PortOverrides: convertPointers(x.GetPortOverrides(), func(p *PortName) api.PortName {
			return api.PortName{Name: p.GetName(), Port: p.GetPort()}
		}),
		Scopes: x.GetScopes().toScopes(),
		PortScopes: convertPointers(x.GetPortScopes(), func(p *PortScopes) api.PortScopes {
			return api.PortScopes{Protocol: api.Protocol(p.GetProtocol()), Port: p.GetPort(), Scopes: p.GetScopes().toScopes()}
		}),
		NodeName:   x.GetNodeName(),
		Zone:       x.GetZone(),
		Conditions: x.GetConditions().ToConditions(),
		Weight:     x.GetWeight(),
	}
	texts := []string{e.Hostname, e.NodeName, e.Zone, x.GetTarget().GetNamespace(), x.GetTarget().GetName()}
	for _, p := range e.PortOverrides {
		texts = append(texts, p.Name)
	}
	if err := plain.Check(texts...); err != nil {
		return e, false, fmt.Errorf("endpoint: %w", err)
	}
	if pod := x.GetTarget(); pod != nil {
		e.Target = &types.NamespacedName{Namespace: pod.GetNamespace(), Name: pod.GetName()}
	}
	addrs, err := x.GetIPs().toAddrs()
	if err != nil {
		return e, false, fmt.Errorf("endpoint: %w", err)
	}
	if len(addrs) != 1 {
		return e, false, fmt.Errorf("endpoint has %d addresses", len(addrs))
	}
	e.Addr = addrs[0]
	lookup.Sort(e.PortOverrides, func(a, b api.PortName) int { return cmp.Compare(a.Name, b.Name) })
	lookup.Sort(e.PortScopes, func(a, b api.PortScopes) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return e, x.GetDraining(), nil
}

func fromScopes(s api.Scopes) *EndpointScopes {
	return &EndpointScopes{Internal: s.Internal, External: s.External, Cluster: s.Cluster}
}

func (x *EndpointScopes) toScopes() api.Scopes {
	return api.Scopes{Internal: x.GetInternal(), External: x.GetExternal(), Cluster: x.GetCluster()}
}

// FromConditions returns the wire form of c.
func FromConditions(c api.Conditions) *EndpointConditions {
	return &EndpointConditions{Ready: c.Ready, Serving: c.Serving, Terminating: c.Terminating, Drain: c.Drain}
}

// ToConditions converts x to api.Conditions. Servers of the original kpng send no
// conditions. So if x is nil, ToConditions returns the conditions of a ready endpoint.
func (x *EndpointConditions) ToConditions() api.Conditions {
	if x == nil {
		return api.Conditions{Ready: true, Serving: true}
	}
	return api.Conditions{Ready: x.GetReady(), Serving: x.GetServing(), Terminating: x.GetTerminating(), Drain: x.GetDrain()}
}
