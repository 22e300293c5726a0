// SPDX-License-Identifier: Apache-2.0

package kpdiff

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// thisNode is the name of the node on which both proxies run.
const thisNode = "n1"

// clusterState is a service, its EndpointSlices, and the zone of the node n1. No two endpoints
// have the same address, because the proxies treat endpoints with the same address
// differently: kube-proxy uses any of them, and kpng uses the best of them.
type clusterState struct {
	service *corev1.Service
	slices  []*discoveryv1.EndpointSlice
	zone    string
}

func (c *clusterState) String() string {
	text, err := json.MarshalIndent(struct {
		Zone    string
		Service *corev1.Service
		Slices  []*discoveryv1.EndpointSlice
	}{c.zone, c.service, c.slices}, "", " ")
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// hasOtherPorts reports whether any EndpointSlice has a port that the service does not
// have.
func (c *clusterState) hasOtherPorts() bool {
	for _, slice := range c.slices {
		for _, p := range slice.Ports {
			if !slices.ContainsFunc(c.service.Spec.Ports, func(s corev1.ServicePort) bool { return s.Name == *p.Name && s.Protocol == *p.Protocol }) {
				return true
			}
		}
	}
	return false
}

type chance struct{ *rand.Rand }

// oneIn returns true with probability 1/n.
func (r chance) oneIn(n int) bool { return r.IntN(n) == 0 }

func (r chance) condition() *bool { return pick(r, nil, new(true), new(false)) }

func pick[T any](r chance, from ...T) T { return from[r.IntN(len(from))] }

// protocols and ports describe three service ports. A service has the first port, the
// first two ports, or all three.
var (
	protocols = []corev1.Protocol{"TCP", "UDP", "TCP"}
	ports     = []int32{80, 53, 53}
)

func newCluster(rnd *rand.Rand) *clusterState {
	r := chance{rnd}
	c := &clusterState{zone: pick(r, "", "a", "b")}
	names := []string{"http", "dns", "dns-tcp"}[:1+r.IntN(3)]
	if len(names) == 1 && r.oneIn(2) {
		names[0] = ""
	}
	c.service = r.service("svc", 1, names)
	e := r.endpointMaker("svc")
	for i := range r.IntN(5) {
		c.slices = append(c.slices, e.slice(fmt.Sprintf("s%d", i), names))
	}
	return c
}

// service returns a random service. Two services with different values of place have
// different addresses and node ports.
func (r chance) service(name string, place int, names []string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	s.Spec.IPFamilies = pick(r, []corev1.IPFamily{"IPv4"}, []corev1.IPFamily{"IPv6"}, []corev1.IPFamily{"IPv4", "IPv6"}, []corev1.IPFamily{"IPv6", "IPv4"})
	for _, f := range s.Spec.IPFamilies {
		ip := "fd00::%d"
		if f == "IPv4" {
			ip = pick(r, "10.96.0.%d", "010.096.0.%d", "::ffff:10.96.0.%d")
		}
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf(ip, place))
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	s.Spec.Type = pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer)
	if r.oneIn(20) {
		s.Spec.Type = corev1.ServiceTypeExternalName
	}
	for i, name := range names {
		port := corev1.ServicePort{
			Name: name, Protocol: protocols[i], Port: ports[i],
			TargetPort: pick(r, intstr.FromInt32(8080), intstr.FromString("web"), intstr.FromInt32(0)),
		}
		if s.Spec.Type != corev1.ServiceTypeClusterIP && !r.oneIn(4) {
			port.NodePort = int32(30000 + 10*place + i)
		}
		s.Spec.Ports = append(s.Spec.Ports, port)
	}
	if r.oneIn(2) {
		for _, ip := range pick(r, []string{"1.2.%d.4"}, []string{"1.2.%d.4", "fd01::%d", ""}, []string{"fd01::%d"}, []string{"001.2.%d.4", "1.2.%d.5"}) {
			if ip != "" {
				ip = fmt.Sprintf(ip, place)
			}
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, ip)
		}
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer || r.oneIn(20) {
		r.loadBalancer(s, place)
	}
	s.Spec.ExternalTrafficPolicy = pick(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal, "")
	s.Spec.InternalTrafficPolicy = pick(r, nil, new(corev1.ServiceInternalTrafficPolicyCluster), new(corev1.ServiceInternalTrafficPolicyLocal))
	if r.oneIn(2) {
		s.Spec.HealthCheckNodePort = int32(31000 + place)
	}
	s.Spec.SessionAffinity = corev1.ServiceAffinityNone
	if r.oneIn(3) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(1 + r.Int32N(86400))}}
	}
	return s
}

func (r chance) loadBalancer(s *corev1.Service, place int) {
	for _, ip := range []string{fmt.Sprintf("5.5.5.%d", place), fmt.Sprintf("fd05::%d", place), ""} {
		if r.oneIn(2) {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
				IP: ip, Hostname: "x", IPMode: pick(r, nil, new(corev1.LoadBalancerIPModeVIP), new(corev1.LoadBalancerIPModeProxy)),
			})
		}
	}
	if r.oneIn(2) {
		s.Spec.LoadBalancerSourceRanges = pick(r,
			[]string{"192.168.0.0/16", " fd09::/16 "},
			[]string{"0.0.0.0/0"},
			[]string{"192.168.1.77/24", "0.0.0.0/0", "fd09::/64"},
			[]string{"192.168.1.0/24", "::/0"},
		)
	}
}

// endpointMaker creates the EndpointSlices of a cluster. Most endpoints of a cluster have
// hints and conditions of the same kind. If each endpoint had random hints, kube-proxy
// would rarely use the hints, because it ignores hints unless all endpoints have hints.
type endpointMaker struct {
	chance
	hints      int // 0: no hints, 1: mostly zone hints, 2: mostly zone and node hints, else any hints
	conditions int // 0: any conditions, 1: no endpoint is ready, 2: all endpoints are ready
	service    string
	next       func() int // the number of the next endpoint; the endpoint's address contains this number
}

// endpointMaker numbers the endpoints from 1 on.
func (r chance) endpointMaker(service string) *endpointMaker {
	made := 0
	return &endpointMaker{
		chance: r, hints: r.IntN(5), conditions: r.IntN(3), service: service,
		next: func() int { made++; return made },
	}
}

func (r *endpointMaker) slice(name string, names []string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: r.service},
	}}
	s.AddressType = pick(r.chance, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeIPv6)
	if r.oneIn(12) {
		s.AddressType = discoveryv1.AddressTypeFQDN
	}
	for i, name := range names {
		if r.oneIn(6) {
			continue
		}
		port := discoveryv1.EndpointPort{Name: new(name), Protocol: new(protocols[i]), Port: new(pick[int32](r.chance, 8080, 8080, 9090))}
		if r.oneIn(12) {
			port.Port = pick(r.chance, nil, new(int32(0)))
		}
		if r.oneIn(12) {
			port.Protocol = new(corev1.ProtocolSCTP)
		}
		if r.oneIn(12) {
			port.Name = new("other")
		}
		s.Ports = append(s.Ports, port)
	}
	for range r.IntN(4) {
		s.Endpoints = append(s.Endpoints, r.endpoint(s.AddressType))
	}
	return s
}

func (r *endpointMaker) endpoint(t discoveryv1.AddressType) discoveryv1.Endpoint {
	number := r.next()
	address := "x.example.com"
	switch t {
	case discoveryv1.AddressTypeIPv4:
		address = pick(r.chance, fmt.Sprintf("172.16.0.%d", number), fmt.Sprintf("172.016.0.%d", number))
	case discoveryv1.AddressTypeIPv6:
		address = fmt.Sprintf("fd10::%x", number)
	}
	e := discoveryv1.Endpoint{
		Addresses:  []string{address},
		Conditions: discoveryv1.EndpointConditions{Ready: r.condition(), Serving: r.condition(), Terminating: r.condition()},
		NodeName:   pick(r.chance, nil, new(thisNode), new("n2"), new("N1")),
		Zone:       pick(r.chance, nil, new("a"), new("b")),
	}
	if r.oneIn(8) {
		e.Addresses = append(e.Addresses, "172.31.0.1") // proxies use only the first address
	}
	switch r.conditions {
	case 1:
		e.Conditions.Ready = new(false)
	case 2:
		e.Conditions = discoveryv1.EndpointConditions{Ready: pick(r.chance, nil, new(true))}
	}
	zones, nodes := false, false
	switch r.hints {
	case 0:
	case 1:
		zones = !r.oneIn(12)
	case 2:
		zones = !r.oneIn(12)
		nodes = zones
	default:
		zones, nodes = r.oneIn(3), r.oneIn(3)
	}
	if zones || nodes {
		e.Hints = &discoveryv1.EndpointHints{}
	}
	if zones {
		e.Hints.ForZones = pick(r.chance, []discoveryv1.ForZone{{Name: "a"}}, []discoveryv1.ForZone{{Name: "b"}}, []discoveryv1.ForZone{{Name: "a"}, {Name: "b"}})
	}
	if nodes {
		e.Hints.ForNodes = pick(r.chance, []discoveryv1.ForNode{{Name: thisNode}}, []discoveryv1.ForNode{{Name: "n2"}}, []discoveryv1.ForNode{{Name: "n2"}, {Name: thisNode}})
	}
	return e
}
