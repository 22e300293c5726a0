// SPDX-License-Identifier: Apache-2.0

// Package clusterv1 defines the messages for a cluster's state. A kpng server sends them
// to a client that follows the whole cluster. The package also converts them to and from
// the types of package api. The messages for services and nodes are in package localv1.
//
// docs/reference/wire.md describes the protocol. The protocol omits
// api.EndpointSlice.TriggerTime.
//
// hack/generate generates the code of the messages.
package clusterv1

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"k8s.io/apimachinery/pkg/types"
)

// FromKey returns the wire form of a namespaced name.
func FromKey(k types.NamespacedName) *Key { return &Key{Namespace: k.Namespace, Name: k.Name} }

// ToKey converts x to a namespaced name.
func (x *Key) ToKey() types.NamespacedName {
	return types.NamespacedName{Namespace: x.GetNamespace(), Name: x.GetName()}
}

// FromSlice returns the wire form of s.
func FromSlice(s *api.EndpointSlice) *EndpointSlice {
	x := &EndpointSlice{Namespace: s.Namespace, Name: s.Name, ServiceName: s.ServiceName, Family: localv1.Family(s.Family), Labels: s.Labels}
	for _, p := range s.Ports {
		x.Ports = append(x.Ports, &EndpointPort{
			Name: p.Name, Protocol: localv1.Protocol(p.Protocol), Port: p.Port, AppProtocol: p.AppProtocol,
		})
	}
	for i := range s.Endpoints {
		if s.Endpoints[i].Addr.IsValid() { // omit invalid addresses, because the receiver would reject the whole EndpointSlice
			x.Endpoints = append(x.Endpoints, fromEndpoint(&s.Endpoints[i]))
		}
	}
	return x
}

func fromEndpoint(e *api.SliceEndpoint) *SliceEndpoint {
	d := e.Details.Value()
	x := &SliceEndpoint{
		Addr: e.Addr.String(), Hostname: d.Hostname, NodeName: d.NodeName, Zone: d.Zone,
		Conditions: localv1.FromConditions(e.Conditions), Weight: e.Weight,
	}
	if d.Hints != nil {
		x.Hints = &Hints{ForNodes: d.Hints.ForNodes, ForZones: d.Hints.ForZones}
	}
	if d.Target != nil {
		x.Target = FromKey(*d.Target)
	}
	return x
}

// ToSlice converts x to api.EndpointSlice. An error names the field that cannot be read.
func (x *EndpointSlice) ToSlice() (*api.EndpointSlice, error) {
	s := &api.EndpointSlice{
		Namespace: x.GetNamespace(), Name: x.GetName(), ServiceName: x.GetServiceName(), Family: api.Family(x.GetFamily()), Labels: x.GetLabels(),
	}
	if err := errors.Join(plain.Check(s.Namespace, s.Name, s.ServiceName), plain.CheckMap(s.Labels)); err != nil {
		return nil, fmt.Errorf("endpoint slice: %w", err)
	}
	for _, p := range x.GetPorts() {
		if err := plain.Check(p.GetName(), p.GetAppProtocol()); err != nil {
			return nil, fmt.Errorf("endpoint slice %s: %w", s.Key(), err)
		}
		s.Ports = append(s.Ports, api.EndpointPort{
			Name: p.GetName(), Protocol: api.Protocol(p.GetProtocol()), Port: p.GetPort(), AppProtocol: p.GetAppProtocol(),
		})
	}
	for _, w := range x.GetEndpoints() {
		e, err := w.toEndpoint()
		if err != nil {
			return nil, fmt.Errorf("endpoint slice %s: %w", s.Key(), err)
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s, nil
}

func (x *SliceEndpoint) toEndpoint() (api.SliceEndpoint, error) {
	addr, err := netip.ParseAddr(x.GetAddr())
	if err != nil {
		return api.SliceEndpoint{}, err
	}
	d := api.EndpointDetails{Hostname: x.GetHostname(), NodeName: x.GetNodeName(), Zone: x.GetZone()}
	if h := x.GetHints(); h != nil {
		d.Hints = &api.Hints{ForNodes: h.GetForNodes(), ForZones: h.GetForZones()}
	}
	texts := []string{d.Hostname, d.NodeName, d.Zone, x.GetTarget().GetNamespace(), x.GetTarget().GetName()}
	if d.Hints != nil {
		texts = append(append(texts, d.Hints.ForNodes...), d.Hints.ForZones...)
	}
	if err := plain.Check(texts...); err != nil {
		return api.SliceEndpoint{}, err
	}
	if x.GetTarget() != nil {
		target := x.GetTarget().ToKey()
		d.Target = &target
	}
	e := api.SliceEndpoint{Addr: addr, Conditions: x.GetConditions().ToConditions(), Weight: x.GetWeight()}
	if d != (api.EndpointDetails{}) {
		e.Details = &d
	}
	return e, nil
}
