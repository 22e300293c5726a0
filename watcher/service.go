// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
	"github.com/kpng-project/kpng/internal/parameters"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Service converts s and applies the API's defaults. It does so even if WantsService
// returns false for s. It returns nil if s is nil.
func (c *Converter) Service(s *corev1.Service) (*api.Service, []error) {
	if s == nil {
		return nil, nil
	}
	var r report
	r.call("Skip", c.options.Skip, s) // WantsService cannot report a panic
	p := c.parameters.OfService(s.Annotations, r.add)
	out := &api.Service{
		Name:                   s.Name,
		Type:                   serviceType(s.Spec.Type, &r),
		AllPorts:               r.call("AllPorts", c.options.AllPorts, s),
		ExternalTrafficToLocal: s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		InternalTrafficToLocal: s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
		Labels:                 keep(s.Labels, c.options.KeepLabels),
		Annotations:            keep(s.Annotations, c.options.KeepAnnotations),
		AffinitySeconds:        affinitySeconds(s, &r),
		Algorithm:              p.Algorithm,
		ResetConnections:       p.ResetConnections,
		UID:                    s.UID,
		Created:                s.CreationTimestamp.UTC(), // the output must not depend on this machine's time zone
		IPFamilies:             families(s.Spec.IPFamilies, &r),
	}
	if out.Type != api.ExternalName {
		out.IPs = c.serviceIPs(s, &r)
		out.SourceRanges = sourceRanges(s, &out.IPs, &p, &r)
		out.HealthCheckNodePort = healthCheckNodePort(s, &r)
	}
	c.ofServices.mu.Lock()
	out.Namespace = c.ofServices.string(s.Namespace)
	out.LoadBalancerClass = c.ofServices.string(value(s.Spec.LoadBalancerClass, ""))
	out.Ports = c.servicePorts(s.Spec.Ports, &r)
	c.ofServices.mu.Unlock()
	return out, r.done()
}

// isHeadless reports whether s is a headless service, with cluster IP None.
func isHeadless(s *corev1.Service) bool {
	if len(s.Spec.ClusterIPs) > 0 {
		return s.Spec.ClusterIPs[0] == corev1.ClusterIPNone
	}
	return s.Spec.ClusterIP == corev1.ClusterIPNone
}

func serviceType(t corev1.ServiceType, r *report) api.ServiceType {
	switch t {
	case corev1.ServiceTypeClusterIP, "":
		return api.ClusterIP
	case corev1.ServiceTypeNodePort:
		return api.NodePort
	case corev1.ServiceTypeLoadBalancer:
		return api.LoadBalancer
	case corev1.ServiceTypeExternalName:
		return api.ExternalName
	}
	r.add("spec.type", "unknown type %q", t)
	return api.ServiceType(t)
}

// Almost every service has one of these values of IPFamilies. Sharing them saves memory.
var (
	onlyIPv4 = []api.Family{api.IPv4}
	onlyIPv6 = []api.Family{api.IPv6}
)

func families(in []corev1.IPFamily, r *report) []api.Family {
	if len(in) == 1 {
		switch in[0] {
		case corev1.IPv4Protocol:
			return onlyIPv4
		case corev1.IPv6Protocol:
			return onlyIPv6
		}
	}
	var out []api.Family
	for i, name := range in {
		var f api.Family
		switch name {
		case corev1.IPv4Protocol:
			f = api.IPv4
		case corev1.IPv6Protocol:
			f = api.IPv6
		default:
			r.add(fmt.Sprintf("spec.ipFamilies[%d]", i), "unknown IP family %q", name)
			continue
		}
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

func (c *Converter) serviceIPs(s *corev1.Service, r *report) api.ServiceIPs {
	ips := api.ServiceIPs{Headless: isHeadless(s)}
	switch {
	case ips.Headless:
	case len(s.Spec.ClusterIPs) > 0:
		ips.ClusterIPs = frontendIPs(s.Spec.ClusterIPs, "spec.clusterIPs", r)
	default:
		ips.ClusterIPs = api.NewIPSet(frontendIP(s.Spec.ClusterIP, "spec.clusterIP", -1, r))
	}
	if !c.options.IgnoreExternalIPs {
		ips.ExternalIPs = frontendIPs(s.Spec.ExternalIPs, "spec.externalIPs", r)
	}
	var few [2][4]netip.Addr
	served, proxied := few[0][:0], few[1][:0]
	for i := range s.Status.LoadBalancer.Ingress {
		in := &s.Status.LoadBalancer.Ingress[i]
		ip := frontendIP(in.IP, "status.loadBalancer.ingress", i, r)
		if in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP {
			proxied = append(proxied, ip)
		} else {
			served = append(served, ip)
		}
	}
	ips.LoadBalancerIPs, ips.ProxiedIPs = api.NewIPSet(served...), api.NewIPSet(proxied...)
	return ips
}

func frontendIPs(list []string, field string, r *report) api.IPSet {
	var few [4]netip.Addr
	addrs := few[:0]
	for i, s := range list {
		addrs = append(addrs, frontendIP(s, field, i, r))
	}
	return api.NewIPSet(addrs...)
}

// frontendIP returns the address s. If s is empty or not usable, it returns the zero
// Addr. It reports an address that is invalid, unspecified or loopback. At an
// unspecified or loopback address, a frontend would break other programs on every node.
// The problem names entry i of the field, or only the field if i is -1.
func frontendIP(s, field string, i int, r *report) netip.Addr {
	a, ok := parseAddr(s)
	if ok && !a.IsUnspecified() && !a.IsLoopback() {
		return a
	}
	if i >= 0 {
		field = fmt.Sprintf("%s[%d]", field, i)
	}
	switch {
	case ok:
		r.add(field, "%s means the host itself; it gets no frontend", a)
	case strings.TrimSpace(s) != "":
		r.add(field, "%q is not an IP address", s)
	}
	return netip.Addr{}
}

// sourceRanges converts spec.loadBalancerSourceRanges, which limits access to the
// load-balancer IPs or, with a traffic parameter, to all frontends. Like kube-proxy, it
// ignores the old annotation for source ranges.
//
// If all ranges in the field are invalid, the result admits no clients. If the service
// names ranges to deny instead, the result has the ranges of all other addresses. So
// proxies only handle admitted ranges.
func sourceRanges(s *corev1.Service, ips *api.ServiceIPs, p *parameters.Service, r *report) []api.SourceRanges {
	f := api.SourceRanges{TargetIPs: ips.LoadBalancerIPs}
	if p.Everywhere {
		f.NodePorts = true
		var all []netip.Addr
		for _, set := range [...]api.IPSet{ips.ClusterIPs, ips.LoadBalancerIPs, ips.ExternalIPs} {
			all = slices.AppendSeq(all, set.All())
		}
		f.TargetIPs = api.NewIPSet(all...)
	}
	named := false
	for i, text := range s.Spec.LoadBalancerSourceRanges {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		named = true
		if p, ok := parsePrefix(text); ok {
			f.Prefixes = append(f.Prefixes, p)
		} else {
			r.add(fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), "%q is not a CIDR; it admits no source", text)
		}
	}
	if !named || f.TargetIPs.IsZero() && !f.NodePorts {
		return nil
	}
	if p.Deny {
		var ok bool
		if f.Prefixes, ok = parameters.AllExcept(f.Prefixes); !ok {
			r.add("spec.loadBalancerSourceRanges", "too many denied sources; no source is admitted")
		}
	}
	return []api.SourceRanges{f}
}

// healthCheckNodePort returns spec.healthCheckNodePort for type LoadBalancer with
// externalTrafficPolicy Local, otherwise 0.
func healthCheckNodePort(s *corev1.Service, r *report) int32 {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer || s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return 0
	}
	return port(s.Spec.HealthCheckNodePort, "spec.healthCheckNodePort", r)
}

// maxAffinitySeconds is the API's maximum timeout of session affinity.
const maxAffinitySeconds = 86400

// affinitySeconds returns the timeout of session affinity, or 0 if the service has none.
func affinitySeconds(s *corev1.Service, r *report) int32 {
	switch s.Spec.SessionAffinity {
	case corev1.ServiceAffinityNone, "":
		return 0
	case corev1.ServiceAffinityClientIP:
	default:
		r.add("spec.sessionAffinity", "unknown affinity %q", s.Spec.SessionAffinity)
		return 0
	}
	timeout := corev1.DefaultClientIPServiceAffinitySeconds
	if cfg := s.Spec.SessionAffinityConfig; cfg != nil && cfg.ClientIP != nil && cfg.ClientIP.TimeoutSeconds != nil {
		if t := *cfg.ClientIP.TimeoutSeconds; t >= 1 && t <= maxAffinitySeconds {
			timeout = t
		} else {
			r.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not between 1 and %d; using %d",
				t, maxAffinitySeconds, timeout)
		}
	}
	return timeout
}

// servicePorts converts the ports of a service. It omits a port if its number is invalid,
// or if an earlier port has the same name or the same number and protocol. The caller
// holds ofServices.mu.
func (c *Converter) servicePorts(in []corev1.ServicePort, r *report) []api.PortMapping {
	if len(in) == 0 {
		return nil
	}
	out := make([]api.PortMapping, 0, 4)
	var names distinct.Set[string]
	var numbers distinct.Set[portNumber]
	for i := range in {
		p := &in[i]
		field := func(name string) string { return fmt.Sprintf("spec.ports[%d].%s", i, name) }
		m := api.PortMapping{Port: p.Port}
		if !isPort(p.Port) {
			r.add(field("port"), "%d is not a port number", p.Port)
			continue
		}
		var known bool
		if m.Protocol, known = protocol(p.Protocol); !known {
			r.add(field("protocol"), "unknown protocol %q", p.Protocol)
		}
		switch {
		case names.Has(p.Name):
			r.add(field("name"), "the name %q is taken by an earlier port", p.Name)
			continue
		case known && !numbers.Add(portNumber{m.Protocol, m.Port}):
			r.add(field("port"), "%d/%s is taken by an earlier port", m.Port, m.Protocol)
			continue
		}
		names.Add(p.Name)
		if p.NodePort != 0 {
			if isPort(p.NodePort) {
				m.NodePort = p.NodePort
			} else {
				r.add(field("nodePort"), "%d is not a port number", p.NodePort)
			}
		}
		switch {
		case p.TargetPort.Type == intstr.String && p.TargetPort.StrVal != "":
			m.TargetPortName = c.ofServices.string(p.TargetPort.StrVal)
		case p.TargetPort.Type == intstr.Int && isPort(p.TargetPort.IntVal):
			m.TargetPort = p.TargetPort.IntVal
		default:
			if p.TargetPort.IntVal != 0 {
				r.add(field("targetPort"), "%d is not a port number; using %d", p.TargetPort.IntVal, p.Port)
			}
			m.TargetPort = p.Port
		}
		m.Name = c.ofServices.string(p.Name)
		if p.AppProtocol != nil {
			m.AppProtocol = c.ofServices.string(*p.AppProtocol)
		}
		out = append(out, m)
	}
	if len(out) == 1 && out[0].NodePort != 0 { // node ports differ between services
		return []api.PortMapping{out[0]}
	}
	return sharedList(&c.ofServices.servicePorts, out)
}

type portNumber struct {
	protocol api.Protocol
	number   int32
}

func isPort(p int32) bool { return p >= 1 && p <= 65535 }

// port returns p if it is a valid port number. Otherwise it returns 0, and reports a
// problem unless p is 0.
func port(p int32, field string, r *report) int32 {
	if p != 0 && !isPort(p) {
		r.add(field, "%d is not a port number", p)
		return 0
	}
	return p
}

// protocol converts p. If p is empty, the result is TCP, the API's default.
func protocol(p corev1.Protocol) (_ api.Protocol, known bool) {
	switch p {
	case corev1.ProtocolTCP, "":
		return api.TCP, true
	case corev1.ProtocolUDP:
		return api.UDP, true
	case corev1.ProtocolSCTP:
		return api.SCTP, true
	}
	return api.UnknownProtocol, false
}

// keep returns the entries whose key matches a pattern. All patterns must be valid.
func keep(in map[string]string, patterns []string) map[string]string {
	var out map[string]string
	if len(patterns) == 0 {
		return nil
	}
	for k, v := range in {
		for _, p := range patterns {
			if ok, _ := path.Match(p, k); ok {
				if out == nil {
					out = map[string]string{}
				}
				out[k] = v
				break
			}
		}
	}
	return out
}
