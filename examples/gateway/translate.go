// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/weights"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// protocols are the protocols of listeners. The kind of a listener's routes begins with it.
var protocols = map[string]api.Protocol{"TCP": api.TCP, "UDP": api.UDP}

// translate returns the service and the slices of a gateway with these addresses, and the
// number of routes of each listener.
func (s *source) translate(g *object, addrs []netip.Addr) (*api.Service, []*api.EndpointSlice, []int32) {
	service := &api.Service{
		Namespace: g.Namespace, Name: g.Name, Type: api.ClusterIP, UID: g.UID, Created: g.CreationTimestamp.UTC(),
		IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(addrs...)},
	}
	var routes []*object
	for _, kind := range []string{"TCPRoute", "UDPRoute"} {
		list, _ := s.informers[kind].GetIndexer().ByIndex("references", g.reference())
		for _, o := range list {
			routes = append(routes, o.(*object))
		}
	}
	slices.SortFunc(routes, func(a, b *object) int { // the oldest one of a listener gets the traffic
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.key().String(), b.key().String()))
	})
	var all []*api.EndpointSlice
	attached := make([]int32, len(g.Spec.Listeners))
	for i := range g.Spec.Listeners {
		l := &g.Spec.Listeners[i]
		if protocols[l.Protocol] == api.UnknownProtocol {
			continue
		}
		service.Ports = append(service.Ports, api.PortMapping{Name: l.Name, Protocol: protocols[l.Protocol], Port: l.Port, TargetPortName: l.Name})
		for _, r := range routes {
			if slices.ContainsFunc(r.Spec.ParentRefs, func(p parentRef) bool { return p.gateway(r) == g.key() && p.selects(l) && s.admits(g, l, r) }) {
				if attached[i]++; attached[i] == 1 {
					shares, groups, _, _ := s.resolve(g, l.Name, r)
					weights.Divide(shares, groups)
					all = append(all, slices.Concat(groups...)...)
				}
			}
		}
	}
	return service, all, attached
}

// gateway returns the key of the Gateway to which p refers, or the zero value.
func (p *parentRef) gateway(r *object) types.NamespacedName {
	if p.Group != group || p.Kind != "Gateway" {
		return types.NamespacedName{}
	}
	return types.NamespacedName{Namespace: cmp.Or(p.Namespace, r.Namespace), Name: p.Name}
}

// key returns the key of the object to which b refers.
func (b *backendRef) key(r *object) types.NamespacedName {
	return types.NamespacedName{Namespace: cmp.Or(b.Namespace, r.Namespace), Name: b.Name}
}

func (p *parentRef) selects(l *listener) bool {
	return (p.SectionName == "" || p.SectionName == l.Name) && (p.Port == 0 || p.Port == l.Port)
}

func (l *listener) admitsKind(kind string) bool {
	return kind == l.Protocol+"Route" && (len(l.AllowedRoutes.Kinds) == 0 || slices.Contains(l.AllowedRoutes.Kinds, routeKind{group, kind}))
}

// admits reports whether a listener admits a route by its kind and its namespace.
func (s *source) admits(g *object, l *listener, r *object) bool {
	from, ns := l.AllowedRoutes.Namespaces, s.get("Namespace", types.NamespacedName{Name: r.Namespace})
	selector, err := metav1.LabelSelectorAsSelector(from.Selector)
	return l.admitsKind(r.Kind) && (from.From == "All" || from.From == "Same" && r.Namespace == g.Namespace ||
		from.From == "Selector" && err == nil && ns != nil && selector.Matches(labels.Set(ns.Labels)))
}

// resolve returns the weights and the endpoints of the backends of a route, for a listener of
// a gateway, and the reason and the message of the condition ResolvedRefs.
func (s *source) resolve(g *object, port string, r *object) (shares []int64, groups [][]*api.EndpointSlice, reason, message string) {
	reason = "ResolvedRefs"
	for _, rule := range r.Spec.Rules { // the API admits one
		for _, ref := range rule.BackendRefs {
			slices, why := s.backend(g, fmt.Sprint(port, ":", len(groups), ":"), port, r, &ref)
			if shares, groups = append(shares, ref.Weight), append(groups, slices); why != "" {
				reason, message = why, fmt.Sprintf("%s %s, port %d", ref.Kind, ref.key(r), ref.Port)
			}
		}
	}
	return shares, groups, reason, message
}

// backend returns the endpoints of a backend of a route, or the reason why it has none.
func (s *source) backend(g *object, prefix, name string, r *object, ref *backendRef) (all []*api.EndpointSlice, reason string) {
	if ref.Group != "" || ref.Kind != "Service" {
		return nil, "InvalidKind"
	}
	if key := ref.key(r); key.Namespace != r.Namespace && !s.granted(r, key) {
		return nil, "RefNotPermitted"
	}
	state, _ := s.services.Load().States.Get(ref.key(r))
	if state == nil || state.Service == nil || state.Service.Type == api.ExternalName {
		return nil, "BackendNotFound"
	}
	i := slices.IndexFunc(state.Service.Ports, func(p api.PortMapping) bool { return p.Port == ref.Port && p.Protocol.String()+"Route" == r.Kind })
	if i < 0 {
		return nil, "BackendNotFound"
	}
	for _, from := range state.Slices {
		j := slices.IndexFunc(from.Ports, func(p api.EndpointPort) bool {
			return p.Name == state.Service.Ports[i].Name && p.Protocol == state.Service.Ports[i].Protocol
		})
		if j >= 0 {
			to := *from
			to.Namespace, to.ServiceName, to.Name = g.Namespace, g.Name, prefix+from.Name // names in Kubernetes have no colon
			to.Ports = []api.EndpointPort{{Name: name, Protocol: from.Ports[j].Protocol, Port: from.Ports[j].Port}}
			to.Endpoints = slices.Clone(from.Endpoints)
			for k := range to.Endpoints {
				to.Endpoints[k].Hints = nil // some endpoints would get more than their share
			}
			all = append(all, &to)
		}
	}
	return all, ""
}

// granted reports whether a ReferenceGrant permits a route to use a Service.
func (s *source) granted(r *object, service types.NamespacedName) bool {
	list, _ := s.informers["ReferenceGrant"].GetIndexer().ByIndex(cache.NamespaceIndex, service.Namespace)
	for _, o := range list {
		for _, from := range o.(*object).Spec.From {
			for _, to := range o.(*object).Spec.To {
				if from.Group == group && from.Kind == r.Kind && from.Namespace == r.Namespace &&
					to.Group == "" && to.Kind == "Service" && (to.Name == "" || to.Name == service.Name) {
					return true
				}
			}
		}
	}
	return false
}
