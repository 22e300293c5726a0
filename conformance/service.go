// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/parameters"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// namespace is the namespace of the services in cases.
const namespace = "kpng-conformance"

// The default ports of services.
const (
	servicePort = 80
	targetPort  = 8080
)

// service is a Service of a scene with its EndpointSlices. Cases modify the fields
// Service and slices, and then publish the scene again.
type service struct {
	*corev1.Service
	scene  *scene
	slices []*slice
}

// slice contains endpoints of a service. The method service.objects converts a slice to
// one EndpointSlice for each IP family.
type slice struct {
	name      string
	ports     []discoveryv1.EndpointPort
	endpoints []endpoint
	// The field only restricts the slice to endpoints of one family. The value 0 selects all
	// families of the service.
	only api.Family
	// weight is the annotation with the weight of the endpoints, or empty.
	weight string
}

// endpoint is an endpoint of a service, together with the host that answers there.
type endpoint struct {
	person
	discoveryv1.Endpoint
}

// addService adds a Service of type ClusterIP to the scene, without endpoints. The
// Service has the scene's IP family. For each protocol of the scene, it has port 80 with
// target port 8080.
func (s *scene) addService(name string) *service {
	families := []api.Family{s.family}
	policy, internal := corev1.IPFamilyPolicySingleStack, corev1.ServiceInternalTrafficPolicyCluster
	if s.family == 0 {
		families, policy = []api.Family{api.IPv4, api.IPv6}, corev1.IPFamilyPolicyRequireDualStack
	}
	svc := &service{Service: &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		// Each case uses a new name, because some fields of a Service are immutable.
		Namespace: namespace, Name: fmt.Sprintf("%s-%d", name, s.number),
	}}, scene: s}
	svc.Spec.Type = corev1.ServiceTypeClusterIP
	svc.Spec.SessionAffinity = corev1.ServiceAffinityNone
	svc.Spec.IPFamilyPolicy, svc.Spec.InternalTrafficPolicy = &policy, &internal
	for _, family := range families {
		svc.Spec.IPFamilies = append(svc.Spec.IPFamilies, corev1.IPFamily(family.String()))
		svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, s.clusterIP(family).String())
	}
	svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
	svc.addPort("", servicePort, targetPort)
	s.services = append(s.services, svc)
	return svc
}

// addPort adds a port for each protocol of the scene.
func (svc *service) addPort(name string, port, target int32) *service {
	for _, protocol := range svc.scene.protocols {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name:     strings.TrimPrefix(name+"-"+strings.ToLower(protocol.String()), "-"),
			Protocol: corev1.Protocol(protocol.String()), Port: port, TargetPort: intstr.FromInt32(target),
		})
	}
	return svc
}

// withNodePort changes the type to NodePort. If ports of different protocols have the
// same number, they get the same node port.
func (svc *service) withNodePort() *service {
	if svc.Spec.Type == corev1.ServiceTypeClusterIP {
		svc.Spec.Type = corev1.ServiceTypeNodePort
	}
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	numbers := map[int32]int32{}
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		if numbers[p.Port] == 0 {
			numbers[p.Port] = svc.scene.nodePort()
		}
		p.NodePort = numbers[p.Port]
	}
	return svc
}

// withExternalIP adds an external IP for each family of the service.
func (svc *service) withExternalIP() *service {
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	for _, family := range svc.families() {
		svc.Spec.ExternalIPs = append(svc.Spec.ExternalIPs, svc.scene.externalIP(family).String())
	}
	return svc
}

// withLoadBalancer changes the type to LoadBalancer, and adds a load-balancer IP for each
// family of the service.
func (svc *service) withLoadBalancer() *service {
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	allocate, vip := svc.Spec.Ports[0].NodePort != 0, corev1.LoadBalancerIPModeVIP
	svc.Spec.AllocateLoadBalancerNodePorts = &allocate
	for _, family := range svc.families() {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: svc.scene.externalIP(family).String(), IPMode: &vip})
	}
	return svc
}

// withAllFrontends gives the service every kind of frontend.
func (svc *service) withAllFrontends() *service {
	return svc.withNodePort().withExternalIP().withLoadBalancer()
}

func (svc *service) externalLocal() *service {
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	return svc
}

func (svc *service) internalLocal() *service {
	policy := corev1.ServiceInternalTrafficPolicyLocal
	svc.Spec.InternalTrafficPolicy = &policy
	return svc
}

// withAffinity adds session affinity with a timeout in seconds.
func (svc *service) withAffinity(seconds int32) *service {
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	return svc
}

func (svc *service) families() []api.Family {
	var families []api.Family
	for _, family := range svc.Spec.IPFamilies {
		families = append(families, map[corev1.IPFamily]api.Family{corev1.IPv4Protocol: api.IPv4, corev1.IPv6Protocol: api.IPv6}[family])
	}
	return families
}

// withEndpoints replaces the slices of the service by one slice. This slice has the given
// endpoints and the target ports of the service.
func (svc *service) withEndpoints(endpoints ...endpoint) *service {
	svc.slices = nil
	return svc.withSlice("1", targetPorts(svc.Spec.Ports), endpoints...)
}

// withSlice adds a slice with a name, ports and endpoints.
func (svc *service) withSlice(name string, ports []discoveryv1.EndpointPort, endpoints ...endpoint) *service {
	svc.slices = append(svc.slices, &slice{name: name, ports: ports, endpoints: endpoints})
	return svc
}

// weighted has endpoints and the weight that their annotation gives them.
type weighted struct {
	weight    string
	endpoints []endpoint
}

func weight(weight string, endpoints ...endpoint) weighted { return weighted{weight, endpoints} }

// withWeights replaces the slices of the service by one slice for each weight.
func (svc *service) withWeights(all ...weighted) *service {
	svc.slices = nil
	for i, w := range all {
		svc.withSlice(strconv.Itoa(i+1), targetPorts(svc.Spec.Ports), w.endpoints...)
		svc.slices[i].weight = w.weight
	}
	return svc
}

// with sets an annotation of the service. An empty value removes the annotation.
func (svc *service) with(key, value string) *service {
	if svc.Annotations == nil {
		svc.Annotations = map[string]string{}
	}
	svc.Annotations[key] = value
	if value == "" {
		delete(svc.Annotations, key)
	}
	return svc
}

// withRanges replaces the source ranges of the service.
func (svc *service) withRanges(ranges ...string) *service {
	svc.Spec.LoadBalancerSourceRanges = ranges
	return svc
}

// targetPorts returns EndpointSlice ports for service ports with numeric target ports.
func targetPorts(ports []corev1.ServicePort) []discoveryv1.EndpointPort {
	var targets []discoveryv1.EndpointPort
	for _, p := range ports {
		targets = append(targets, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &p.TargetPort.IntVal})
	}
	return targets
}

// objects returns copies of the current service and slices as API objects.
func (svc *service) objects() (*corev1.Service, []*discoveryv1.EndpointSlice) {
	var all []*discoveryv1.EndpointSlice
	for _, slice := range svc.slices {
		for _, family := range svc.families() {
			if slice.only == 0 || slice.only == family {
				all = append(all, slice.object(svc, family))
			}
		}
	}
	return svc.Service.DeepCopy(), all
}

func (sl *slice) object(svc *service, family api.Family) *discoveryv1.EndpointSlice {
	o := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: svc.Namespace, Name: svc.Name + "-" + suffix(family) + "-" + sl.name,
			Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name},
		},
		AddressType: discoveryv1.AddressType(family.String()),
		Ports:       slices.Clone(sl.ports),
	}
	for key, value := range svc.Labels {
		o.Labels[key] = value
	}
	if sl.weight != "" {
		o.Annotations = map[string]string{parameters.Weight: sl.weight}
	}
	for _, e := range sl.endpoints {
		e.Endpoint.Addresses = []string{e.Addr(family).String()}
		o.Endpoints = append(o.Endpoints, *e.Endpoint.DeepCopy())
	}
	return o.DeepCopy()
}

// asReady returns a ready endpoint at the host p.
func asReady(p person) endpoint { return p.serves(true, true, false) }

// asDraining returns a terminating and serving endpoint at the host p.
func asDraining(p person) endpoint { return p.serves(false, true, true) }

// asUnready returns an endpoint at the host p. The endpoint is neither ready nor serving.
func asUnready(p person) endpoint { return p.serves(false, false, false) }

func (p person) serves(ready, serving, terminating bool) endpoint {
	e := endpoint{person: p}
	e.Conditions = discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
	node := nodeNames[0]
	if p.Name == "d" || p.Name == "e" || p.Name == "node2" {
		node = nodeNames[1]
	}
	e.NodeName = &node
	return e
}

// forZone returns a copy of the endpoint with a topology hint for a zone.
func (e endpoint) forZone(name string) endpoint {
	e.Hints = e.Hints.DeepCopy()
	if e.Hints == nil {
		e.Hints = &discoveryv1.EndpointHints{}
	}
	e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: name})
	return e
}

// forNode returns a copy of the endpoint with a topology hint for a node.
func (e endpoint) forNode(name string) endpoint {
	e.Hints = e.Hints.DeepCopy()
	if e.Hints == nil {
		e.Hints = &discoveryv1.EndpointHints{}
	}
	e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: name})
	return e
}

// The methods below return addresses of the service's first port.

func (svc *service) clusterIP() netip.AddrPort {
	return svc.at(svc.Spec.ClusterIPs[0])
}

func (svc *service) externalIP() netip.AddrPort {
	return svc.at(svc.Spec.ExternalIPs[0])
}

func (svc *service) loadBalancerIP() netip.AddrPort {
	return svc.at(svc.Status.LoadBalancer.Ingress[0].IP)
}

// nodePort returns the node port at the node's address with index i.
func (svc *service) nodePort(i int) netip.AddrPort {
	return netip.AddrPortFrom(svc.scene.node.Addrs.Family(svc.scene.family)[i], uint16(svc.Spec.Ports[0].NodePort))
}

// externalAddresses returns the addresses of the first port, except the cluster IP.
func (svc *service) externalAddresses() []netip.AddrPort {
	var all []netip.AddrPort
	for _, ip := range svc.Spec.ExternalIPs {
		all = append(all, svc.at(ip))
	}
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		all = append(all, svc.at(ingress.IP))
	}
	if _, lacks := svc.scene.opts.Unsupported[NodePorts]; !lacks && svc.Spec.Ports[0].NodePort != 0 {
		all = append(all, svc.nodePort(0))
	}
	return all
}

// allAddresses returns every address of the first port.
func (svc *service) allAddresses() []netip.AddrPort {
	return append(svc.externalAddresses(), svc.clusterIP())
}

func (svc *service) at(ip string) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(svc.Spec.Ports[0].Port))
}

// withPort replaces the port of the given address, and returns the result.
func withPort(to netip.AddrPort, port int) netip.AddrPort {
	return netip.AddrPortFrom(to.Addr(), uint16(port))
}
