// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/watcher/objects"
	"github.com/kpng-project/kpng/weights"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

// protocols are the protocols of listeners. The kind of a listener's routes begins with the
// protocol.
var protocols = map[string]api.Protocol{"TCP": api.TCP, "UDP": api.UDP}

// translate returns the service and the slices of a gateway, and the number of routes of each
// listener.
func (s *source) translate(g *object) (service *api.Service, list []*api.EndpointSlice, attached []int32) {
	service = &api.Service{Namespace: g.Namespace, Name: g.Name, Type: api.ClusterIP, UID: g.UID, Created: g.CreationTimestamp.UTC()}
	if own, _ := s.own.Snapshot().States.Get(g.service().NamespacedName); own != nil && own.Service != nil {
		service.IPs.ClusterIPs = own.Service.IPs.ClusterIPs
	}
	routes := s.objects.Referring(objects.Key{Kind: "Gateway", NamespacedName: g.key()})
	slices.SortFunc(routes, func(a, b *object) int { // the oldest route of a listener gets the traffic
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.key().String(), b.key().String()))
	})
	node, _ := s.backends.Snapshot().Nodes.Get(s.NodeName)
	attached = make([]int32, len(g.Spec.Listeners))
	for i := range g.Spec.Listeners {
		l := &g.Spec.Listeners[i]
		port := api.PortMapping{Name: fmt.Sprint(l.Port, l.Protocol), Protocol: protocols[l.Protocol], Port: l.Port, TargetPort: l.Port}
		if port.Protocol == api.UnknownProtocol {
			continue
		}
		service.Ports = append(service.Ports, port)
		for _, r := range routes {
			if !slices.ContainsFunc(r.Spec.ParentRefs, func(p parentRef) bool { return p.gateway(r).NamespacedName == g.key() && p.selects(l) }) || !s.admits(g, l, r) {
				continue
			}
			if attached[i]++; attached[i] == 1 {
				backends, _, _ := s.resolve(r)
				list = append(list, weights.Divide(g.key(), &port, backends, node)...)
			}
		}
	}
	return service, list, attached
}

func (p *parentRef) selects(l *listener) bool {
	return (p.SectionName == "" || p.SectionName == l.Name) && (p.Port == 0 || p.Port == l.Port)
}

// kind returns the kind of routes that have the protocol of a listener.
func (l *listener) kind() metav1.GroupKind {
	return metav1.GroupKind{Group: group, Kind: l.Protocol + "Route"}
}

func (l *listener) admitsKind(kind string) bool {
	return protocols[l.Protocol] != api.UnknownProtocol && kind == l.kind().Kind &&
		(len(l.AllowedRoutes.Kinds) == 0 || slices.Contains(l.AllowedRoutes.Kinds, l.kind()))
}

// admits reports whether a listener admits a route by its kind and its namespace.
func (s *source) admits(g *object, l *listener, r *object) bool {
	from, ns := l.AllowedRoutes.Namespaces, s.objects.Get(objects.NewKey("Namespace", "", r.Namespace))
	selector, err := metav1.LabelSelectorAsSelector(from.Selector)
	return l.admitsKind(r.Kind) && (from.From == "All" || from.From == "Same" && r.Namespace == g.Namespace ||
		from.From == "Selector" && err == nil && ns != nil && selector.Matches(labels.Set(ns.Labels)))
}

// resolve returns the backends of a route, and the reason and the message of its condition
// ResolvedRefs.
func (s *source) resolve(r *object) (all []weights.Backend, reason, message string) {
	reason = "ResolvedRefs"
	for _, rule := range r.Spec.Rules { // the API admits only one rule
		for _, ref := range rule.BackendRefs {
			backend := weights.Backend{Weight: ref.Weight}
			if why := s.find(&backend, r, &ref); why != "" {
				reason, message = why, fmt.Sprintf("%s %s, port %d", ref.Kind, ref.service(r).NamespacedName, ref.Port)
			}
			all = append(all, backend)
		}
	}
	return all, reason, message
}

// find sets the slices of a backend, or returns the reason why it has none.
func (s *source) find(backend *weights.Backend, r *object, ref *backendRef) (reason string) {
	key := ref.service(r).NamespacedName
	if ref.Group != "" || ref.Kind != "Service" {
		return "InvalidKind"
	}
	if key.Namespace != r.Namespace && !s.granted(r, key) {
		return "RefNotPermitted"
	}
	state, _ := s.backends.Snapshot().States.Get(key)
	if state == nil || state.Service == nil || state.Service.Type == api.ExternalName {
		return "BackendNotFound"
	}
	for _, p := range state.Service.Ports {
		if p.Port == ref.Port && p.Protocol.String()+"Route" == r.Kind {
			backend.Slices, backend.Port = state.Slices, p.Name
			return ""
		}
	}
	return "BackendNotFound"
}

// granted reports whether a ReferenceGrant permits a route to use a Service.
func (s *source) granted(r *object, service types.NamespacedName) bool {
	for _, grant := range s.objects.In("ReferenceGrant", service.Namespace) {
		for _, from := range grant.Spec.From {
			for _, to := range grant.Spec.To {
				if from.Group == group && from.Kind == r.Kind && from.Namespace == r.Namespace &&
					to.Group == "" && to.Kind == "Service" && (to.Name == "" || to.Name == service.Name) {
					return true
				}
			}
		}
	}
	return false
}
