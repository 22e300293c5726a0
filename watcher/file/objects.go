// SPDX-License-Identifier: Apache-2.0

package file

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/watcher"
)

// objects makes API objects of the model: what a watcher.Converter does the other
// way round. What they are converted back to decides whether they are any good.
type objects struct {
	opts      WriteOptions
	converter *watcher.Converter
}

// errOther is about an object that manifests cannot tell.
var errOther = errors.New("it would be read as another one")

func (o *objects) service(s *api.Service) (*corev1.Service, error) {
	out := &corev1.Service{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace:         s.Namespace,
			Name:              s.Name,
			UID:               s.UID,
			CreationTimestamp: metav1.NewTime(s.Created),
			Labels:            maps.Clone(s.Labels),
			Annotations:       maps.Clone(s.Annotations),
		},
		Spec: corev1.ServiceSpec{
			Type:                corev1.ServiceType(s.Type),
			ExternalIPs:         texts(slices.Collect(s.IPs.ExternalIPs.All()), netip.Addr.String),
			HealthCheckNodePort: s.HealthCheckNodePort,
		},
	}
	if s.AllPorts && !watcher.AllPortsAnnotated(o.opts.AllPortsAnnotation)(out) {
		set(&out.Annotations, o.opts.AllPortsAnnotation, "true")
	}
	o.label(&out.Labels)
	clusterIPs(&out.Spec, s)
	for _, p := range s.Ports {
		port := corev1.ServicePort{
			Name:        p.Name,
			Protocol:    corev1.Protocol(p.Protocol.String()),
			Port:        p.Port,
			NodePort:    p.NodePort,
			TargetPort:  intstr.FromInt32(p.TargetPort),
			AppProtocol: unlessEmpty(p.AppProtocol),
		}
		if p.TargetPortName != "" {
			port.TargetPort = intstr.FromString(p.TargetPortName)
		}
		out.Spec.Ports = append(out.Spec.Ports, port)
	}
	if s.ExternalTrafficToLocal {
		out.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if s.InternalTrafficToLocal {
		out.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if affinity := s.SessionAffinity.ClientIP; affinity != nil {
		out.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		out.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(affinity.TimeoutSeconds)},
		}
	}
	for _, filter := range s.SourceRanges {
		out.Spec.LoadBalancerSourceRanges = append(out.Spec.LoadBalancerSourceRanges, texts(filter.Prefixes, netip.Prefix.String)...)
	}
	ingress(out, s.IPs.LoadBalancerIPs, corev1.LoadBalancerIPModeVIP)
	ingress(out, s.IPs.ProxiedIPs, corev1.LoadBalancerIPModeProxy)
	return out, o.checkService(out, s)
}

// clusterIPs writes the cluster IPs in the order of the service's families.
func clusterIPs(spec *corev1.ServiceSpec, s *api.Service) {
	for _, f := range s.IPFamilies {
		spec.IPFamilies = append(spec.IPFamilies, corev1.IPFamily(f.String()))
	}
	first, second := s.IPs.ClusterIPs.V4, s.IPs.ClusterIPs.V6
	if len(s.IPFamilies) > 0 && s.IPFamilies[0] == api.IPv6 {
		first, second = second, first
	}
	spec.ClusterIPs = append(texts(first, netip.Addr.String), texts(second, netip.Addr.String)...)
	if s.IPs.Headless {
		spec.ClusterIPs = []string{corev1.ClusterIPNone}
	}
	if len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
}

func ingress(out *corev1.Service, ips api.IPSet, mode corev1.LoadBalancerIPMode) {
	for ip := range ips.All() {
		out.Status.LoadBalancer.Ingress = append(out.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip.String(), IPMode: new(mode)})
	}
}

// checkService returns an error if out is not read as s.
func (o *objects) checkService(out *corev1.Service, s *api.Service) error {
	back, problems := o.converter.Service(out)
	for _, p := range problems {
		return fmt.Errorf("%s: %s", p.Field, p.Message)
	}
	// What is written in addition is only kept by who wants it.
	forget(back.Labels, s.Labels)
	forget(back.Annotations, s.Annotations)
	if !back.Equal(s) {
		return errOther
	}
	return nil
}

// forget removes from all what is not in known.
func forget(all, known map[string]string) {
	maps.DeleteFunc(all, func(key, _ string) bool {
		_, ok := known[key]
		return !ok
	})
}

func (o *objects) slice(s *api.EndpointSlice) (*discoveryv1.EndpointSlice, error) {
	out := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Labels: map[string]string{discoveryv1.LabelServiceName: s.ServiceName}},
		AddressType: discoveryv1.AddressType(s.Family.String()),
		Endpoints:   []discoveryv1.Endpoint{},
	}
	o.label(&out.Labels)
	if !s.TriggerTime.IsZero() {
		set(&out.Annotations, corev1.EndpointsLastChangeTriggerTime, s.TriggerTime.UTC().Format(time.RFC3339Nano))
	}
	for _, p := range s.Ports {
		port := discoveryv1.EndpointPort{Name: new(p.Name), Protocol: new(corev1.Protocol(p.Protocol.String())), AppProtocol: unlessEmpty(p.AppProtocol)}
		if p.Port != 0 {
			port.Port = new(p.Port)
		}
		out.Ports = append(out.Ports, port)
	}
	for i := range s.Endpoints {
		out.Endpoints = append(out.Endpoints, endpoint(&s.Endpoints[i]))
	}
	back, problems := o.converter.EndpointSlice(out)
	for _, p := range problems {
		return nil, fmt.Errorf("%s: %s", p.Field, p.Message)
	}
	if !back.Equal(s) {
		return nil, errOther
	}
	return out, nil
}

func endpoint(e *api.SliceEndpoint) discoveryv1.Endpoint {
	out := discoveryv1.Endpoint{
		Addresses:  []string{e.Addr.String()},
		Hostname:   unlessEmpty(e.Hostname),
		NodeName:   unlessEmpty(e.NodeName),
		Zone:       unlessEmpty(e.Zone),
		Conditions: discoveryv1.EndpointConditions{Ready: new(e.Ready), Serving: new(e.Serving), Terminating: new(e.Terminating)},
	}
	if e.Hints != nil {
		out.Hints = &discoveryv1.EndpointHints{}
		for _, name := range e.Hints.ForNodes {
			out.Hints.ForNodes = append(out.Hints.ForNodes, discoveryv1.ForNode{Name: name})
		}
		for _, name := range e.Hints.ForZones {
			out.Hints.ForZones = append(out.Hints.ForZones, discoveryv1.ForZone{Name: name})
		}
	}
	return out
}

// node returns a Node as JSON has it, without the parts of its status that would
// only say that they are empty.
func (o *objects) node(n *api.Node) (map[string]any, error) {
	out := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, Labels: n.Labels},
		Spec:       corev1.NodeSpec{PodCIDRs: texts(n.PodCIDRs, netip.Prefix.String)},
	}
	if len(out.Spec.PodCIDRs) > 0 {
		out.Spec.PodCIDR = out.Spec.PodCIDRs[0]
	}
	if n.Deleting {
		out.DeletionTimestamp = new(metav1.NewTime(time.Unix(0, 0))) // when, nobody knows
	}
	for _, a := range n.Addresses {
		out.Status.Addresses = append(out.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeAddressType(a.Type), Address: a.IP.String()})
	}
	for _, t := range n.Taints {
		out.Spec.Taints = append(out.Spec.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}
	back, problems := o.converter.Node(out)
	for _, p := range problems {
		return nil, fmt.Errorf("%s: %s", p.Field, p.Message)
	}
	if !back.Equal(n) {
		return nil, errOther
	}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, err
	}
	status := fields["status"].(map[string]any)
	delete(status, "nodeInfo")
	delete(status, "daemonEndpoints")
	return fields, nil
}

// label says for which proxy an object is.
func (o *objects) label(labels *map[string]string) {
	if o.opts.ServiceProxyName != "" {
		set(labels, watcher.LabelServiceProxyName, o.opts.ServiceProxyName)
	}
}

func set(m *map[string]string, key, value string) {
	if *m == nil {
		*m = map[string]string{}
	}
	(*m)[key] = value
}

func unlessEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func texts[T any](list []T, text func(T) string) []string {
	var out []string
	for _, v := range list {
		out = append(out, text(v))
	}
	return out
}
