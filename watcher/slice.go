// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// EndpointSlice converts s, even if WantsSlice returns false for s. It returns nil if s
// is nil, if s names no service, or if its address type is not IPv4 or IPv6.
func (c *Converter) EndpointSlice(s *discoveryv1.EndpointSlice) (*api.EndpointSlice, []error) {
	if s == nil {
		return nil, nil
	}
	var r report
	service := s.Labels[cmp.Or(c.options.ServiceNameLabel, discoveryv1.LabelServiceName)]
	if service == "" {
		// If ServiceNameLabel is set, a slice without the label is for other proxies. This
		// is no problem.
		if c.options.ServiceNameLabel == "" {
			r.add("metadata.labels["+discoveryv1.LabelServiceName+"]", "missing, so the slice belongs to no service")
		}
		return nil, r.done()
	}
	var family api.Family
	switch s.AddressType {
	case discoveryv1.AddressTypeIPv4:
		family = api.IPv4
	case discoveryv1.AddressTypeIPv6:
		family = api.IPv6
	case discoveryv1.AddressTypeFQDN:
		return nil, nil
	default:
		r.add("addressType", "unknown address type %q", s.AddressType)
		return nil, r.done()
	}
	if strings.HasPrefix(s.Name, service) {
		service = s.Name[:len(service)] // use the memory of the name
	}
	out := &api.EndpointSlice{
		Name:        s.Name,
		ServiceName: service,
		Labels:      keep(s.Labels, c.options.KeepSliceLabels),
		Family:      family,
		TriggerTime: triggerTime(s),
	}
	c.ofSlices.mu.Lock()
	out.Namespace = c.ofSlices.string(s.Namespace)
	out.Ports = c.endpointPorts(s.Ports, &r)
	out.Endpoints = c.endpoints(s.Endpoints, family, &r)
	c.ofSlices.mu.Unlock()
	if weight, drain := c.parameters.WeightOf(s.Annotations, r.add); weight != 0 || drain {
		for i := range out.Endpoints {
			out.Endpoints[i].Weight, out.Endpoints[i].Drain = weight, drain
		}
	}
	return out, r.done()
}

// triggerTime returns the time of the endpoint change that caused this version of the
// slice, or the zero time if the slice has no such time.
func triggerTime(s *discoveryv1.EndpointSlice) time.Time {
	text := s.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if text == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}
	}
	return t
}

// endpointPorts converts the ports of a slice. It omits a port if an earlier port has the
// same name and protocol. The caller holds ofSlices.mu.
func (c *Converter) endpointPorts(in []discoveryv1.EndpointPort, r *report) []api.EndpointPort {
	if len(in) == 0 {
		return nil
	}
	out := make([]api.EndpointPort, 0, 4)
	type identity struct {
		name     string
		protocol api.Protocol
	}
	var seen distinct.Set[identity]
	for i := range in {
		p := &in[i]
		field := func(name string) string { return fmt.Sprintf("ports[%d].%s", i, name) }
		e := api.EndpointPort{Protocol: api.TCP}
		if p.Name != nil {
			e.Name = c.ofSlices.string(*p.Name)
		}
		if p.Protocol != nil {
			var known bool
			if e.Protocol, known = protocol(*p.Protocol); !known {
				r.add(field("protocol"), "unknown protocol %q", *p.Protocol)
			}
		}
		if !seen.Add(identity{e.Name, e.Protocol}) {
			r.add(field("name"), "%q with protocol %s is taken by an earlier port", e.Name, e.Protocol)
			continue
		}
		if p.Port != nil {
			if isPort(*p.Port) || *p.Port == 0 {
				e.Port = *p.Port
			} else {
				r.add(field("port"), "%d is not a port number", *p.Port)
			}
		}
		if p.AppProtocol != nil {
			e.AppProtocol = c.ofSlices.string(*p.AppProtocol)
		}
		out = append(out, e)
	}
	return sharedList(&c.ofSlices.endpointPorts, out)
}

// endpoints converts the endpoints of a slice. It uses only the first address of an
// endpoint, because the API forbids using the other addresses. It omits an endpoint
// without a usable address. The caller holds ofSlices.mu.
func (c *Converter) endpoints(in []discoveryv1.Endpoint, family api.Family, r *report) []api.SliceEndpoint {
	if len(in) == 0 {
		return nil
	}
	out := make([]api.SliceEndpoint, 0, len(in))
	for i := range in {
		e := &in[i]
		if len(e.Addresses) == 0 {
			r.add(fmt.Sprintf("endpoints[%d].addresses", i), "empty")
			continue
		}
		a, ok := parseAddr(e.Addresses[0])
		if !ok {
			r.add(fmt.Sprintf("endpoints[%d].addresses[0]", i), "%q is not an IP address", e.Addresses[0])
			continue
		}
		if api.FamilyOf(a) != family {
			r.add(fmt.Sprintf("endpoints[%d].addresses[0]", i), "%q is not an %s address, as the slice's addressType says", e.Addresses[0], family)
			continue
		}
		out = append(out, api.SliceEndpoint{Addr: a, Details: c.details(e), Conditions: conditions(&e.Conditions)})
	}
	return out
}

// details converts the details of an endpoint. The caller holds ofSlices.mu.
func (c *Converter) details(e *discoveryv1.Endpoint) *api.EndpointDetails {
	d := api.EndpointDetails{
		Hostname: value(e.Hostname, ""),
		NodeName: value(e.NodeName, ""),
		Zone:     value(e.Zone, ""),
		Hints:    c.hints(e.Hints),
		Target:   c.target(e.TargetRef),
	}
	switch {
	case d == api.EndpointDetails{}:
		return nil
	case d.Hostname != "" || d.Target != nil || d.Hints != nil && len(d.Hints.ForNodes)+len(d.Hints.ForZones) > 2:
		own := d // not shared: hardly any other endpoint has equal details
		own.NodeName, own.Zone = c.ofSlices.string(d.NodeName), c.ofSlices.string(d.Zone)
		return &own
	default:
		return sharedValue(&c.ofSlices.details, d, func() *api.EndpointDetails { own := d; return &own })
	}
}

// target returns the pod to which ref refers. It returns nil if ref refers to another
// kind of object or if KeepTargets is false. The caller holds ofSlices.mu.
func (c *Converter) target(ref *corev1.ObjectReference) *types.NamespacedName {
	if !c.options.KeepTargets || ref == nil || ref.Kind != "Pod" {
		return nil
	}
	return &types.NamespacedName{Namespace: c.ofSlices.string(ref.Namespace), Name: ref.Name}
}

// conditions converts conditions. For a nil field it uses the default in the API's
// documentation.
func conditions(c *discoveryv1.EndpointConditions) api.Conditions {
	return api.Conditions{
		Ready:       value(c.Ready, true),
		Serving:     value(c.Serving, true),
		Terminating: value(c.Terminating, false),
	}
}

// hints converts hints. Empty hints become nil. The caller holds ofSlices.mu.
func (c *Converter) hints(in *discoveryv1.EndpointHints) *api.Hints {
	if in == nil || len(in.ForNodes) == 0 && len(in.ForZones) == 0 {
		return nil
	}
	if len(in.ForNodes) <= 1 && len(in.ForZones) <= 1 {
		var k hintKey
		if len(in.ForNodes) == 1 {
			k.node = in.ForNodes[0].Name
		}
		if len(in.ForZones) == 1 {
			k.zone = in.ForZones[0].Name
		}
		if k == (hintKey{}) {
			return nil
		}
		return c.ofSlices.hint(k)
	}
	out := &api.Hints{}
	for _, n := range in.ForNodes {
		out.ForNodes = append(out.ForNodes, c.ofSlices.string(n.Name))
	}
	for _, z := range in.ForZones {
		out.ForZones = append(out.ForZones, c.ofSlices.string(z.Name))
	}
	return out
}

func value[T any](p *T, absent T) T {
	if p == nil {
		return absent
	}
	return *p
}
