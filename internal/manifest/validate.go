// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"
)

// The functions in this file return the errors of an API server of v1.37 that refuses a new
// object. docs/operate/run.md lists the exceptions. The functions first set the defaults
// that the rules depend on. test/manifests compares them with the API server's code.

// validator collects the errors of one object.
type validator struct{ errs field.ErrorList }

func (v *validator) add(errs ...*field.Error) { v.errs = append(v.errs, errs...) }

// check adds an error for each message.
func (v *validator) check(path *field.Path, value any, messages []string) {
	for _, m := range messages {
		v.add(field.Invalid(path, value, m))
	}
}

// oneOf adds an error if value is not one of the known values.
func oneOf[T ~string](v *validator, path *field.Path, value T, known ...T) {
	if !slices.Contains(known, value) {
		v.add(field.NotSupported(path, value, known))
	}
}

// unique adds an error if the set already has the key, and inserts the key.
func unique[K comparable](v *validator, path *field.Path, set sets.Set[K], key K, value any) {
	if set.Has(key) {
		v.add(field.Duplicate(path, value))
	}
	set.Insert(key)
}

func (v *validator) objectMeta(meta *metav1.ObjectMeta, namespaced bool, name apivalidation.ValidateNameFunc) {
	path := field.NewPath("metadata")
	if meta.Name == "" {
		v.add(field.Required(path.Child("name"), "a manifest must name its object, also if it has a generateName"))
		return
	}
	v.add(apivalidation.ValidateObjectMeta(meta, namespaced, name, path)...)
	for i, f := range meta.Finalizers {
		switch f {
		case "kubernetes", metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents:
		default:
			if !strings.Contains(f, "/") {
				v.add(field.Invalid(path.Child("finalizers").Index(i), f, "must be a standard finalizer or have a prefix"))
			}
		}
	}
}

// ip checks the text of an address. As in API servers before v1.36, IPv4 addresses may
// have leading zeros, and may be IPv4-mapped.
func (v *validator) ip(path *field.Path, text string) bool {
	errs := validation.IsValidIPForLegacyField(path, text, false, nil)
	v.add(errs...)
	return len(errs) == 0
}

func (v *validator) cidr(path *field.Path, text string) bool {
	errs := validation.IsValidCIDRForLegacyField(path, text, false, nil)
	v.add(errs...)
	return len(errs) == 0
}

// destination checks that packets can be sent to the address from another host. The API
// has this rule for endpoints and external IPs, but not for load-balancer IPs.
func (v *validator) destination(path *field.Path, text string) {
	ip := utilnet.ParseIPSloppy(text)
	for _, kind := range [...]struct {
		name string
		is   bool
	}{
		{"an unspecified", ip.IsUnspecified()},
		{"a loopback", ip.IsLoopback()},
		{"a link-local", ip.IsLinkLocalUnicast()},
		{"a link-local multicast", ip.IsLinkLocalMulticast()},
	} {
		if kind.is {
			v.add(field.Invalid(path, text, "must not be "+kind.name+" address"))
		}
	}
}

func ValidateService(s *corev1.Service) field.ErrorList {
	defaultService(s)
	var v validator
	v.objectMeta(&s.ObjectMeta, true, apivalidation.NameIsDNSLabel)
	spec, path := &s.Spec, field.NewPath("spec")
	headless := len(spec.ClusterIPs) == 1 && spec.ClusterIPs[0] == corev1.ClusterIPNone

	oneOf(&v, path.Child("type"), spec.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	if spec.Type == corev1.ServiceTypeExternalName {
		v.externalName(spec, path)
	} else {
		v.clusterIPs(spec, path, headless)
		if len(spec.Ports) == 0 && !headless {
			v.add(field.Required(path.Child("ports"), "only headless services may omit ports"))
		}
	}
	if headless && (spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer) {
		v.add(field.Invalid(path.Child("clusterIPs").Index(0), spec.ClusterIPs[0], fmt.Sprintf("not allowed with type %s", spec.Type)))
	}
	v.servicePorts(spec, path.Child("ports"))
	v.add(metavalidation.ValidateLabels(spec.Selector, path.Child("selector"))...)

	oneOf(&v, path.Child("sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		if t := *spec.SessionAffinityConfig.ClientIP.TimeoutSeconds; t < 1 || t > 86400 {
			v.add(field.Invalid(path.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), t, "must be between 1 and 86400"))
		}
	}
	for i, ip := range spec.ExternalIPs {
		if at := path.Child("externalIPs").Index(i); v.ip(at, ip) {
			v.destination(at, ip)
		}
	}
	v.loadBalancer(s, path)
	v.trafficPolicies(spec, path)

	const hints, mode = corev1.DeprecatedAnnotationTopologyAwareHints, corev1.AnnotationTopologyMode
	if a, ok := s.Annotations[hints]; ok {
		if b, ok := s.Annotations[mode]; ok && a != b {
			v.add(field.Invalid(field.NewPath("metadata", "annotations").Key(mode), b, "must equal the annotation "+hints))
		}
	}
	return v.errs
}

// defaultService sets defaults like an API server. Some of these defaults are for clients
// that do not know the field clusterIPs.
func defaultService(s *corev1.Service) {
	spec := &s.Spec
	setDefault(&spec.Type, corev1.ServiceTypeClusterIP)
	setDefault(&spec.SessionAffinity, corev1.ServiceAffinityNone)
	switch c := spec.SessionAffinityConfig; {
	case spec.SessionAffinity == corev1.ServiceAffinityNone:
		spec.SessionAffinityConfig = nil
	case spec.SessionAffinity == corev1.ServiceAffinityClientIP && (c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil):
		seconds := corev1.DefaultClientIPServiceAffinitySeconds
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		setDefault(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if spec.ClusterIP != "" && len(spec.ClusterIPs) == 0 {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if isExternal(spec) {
		setDefault(&spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
}

func setDefault[T comparable](value *T, def T) {
	if *value == *new(T) {
		*value = def
	}
}

// isExternal reports whether the API allows an external traffic policy for the service.
func isExternal(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeNodePort ||
		spec.Type == corev1.ServiceTypeClusterIP && len(spec.ExternalIPs) > 0
}

func (v *validator) externalName(spec *corev1.ServiceSpec, path *field.Path) {
	const why = "not allowed with type ExternalName"
	if len(spec.ClusterIPs) > 0 {
		v.add(field.Forbidden(path.Child("clusterIPs"), why))
	}
	if len(spec.IPFamilies) > 0 {
		v.add(field.Forbidden(path.Child("ipFamilies"), why))
	}
	if spec.IPFamilyPolicy != nil {
		v.add(field.Forbidden(path.Child("ipFamilyPolicy"), why))
	}
	if name := strings.TrimSuffix(spec.ExternalName, "."); name == "" {
		v.add(field.Required(path.Child("externalName"), "type ExternalName needs a name"))
	} else {
		v.check(path.Child("externalName"), name, validation.IsDNS1123Subdomain(name))
	}
}

func (v *validator) clusterIPs(spec *corev1.ServiceSpec, path *field.Path, headless bool) {
	families, ips := path.Child("ipFamilies"), path.Child("clusterIPs")
	seen := sets.Set[corev1.IPFamily]{}
	for i, f := range spec.IPFamilies {
		oneOf(v, families.Index(i), f, corev1.IPv4Protocol, corev1.IPv6Protocol)
		unique(v, families.Index(i), seen, f, f)
	}
	if p := spec.IPFamilyPolicy; p != nil {
		oneOf(v, path.Child("ipFamilyPolicy"), *p, corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)
	}
	switch {
	case len(spec.ClusterIPs) == 0 || headless && spec.ClusterIP == corev1.ClusterIPNone:
		return
	case spec.ClusterIPs[0] != spec.ClusterIP:
		v.add(field.Invalid(ips.Index(0), spec.ClusterIPs[0], fmt.Sprintf("must equal spec.clusterIP, %q", spec.ClusterIP)))
	}
	if headless {
		return
	}
	valid := true
	for i, ip := range spec.ClusterIPs {
		if i == 0 && ip == corev1.ClusterIPNone {
			v.add(field.Invalid(ips, spec.ClusterIPs, "None must be the only value"))
			valid = false
		} else {
			valid = v.ip(ips.Index(i), ip) && valid
		}
	}
	if len(spec.ClusterIPs) > 2 {
		v.add(field.TooMany(ips, len(spec.ClusterIPs), 2))
	}
	if !valid {
		return
	}
	for i, ip := range spec.ClusterIPs {
		other := corev1.IPv6Protocol
		if utilnet.IsIPv6String(ip) {
			other = corev1.IPv4Protocol
		}
		if i > 0 && utilnet.IsIPv6String(ip) == utilnet.IsIPv6String(spec.ClusterIPs[0]) {
			v.add(field.Invalid(ips.Index(i), ip, "must have another family than the first"))
		}
		if i < len(spec.IPFamilies) && spec.IPFamilies[i] == other {
			v.add(field.Invalid(ips.Index(i), ip, fmt.Sprintf("must be an %s address, as %s says", spec.IPFamilies[i], families.Index(i))))
		}
	}
}

func (v *validator) servicePorts(spec *corev1.ServiceSpec, path *field.Path) {
	type identity struct {
		protocol corev1.Protocol
		port     int32
	}
	names, ports, nodePorts := sets.Set[string]{}, sets.Set[identity]{}, sets.Set[identity]{}
	for i := range spec.Ports {
		p, at := &spec.Ports[i], path.Index(i)
		if p.Name != "" {
			v.check(at.Child("name"), p.Name, validation.IsDNS1123Label(p.Name))
			unique(v, at.Child("name"), names, p.Name, p.Name)
		} else if len(spec.Ports) > 1 {
			v.add(field.Required(at.Child("name"), "a service with several ports must name each"))
		}
		oneOf(v, at.Child("protocol"), p.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		v.check(at.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))
		unique(v, at.Child("port"), ports, identity{p.Protocol, p.Port}, p.Port)
		if p.NodePort != 0 {
			v.check(at.Child("nodePort"), p.NodePort, validation.IsValidPortNum(int(p.NodePort)))
			unique(v, at.Child("nodePort"), nodePorts, identity{p.Protocol, p.NodePort}, p.NodePort)
			if spec.Type == corev1.ServiceTypeClusterIP {
				v.add(field.Forbidden(at.Child("nodePort"), "not allowed with type ClusterIP"))
			}
		}
		if p.TargetPort.Type == intstr.String {
			v.check(at.Child("targetPort"), p.TargetPort.StrVal, validation.IsValidPortName(p.TargetPort.StrVal))
		} else if p.TargetPort.IntVal != p.Port {
			v.check(at.Child("targetPort"), p.TargetPort.IntVal, validation.IsValidPortNum(int(p.TargetPort.IntVal)))
		}
		if p.AppProtocol != nil {
			v.check(at.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))
		}
	}
}

func (v *validator) loadBalancer(s *corev1.Service, path *field.Path) {
	spec := &s.Spec
	annotation, annotated := s.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]
	annotations := field.NewPath("metadata", "annotations").Key(corev1.AnnotationLoadBalancerSourceRangesKey)
	annotated = annotated && len(spec.LoadBalancerSourceRanges) == 0 // otherwise, the field has precedence
	ingress := field.NewPath("status", "loadBalancer", "ingress")
	if spec.Type != corev1.ServiceTypeLoadBalancer {
		for _, f := range [...]struct {
			path *field.Path
			set  bool
		}{
			{path.Child("loadBalancerSourceRanges"), len(spec.LoadBalancerSourceRanges) > 0},
			{annotations, annotated},
			{path.Child("allocateLoadBalancerNodePorts"), spec.AllocateLoadBalancerNodePorts != nil},
			{path.Child("loadBalancerClass"), spec.LoadBalancerClass != nil},
			{ingress, len(s.Status.LoadBalancer.Ingress) > 0},
		} {
			if f.set {
				v.add(field.Forbidden(f.path, "only allowed with type LoadBalancer"))
			}
		}
	}
	for i, text := range spec.LoadBalancerSourceRanges {
		v.cidr(path.Child("loadBalancerSourceRanges").Index(i), strings.TrimSpace(text))
	}
	if annotated && strings.TrimSpace(annotation) != "" {
		for text := range strings.SplitSeq(annotation, ",") {
			v.cidr(annotations, strings.TrimSpace(text))
		}
	}
	if spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	if c := spec.LoadBalancerClass; c != nil {
		v.check(path.Child("loadBalancerClass"), *c, validation.IsQualifiedName(*c))
	}
	for i := range s.Status.LoadBalancer.Ingress {
		in, at := &s.Status.LoadBalancer.Ingress[i], ingress.Index(i)
		if in.IP != "" {
			v.ip(at.Child("ip"), in.IP)
		}
		switch {
		case in.IPMode == nil:
		case in.IP == "":
			v.add(field.Forbidden(at.Child("ipMode"), "not allowed without an ip"))
		default:
			oneOf(v, at.Child("ipMode"), *in.IPMode, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
		}
		if in.Hostname != "" {
			v.check(at.Child("hostname"), in.Hostname, validation.IsDNS1123Subdomain(in.Hostname))
			if utilnet.ParseIPSloppy(in.Hostname) != nil {
				v.add(field.Invalid(at.Child("hostname"), in.Hostname, "must not be an IP address"))
			}
		}
	}
}

func (v *validator) trafficPolicies(spec *corev1.ServiceSpec, path *field.Path) {
	at := path.Child("externalTrafficPolicy")
	if isExternal(spec) {
		oneOf(v, at, spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	} else if spec.ExternalTrafficPolicy != "" {
		v.add(field.Invalid(at, spec.ExternalTrafficPolicy, "only allowed with types LoadBalancer and NodePort, and with external IPs"))
	}
	if port := spec.HealthCheckNodePort; port != 0 {
		at := path.Child("healthCheckNodePort")
		if spec.Type == corev1.ServiceTypeLoadBalancer && spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
			v.check(at, port, validation.IsValidPortNum(int(port)))
		} else {
			v.add(field.Invalid(at, port, "only allowed with type LoadBalancer and externalTrafficPolicy Local"))
		}
	}
	if p := spec.InternalTrafficPolicy; p != nil {
		oneOf(v, path.Child("internalTrafficPolicy"), *p, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	}
	if d := spec.TrafficDistribution; d != nil {
		oneOf(v, path.Child("trafficDistribution"), *d, corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode)
	}
}

// The limits of an EndpointSlice.
const (
	maxSlicePorts     = 20000
	MaxSliceEndpoints = 1000
	maxAddresses      = 100
	maxHints          = 8
)

func ValidateSlice(s *discoveryv1.EndpointSlice) field.ErrorList {
	var v validator
	v.objectMeta(&s.ObjectMeta, true, apivalidation.NameIsDNSSubdomain)
	oneOf(&v, field.NewPath("addressType"), s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	ports := field.NewPath("ports")
	if len(s.Ports) > maxSlicePorts {
		v.add(field.TooMany(ports, len(s.Ports), maxSlicePorts))
		return v.errs
	}
	names := sets.Set[string]{}
	for i := range s.Ports {
		p, at := &s.Ports[i], ports.Index(i)
		name := ""
		if p.Name != nil {
			name = *p.Name
		}
		if name != "" {
			v.check(at.Child("name"), name, validation.IsDNS1123Label(name))
		}
		unique(&v, at.Child("name"), names, name, name)
		if p.Protocol != nil {
			oneOf(&v, at.Child("protocol"), *p.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		}
		if p.AppProtocol != nil {
			v.check(at.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))
		}
	}
	for i := range s.Endpoints {
		v.endpoint(&s.Endpoints[i], s.AddressType, field.NewPath("endpoints").Index(i))
	}
	return v.errs
}

func (v *validator) endpoint(e *discoveryv1.Endpoint, addressType discoveryv1.AddressType, path *field.Path) {
	addresses := path.Child("addresses")
	switch n := len(e.Addresses); {
	case n == 0:
		v.add(field.Required(addresses, "an endpoint needs an address"))
	case n > maxAddresses:
		v.add(field.TooMany(addresses, n, maxAddresses))
	}
	for i, text := range e.Addresses {
		at := addresses.Index(i)
		switch addressType {
		case discoveryv1.AddressTypeIPv4:
			if v.ip(at, text) {
				if utilnet.IsIPv6String(text) {
					v.add(field.Invalid(at, text, "must be an IPv4 address"))
				}
				v.destination(at, text)
			}
		case discoveryv1.AddressTypeIPv6:
			errs := validation.IsValidIP(at, text)
			if v.add(errs...); len(errs) == 0 {
				if !utilnet.IsIPv6String(text) {
					v.add(field.Invalid(at, text, "must be an IPv6 address"))
				}
				v.destination(at, text)
			}
		case discoveryv1.AddressTypeFQDN:
			v.add(validation.IsFullyQualifiedDomainName(at, text)...)
		}
	}
	if e.NodeName != nil {
		v.check(path.Child("nodeName"), *e.NodeName, apivalidation.NameIsDNSSubdomain(*e.NodeName, false))
	}
	if e.Hostname != nil {
		v.check(path.Child("hostname"), *e.Hostname, validation.IsDNS1123Label(*e.Hostname))
	}
	if e.Hints == nil {
		return
	}
	if at, n := path.Child("hints", "forZones"), len(e.Hints.ForZones); n > maxHints {
		v.add(field.TooMany(at, n, maxHints))
	} else {
		names := sets.Set[string]{}
		for i, zone := range e.Hints.ForZones {
			unique(v, at.Index(i).Child("name"), names, zone.Name, zone.Name)
			v.check(at.Index(i).Child("name"), zone.Name, validation.IsValidLabelValue(zone.Name))
		}
	}
	if at, n := path.Child("hints", "forNodes"), len(e.Hints.ForNodes); n > maxHints {
		v.add(field.TooMany(at, n, maxHints))
	} else {
		names := sets.Set[string]{}
		for i, node := range e.Hints.ForNodes {
			unique(v, at.Index(i).Child("name"), names, node.Name, node.Name)
			v.check(at.Index(i).Child("name"), node.Name, apivalidation.NameIsDNSSubdomain(node.Name, false))
		}
	}
}

func ValidateNode(n *corev1.Node) field.ErrorList {
	spec, path := &n.Spec, field.NewPath("spec")
	if spec.PodCIDR != "" && (len(spec.PodCIDRs) == 0 || spec.PodCIDRs[0] != spec.PodCIDR) {
		spec.PodCIDRs = []string{spec.PodCIDR} // like the API server
	}
	var v validator
	v.objectMeta(&n.ObjectMeta, false, apivalidation.NameIsDNSSubdomain)
	type identity struct {
		key    string
		effect corev1.TaintEffect
	}
	taints := sets.Set[identity]{}
	for i, t := range spec.Taints {
		at := path.Child("taints").Index(i)
		v.add(metavalidation.ValidateLabelName(t.Key, at.Child("key"))...)
		v.check(at.Child("value"), t.Value, validation.IsValidLabelValue(t.Value))
		oneOf(&v, at.Child("effect"), t.Effect, corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)
		unique(&v, at, taints, identity{t.Key, t.Effect}, t.ToString())
	}
	cidrs, valid := path.Child("podCIDRs"), true
	for i, text := range spec.PodCIDRs {
		valid = v.cidr(cidrs.Index(i), text) && valid
	}
	if dual, err := utilnet.IsDualStackCIDRStrings(spec.PodCIDRs); valid && len(spec.PodCIDRs) > 1 && (err != nil || !dual || len(spec.PodCIDRs) > 2) {
		v.add(field.Invalid(cidrs, spec.PodCIDRs, "must have at most one CIDR of each family"))
	}
	return v.errs
}
