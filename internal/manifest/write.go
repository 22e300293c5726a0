// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/parameters"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// DefaultAllPortsAnnotation is the annotation that marks all-ports services by default.
// The Kubernetes API has no field that marks such services.
const DefaultAllPortsAnnotation = "all-ports"

// WriteOptions configures Write. With the zero value, Write writes YAML for a program that
// reads it without a proxy name.
type WriteOptions struct {
	// JSON selects a List in JSON as the output. The default is YAML documents.
	JSON bool
	// ServiceProxyName, if not empty, is the value of the proxy label in services and
	// slices. The reader needs the same watcher.Options.ServiceProxyName.
	ServiceProxyName string
	// AllPortsAnnotation is the annotation of all-ports services. The reader needs
	// watcher.AllPortsAnnotated with this name. The default is DefaultAllPortsAnnotation.
	AllPortsAnnotation string
}

// Write writes the services, slices and nodes of s to w as manifests, sorted by name. A
// reader with the proxy name and annotation of opts gets a state equal to s, provided that
// the reader keeps all labels and annotations.
//
// If manifests cannot express an object, Write returns an error that names the first such
// object. API servers have no such objects. After an error the output is not usable.
func Write(w io.Writer, s *cluster.Objects, opts WriteOptions) error {
	if opts.AllPortsAnnotation == "" {
		opts.AllPortsAnnotation = DefaultAllPortsAnnotation
	}
	allPorts, everyKey := watcher.AllPortsAnnotated(opts.AllPortsAnnotation), []string{"*", "*/*"}
	converter, err := watcher.New(watcher.Options{ServiceProxyName: opts.ServiceProxyName, KeepLabels: everyKey, KeepAnnotations: everyKey, KeepSliceLabels: everyKey, KeepTargets: true, AllPorts: allPorts})
	if err != nil {
		return err
	}
	o := &objects{opts: opts, allPorts: allPorts, converter: converter, out: bufio.NewWriter(w), marshal: toYAML, separator: "---\n"}
	if opts.JSON {
		o.marshal, o.separator = json.Marshal, `{"apiVersion":"v1","kind":"List","items":[`+"\n"
	}
	for _, service := range s.Services.All() {
		o.service(service)
	}
	for _, slice := range s.Slices.All() {
		o.slice(slice)
	}
	for _, node := range s.Nodes.All() {
		o.node(node)
	}
	switch {
	case o.err != nil:
		return o.err
	case s.Services.Len()+s.Slices.Len()+s.Nodes.Len() == 0:
		o.out.WriteString(`{"apiVersion":"v1","kind":"List","items":[]}` + "\n") // is also YAML
	case opts.JSON:
		o.out.WriteString("\n]}\n")
	}
	return o.out.Flush() // reports errors of earlier writes too
}

// toYAML returns a value as YAML. Package yaml alone fails if JSON contains control
// characters. Annotations may have such characters.
func toYAML(value any) ([]byte, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	return yaml.JSONToYAML(plain.YAML(text))
}

// objects writes API objects. As a check, it converts each object back with a Converter.
type objects struct {
	opts      WriteOptions
	allPorts  func(*corev1.Service) bool
	converter *watcher.Converter
	out       *bufio.Writer
	marshal   func(any) ([]byte, error)
	separator string
	err       error
}

// write writes an object, and records an error if a reader would get a different object.
func (o *objects) write(name string, object metav1.Object, form any, same bool, problems []error, refused field.ErrorList) {
	text, err := o.marshal(form)
	if len(problems) > 0 {
		err = problems[0]
	} else if !same {
		err = errors.New("a reader would get a different object")
	} else if len(refused) > 0 && object.GetUID() == "" { // a reader warns about objects with a UID
		err = refused[0]
	}
	if err != nil && o.err == nil {
		o.err = fmt.Errorf("write %s: %w", name, err)
	}
	o.out.WriteString(o.separator + string(text))
	if o.opts.JSON {
		o.separator = ",\n"
	}
}

func (o *objects) service(s *api.Service) {
	first, second := s.IPs.ClusterIPs.Family(api.IPv4), s.IPs.ClusterIPs.Family(api.IPv6)
	if len(s.IPFamilies) > 0 && s.IPFamilies[0] == api.IPv6 {
		first, second = second, first
	}
	spec := corev1.ServiceSpec{
		Type: corev1.ServiceType(s.Type), HealthCheckNodePort: s.HealthCheckNodePort, LoadBalancerClass: unlessEmpty(s.LoadBalancerClass),
		ClusterIPs: slices.Concat(texts(first), texts(second)), ExternalIPs: texts(slices.Collect(s.IPs.ExternalIPs.All())),
	}
	if s.IPs.Headless {
		spec.ClusterIPs = []string{corev1.ClusterIPNone}
	}
	if len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	for _, f := range s.IPFamilies {
		spec.IPFamilies = append(spec.IPFamilies, corev1.IPFamily(f.String()))
	}
	for _, p := range s.Ports {
		target := intstr.FromInt32(p.TargetPort)
		if p.TargetPortName != "" {
			target = intstr.FromString(p.TargetPortName)
		}
		spec.Ports = append(spec.Ports, corev1.ServicePort{
			Name: p.Name, Protocol: corev1.Protocol(p.Protocol.String()), AppProtocol: unlessEmpty(p.AppProtocol),
			Port: p.Port, NodePort: p.NodePort, TargetPort: target,
		})
	}
	if s.Type == api.ExternalName {
		spec.ExternalName = "unknown.invalid" // an arbitrary name, because the real name is unknown
	}
	if s.ExternalTrafficToLocal {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if s.InternalTrafficToLocal {
		spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if s.AffinitySeconds != 0 {
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &s.AffinitySeconds}}
	}
	for _, filter := range s.SourceRanges {
		spec.LoadBalancerSourceRanges = append(spec.LoadBalancerSourceRanges, texts(filter.Prefixes)...)
	}
	var ingress []corev1.LoadBalancerIngress
	for ip := range s.IPs.LoadBalancerIPs.All() {
		ingress = append(ingress, corev1.LoadBalancerIngress{IP: ip.String(), IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
	}
	for ip := range s.IPs.ProxiedIPs.All() {
		ingress = append(ingress, corev1.LoadBalancerIngress{IP: ip.String(), IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)})
	}
	out := &corev1.Service{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, CreationTimestamp: metav1.NewTime(s.Created),
			Labels: maps.Clone(s.Labels), Annotations: maps.Clone(s.Annotations),
		},
		Spec:   spec,
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: ingress}},
	}
	if s.AllPorts && !o.allPorts(out) {
		metav1.SetMetaDataAnnotation(&out.ObjectMeta, o.opts.AllPortsAnnotation, "true")
	}
	for key, value := range parameters.Annotations(s) {
		metav1.SetMetaDataAnnotation(&out.ObjectMeta, key, value)
	}
	o.mark(&out.ObjectMeta)
	back, problems := o.converter.Service(out)
	back.Labels, back.Annotations = withKnownKeys(back.Labels, s.Labels), withKnownKeys(back.Annotations, s.Annotations)
	o.write("Service "+s.Key().String(), out, out, back.Equal(s), problems, ValidateService(out.DeepCopy()))
}

// mark adds the proxy label to an object's metadata.
func (o *objects) mark(meta *metav1.ObjectMeta) {
	if o.opts.ServiceProxyName != "" {
		metav1.SetMetaDataLabel(meta, watcher.LabelServiceProxyName, o.opts.ServiceProxyName)
	}
}

// withKnownKeys removes each entry of m if its key is not in the map known. Examples are
// the proxy label and the all-ports annotation.
func withKnownKeys(m, known map[string]string) map[string]string {
	maps.DeleteFunc(m, func(key, _ string) bool { _, ok := known[key]; return !ok })
	return m
}

func (o *objects) slice(s *api.EndpointSlice) {
	out := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Labels: maps.Clone(s.Labels)},
		AddressType: discoveryv1.AddressType(s.Family.String()),
		Endpoints:   []discoveryv1.Endpoint{},
	}
	metav1.SetMetaDataLabel(&out.ObjectMeta, discoveryv1.LabelServiceName, s.ServiceName)
	o.mark(&out.ObjectMeta)
	if !s.TriggerTime.IsZero() {
		out.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: s.TriggerTime.UTC().Format(time.RFC3339Nano)}
	}
	if len(s.Endpoints) > 0 && (s.Endpoints[0].Weight != 0 || s.Endpoints[0].Drain) {
		metav1.SetMetaDataAnnotation(&out.ObjectMeta, parameters.Weight, strconv.Itoa(int(s.Endpoints[0].Weight)))
	}
	for _, p := range s.Ports {
		port := discoveryv1.EndpointPort{Name: &p.Name, Protocol: ptr.To(corev1.Protocol(p.Protocol.String())), AppProtocol: unlessEmpty(p.AppProtocol)}
		if p.Port != 0 {
			port.Port = &p.Port
		}
		out.Ports = append(out.Ports, port)
	}
	for _, e := range s.Endpoints {
		d := e.Details.Value()
		endpoint := discoveryv1.Endpoint{
			Addresses: []string{e.Addr.String()}, Hostname: unlessEmpty(d.Hostname), NodeName: unlessEmpty(d.NodeName), Zone: unlessEmpty(d.Zone),
			Conditions: discoveryv1.EndpointConditions{Ready: &e.Ready, Serving: &e.Serving, Terminating: &e.Terminating},
		}
		if d.Hints != nil {
			endpoint.Hints = &discoveryv1.EndpointHints{}
			for _, name := range d.Hints.ForNodes {
				endpoint.Hints.ForNodes = append(endpoint.Hints.ForNodes, discoveryv1.ForNode{Name: name})
			}
			for _, name := range d.Hints.ForZones {
				endpoint.Hints.ForZones = append(endpoint.Hints.ForZones, discoveryv1.ForZone{Name: name})
			}
		}
		if d.Target != nil {
			endpoint.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: d.Target.Namespace, Name: d.Target.Name}
		}
		out.Endpoints = append(out.Endpoints, endpoint)
	}
	back, problems := o.converter.EndpointSlice(out)
	back.Labels = withKnownKeys(back.Labels, s.Labels)
	o.write("EndpointSlice "+s.Key().String(), out, out, back.Equal(s), problems, ValidateSlice(out))
}

func (o *objects) node(n *api.Node) {
	out := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, Labels: n.Labels},
		Spec:       corev1.NodeSpec{PodCIDRs: texts(n.PodCIDRs)},
	}
	if n.Deleting {
		out.DeletionTimestamp = &metav1.Time{Time: time.Unix(0, 0)} // an arbitrary time, because the real time is unknown
	}
	for _, a := range n.Addresses {
		out.Status.Addresses = append(out.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeAddressType(a.Type), Address: a.IP.String()})
	}
	for _, t := range n.Taints {
		out.Spec.Taints = append(out.Spec.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}
	back, problems := o.converter.Node(out)
	// Of the status, write only the addresses, because YAML would show many empty fields.
	object := map[string]any{
		"apiVersion": out.APIVersion, "kind": out.Kind, "metadata": out.ObjectMeta, "spec": out.Spec,
		"status": map[string]any{"addresses": out.Status.Addresses},
	}
	o.write("Node "+n.Name, out, object, back.Equal(n), problems, ValidateNode(out))
}

func unlessEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func texts[T fmt.Stringer](list []T) (out []string) {
	for _, v := range list {
		out = append(out, v.String())
	}
	return out
}
