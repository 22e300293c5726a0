// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	utilnet "k8s.io/utils/net"
)

// check collects what is wrong with one object: what the API server would not
// admit and a watcher.Converter, which is used to admitted objects, does not
// look for. Empty values stand for the API's defaults.
type check struct {
	fail func(field, message string)
}

// name applies one of the API's rules for names.
func (c check) name(field, name string, rule func(string) []string) {
	if name == "" {
		c.fail(field, "missing")
		return
	}
	for _, message := range rule(name) {
		c.fail(field, fmt.Sprintf("%q: %s", name, message))
	}
}

// oneOf is a function because methods have no type parameters.
func oneOf[T ~string](c check, field string, v T, known ...T) {
	if v == "" || slices.Contains(known, v) {
		return
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	c.fail(field, fmt.Sprintf("%q is none of %s", v, strings.Join(names, ", ")))
}

func (c check) service(s *corev1.Service) {
	c.name("metadata.name", s.Name, validation.IsDNS1123Label)
	c.name("metadata.namespace", s.Namespace, validation.IsDNS1123Label)
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	ips := s.Spec.ClusterIPs
	if len(ips) == 0 && s.Spec.ClusterIP != "" {
		ips = []string{s.Spec.ClusterIP}
	}
	c.servicePorts(&s.Spec, slices.Contains(ips, corev1.ClusterIPNone))
	c.clusterIPs(&s.Spec, ips)
	c.families(&s.Spec)
	if s.Spec.InternalTrafficPolicy != nil {
		oneOf(c, "spec.internalTrafficPolicy", *s.Spec.InternalTrafficPolicy,
			corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	}
	oneOf(c, "spec.externalTrafficPolicy", s.Spec.ExternalTrafficPolicy,
		corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	for i, in := range s.Status.LoadBalancer.Ingress {
		if in.IPMode != nil {
			oneOf(c, fmt.Sprintf("status.loadBalancer.ingress[%d].ipMode", i), *in.IPMode,
				corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
		}
	}
}

func (c check) servicePorts(spec *corev1.ServiceSpec, headless bool) {
	if len(spec.Ports) == 0 && !headless {
		c.fail("spec.ports", "missing; only headless services go without")
	}
	for i, p := range spec.Ports {
		field := fmt.Sprintf("spec.ports[%d]", i)
		switch {
		case p.Name != "":
			c.name(field+".name", p.Name, validation.IsDNS1123Label)
		case len(spec.Ports) > 1:
			c.fail(field+".name", "missing; a service with several ports names each")
		}
		if p.TargetPort.Type == intstr.String && p.TargetPort.StrVal != "" {
			c.name(field+".targetPort", p.TargetPort.StrVal, validation.IsValidPortName)
		}
	}
}

func (c check) clusterIPs(spec *corev1.ServiceSpec, ips []string) {
	if spec.ClusterIP != "" && spec.ClusterIP != ips[0] {
		c.fail("spec.clusterIPs[0]", fmt.Sprintf("%q is not spec.clusterIP, %q", ips[0], spec.ClusterIP))
	}
	if slices.Contains(ips, corev1.ClusterIPNone) {
		if len(ips) > 1 {
			c.fail("spec.clusterIPs", "None excludes all others")
		}
		if spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer {
			c.fail("spec.clusterIP", fmt.Sprintf("None does not go with type %s", spec.Type))
		}
		return
	}
	var seen []corev1.IPFamily
	for i, ip := range ips {
		var family corev1.IPFamily
		switch parsed := utilnet.ParseIPSloppy(ip); {
		case parsed == nil:
			continue
		case parsed.To4() != nil:
			family = corev1.IPv4Protocol
		default:
			family = corev1.IPv6Protocol
		}
		field := fmt.Sprintf("spec.clusterIPs[%d]", i)
		if len(spec.ClusterIPs) == 0 {
			field = "spec.clusterIP"
		}
		if slices.Contains(seen, family) {
			c.fail(field, fmt.Sprintf("%s is the second %s address", ip, family))
		} else if i < len(spec.IPFamilies) && spec.IPFamilies[i] == otherFamily(family) {
			c.fail(field, fmt.Sprintf("%s is not an %s address, as spec.ipFamilies[%d] says", ip, spec.IPFamilies[i], i))
		}
		seen = append(seen, family)
	}
}

func otherFamily(f corev1.IPFamily) corev1.IPFamily {
	if f == corev1.IPv4Protocol {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

func (c check) families(spec *corev1.ServiceSpec) {
	for i, f := range spec.IPFamilies {
		if slices.Contains(spec.IPFamilies[:i], f) {
			c.fail(fmt.Sprintf("spec.ipFamilies[%d]", i), fmt.Sprintf("%s is there twice", f))
		}
	}
	if policy := spec.IPFamilyPolicy; policy != nil {
		oneOf(c, "spec.ipFamilyPolicy", *policy,
			corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)
		if *policy == corev1.IPFamilyPolicySingleStack && len(spec.IPFamilies) > 1 {
			c.fail("spec.ipFamilies", "more than one with ipFamilyPolicy SingleStack")
		}
	}
}
