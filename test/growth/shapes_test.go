// SPDX-License-Identifier: Apache-2.0

package growth

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// shape is a kind of cluster that grows in one dimension.
type shape struct {
	name string
	// n is the size for CI. The harness also measures 2n and 4n.
	n int
	// objects returns the objects of a cluster of size n. A step is a change of the cluster:
	// the harness loads step 0, then writes the difference to step 1, and so on. The
	// default is to change the readiness of the first endpoint in each step.
	objects func(n, step int) []object
	// steps returns the number of steps. Default: 4 steps.
	steps func(n int) int
	// With burst, the harness writes the steps without a pause. Otherwise it waits after
	// each step until the proxy has applied it.
	burst bool
	// kpngOnly marks a shape that needs a feature of kpng, which kube-proxy does not have.
	kpngOnly bool
}

var shapes = []shape{
	{name: "services", n: 200, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object { return one(i, step, 2, nil) })
	}},
	{name: "services with one external IP and port", n: 150, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 1, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.1"} })
		})
	}},
	{name: "services that name a victim's cluster IP", n: 150, objects: func(n, step int) []object {
		victim := one(0, step, 1, nil)
		return append(victim, repeat(n, func(i int) []object {
			return one(1+i, 0, 1, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{clusterIP(0)} })
		})...)
	}},
	{name: "ports, with 20 endpoints", n: 25, objects: func(n, step int) []object {
		return one(0, step, 20, ports(n))
	}},
	{name: "endpoints, with 20 ports", n: 25, objects: func(n, step int) []object {
		return one(0, step, n, ports(20))
	}},
	{name: "ports, with 10 external IPs and 10 endpoints", n: 15, objects: func(n, step int) []object {
		return one(0, step, 10, both(ports(n), externalIPs(10)))
	}},
	{name: "external IPs, with 10 ports and 10 endpoints", n: 15, objects: func(n, step int) []object {
		return one(0, step, 10, both(ports(10), externalIPs(n)))
	}},
	{name: "endpoints, with 10 ports and 10 external IPs", n: 15, objects: func(n, step int) []object {
		return one(0, step, n, both(ports(10), externalIPs(10)))
	}},
	{name: "ports, external IPs and endpoints of equal number", n: 3, objects: func(n, step int) []object {
		// The service has k² frontends, so k grows with the square root of n.
		k := int(math.Sqrt(float64(n * 100)))
		return one(0, step, k, both(ports(k), externalIPs(k)))
	}},
	{name: "source ranges, with 10 ports", n: 50, objects: func(n, step int) []object {
		return one(0, step, 2, both(ports(10), ranges(0, n)))
	}},
	{name: "ports, with 50 source ranges", n: 25, objects: func(n, step int) []object {
		return one(0, step, 2, both(ports(n), ranges(0, 50)))
	}},
	{name: "source ranges inside each other", n: 100, objects: func(n, step int) []object {
		return one(0, step, 2, both(ports(2), ranges(0, 0), func(s *corev1.Service) {
			for i := range n {
				a := offset("20.0.0.0", i<<12)
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
					fmt.Sprintf("%s/%d", netip.PrefixFrom(a, 10+i%20).Masked().Addr(), 10+i%20))
			}
		}))
	}},
	{name: "IPv6 source ranges", n: 100, objects: func(n, step int) []object {
		return one(0, step, 2, both(dual, ranges(0, 0), func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "fd00:98::1"}}
			for i := range n {
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("fd77:%x::/32", i))
			}
		}))
	}},
	{name: "services with the same 20 source ranges", n: 50, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object { return one(i, step, 1, ranges(0, 20)) })
	}},
	{name: "services with 20 source ranges each", n: 50, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object { return one(i, step, 1, ranges(20*i, 20)) })
	}},
	{name: "slices of a service", n: 50, objects: func(n, step int) []object {
		s := service(0, nil)
		return append([]object{s}, repeat(n, func(i int) []object { return []object{slice(s, i, step, pods(10*i, 10))} })...)
	}},
	{name: "slices with the same endpoints", n: 50, objects: func(n, step int) []object {
		s := service(0, nil)
		return append([]object{s}, repeat(n, func(i int) []object { return []object{slice(s, i, step, pods(0, 10))} })...)
	}},
	{name: "slices with a port each", n: 50, objects: func(n, step int) []object {
		s := service(0, nil)
		return append([]object{s}, repeat(n, func(i int) []object {
			e := slice(s, i, step, pods(2*i, 2))
			e.Ports[0].Port = new(int32(1000 + i))
			return []object{e}
		})...)
	}},
	{name: "endpoints with affinity", n: 200, objects: func(n, step int) []object {
		return inSlices(service(0, affinity), step, n)
	}},
	{name: "services with affinity", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object { return one(i, step, 3, affinity) })
	}},
	{name: "relabelling in and out of another proxy's name", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, 0, 2, func(s *corev1.Service) {
				if step%2 == 1 {
					s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"}
				}
			})
		})
	}},
	{name: "all-ports service beside port services", n: 100, kpngOnly: true, objects: func(n, step int) []object {
		shared := func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.1"} }
		all := one(0, step, 1, both(shared, func(s *corev1.Service) {
			s.Annotations = map[string]string{allPortsAnnotation: "true"}
		}))
		return append(all, repeat(n, func(i int) []object {
			return one(1+i, step, 1, both(shared, func(s *corev1.Service) { s.Spec.Ports[0].Port = int32(100 + i) }))
		})...)
	}},
	{name: "a service is created and deleted n times", n: 20, steps: func(n int) int { return 2 * n }, objects: func(n, step int) []object {
		if step%2 == 1 {
			return one(0, 0, 2, nil)
		}
		return nil
	}},
	{name: "a slice with 100 ports is written n times", n: 50, burst: true, steps: func(n int) int { return n }, objects: func(n, step int) []object {
		return one(0, step, 10, ports(100))
	}},
	{name: "endpoints that all change at once", n: 200, objects: func(n, step int) []object {
		return inSlices(service(0, nil), -step, n)
	}},
	{name: "external IPs that move in a cycle", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, 0, 1, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{offset("203.0.0.0", (i+step)%n).String()} })
		})
	}},
	{name: "endpoints that move in a cycle", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			s := service(i, nil)
			return []object{s, slice(s, 0, 0, pods((i+step)%n, 1))}
		})
	}},
	{name: "health-check node ports", n: 50, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 1, func(s *corev1.Service) {
				loadBalancer(s)
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
				s.Spec.HealthCheckNodePort = int32(20_000 + i)
			})
		})
	}},
	{name: "policy Local without local endpoints", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			list := one(i, step, 2, func(s *corev1.Service) {
				loadBalancer(s)
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
				s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
			})
			for e := range list[1].(*discoveryv1.EndpointSlice).Endpoints {
				list[1].(*discoveryv1.EndpointSlice).Endpoints[e].NodeName = new("elsewhere")
			}
			return list
		})
	}},
	{name: "names of maximal length", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 2, func(s *corev1.Service) {
				s.Namespace = strings.Repeat("n", 63)
				s.Name = fmt.Sprintf("s%062d", i)
				s.Spec.Ports[0].Name = strings.Repeat("p", 63)
			})
		})
	}},
	{name: "annotations of 200 KB", n: 5, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			list := one(i, step, 1, nil)
			for _, o := range list {
				o.SetAnnotations(map[string]string{"text": strings.Repeat("x", 200_000)})
			}
			return list
		})
	}},
	{name: "node ports", n: 100, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 2, func(s *corev1.Service) {
				s.Spec.Type = corev1.ServiceTypeNodePort
				s.Spec.Ports[0].NodePort = int32(30_000 + i)
			})
		})
	}},
	{name: "node ports of a service", n: 50, objects: func(n, step int) []object {
		return one(0, step, 10, both(ports(n), func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeNodePort
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].NodePort = int32(30_000 + i)
			}
		}))
	}},
	{name: "load-balancer IPs of a service", n: 50, objects: func(n, step int) []object {
		return one(0, step, 5, both(ports(2), ranges(0, 5), func(s *corev1.Service) {
			for i := range n {
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: offset("198.19.0.0", i).String()})
			}
		}))
	}},
	{name: "dual-stack services", n: 50, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			s := service(i, dual)
			six := slice(s, 1, step, repeat(2, func(e int) []string { return []string{fmt.Sprintf("fd00:128::%x:%x", i, e)} }))
			six.AddressType = discoveryv1.AddressTypeIPv6
			return []object{s, slice(s, 0, step, pods(2*i, 2)), six}
		})
	}},
	{name: "UDP services", n: 100, objects: protocolServices(corev1.ProtocolUDP)},
	{name: "SCTP services", n: 100, objects: protocolServices(corev1.ProtocolSCTP)},
	{name: "one endpoint in many services", n: 150, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			s := service(i, nil)
			return []object{s, slice(s, 0, step, pods(0, 1))}
		})
	}},
	{name: "services without endpoints", n: 200, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object { return one(i, 0, step%2, nil) })
	}},
	{name: "terminating endpoints", n: 200, objects: func(n, step int) []object {
		return edited(inSlices(service(0, nil), 0, n), func(i int, e *discoveryv1.Endpoint) {
			e.Conditions.Ready, e.Conditions.Serving, e.Conditions.Terminating = new(false), new(i%2 == step%2), new(true)
		})
	}},
	{name: "endpoints with hints for zones", n: 200, objects: func(n, step int) []object {
		return edited(inSlices(service(0, nil), step, n), func(i int, e *discoveryv1.Endpoint) {
			zone := fmt.Sprint("zone", i%3)
			e.Zone = new(zone)
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}, {Name: "zone0"}}}
		})
	}},
	{name: "headless services", n: 200, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 2, func(s *corev1.Service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"}
				s.Labels = map[string]string{corev1.IsHeadlessService: ""}
			})
		})
	}},
	{name: "slices before their services", n: 200, objects: func(n, step int) []object {
		list := repeat(n, func(i int) []object { return one(i, 0, 2, nil) })
		if step%2 == 0 {
			list = slices.DeleteFunc(list, func(o object) bool { _, ok := o.(*corev1.Service); return ok })
		}
		return list
	}},
}

// large has objects that a tenant may write. docs/history/benchmarks.md has results.
var large = []shape{
	{name: "16,000 services with one external IP and port", n: 16_000, objects: func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 1, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.1"} })
		})
	}},
	{name: "2,000 ports, 50 endpoints", n: 2000, objects: func(n, step int) []object {
		return one(0, step, 50, ports(n))
	}},
	{name: "50 ports, 1,000 external IPs, 100 endpoints", n: 1000, objects: func(n, step int) []object {
		return one(0, step, 100, both(ports(50), externalIPs(n)))
	}},
	{name: "1,000 source ranges, 30 ports", n: 1000, objects: func(n, step int) []object {
		return one(0, step, 2, both(ports(30), ranges(0, n)))
	}},
	{name: "10,000 source ranges", n: 10_000, objects: func(n, step int) []object {
		return one(0, step, 2, ranges(0, n))
	}},
	{name: "1,000 endpoints with affinity", n: 1000, objects: func(n, step int) []object {
		return inSlices(service(0, affinity), step, n)
	}},
}

// repeat calls f with the numbers below n and joins the results.
func repeat[T any](n int, f func(i int) []T) (all []T) {
	for i := range n {
		all = append(all, f(i)...)
	}
	return all
}

type edit = func(*corev1.Service)

func both(edits ...edit) edit {
	return func(s *corev1.Service) {
		for _, f := range edits {
			f(s)
		}
	}
}

// offset returns the n-th address after an address.
func offset(a string, n int) netip.Addr {
	b := netip.MustParseAddr(a).As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
	return netip.AddrFrom4(b)
}

func clusterIP(service int) string { return offset("10.96.16.0", service).String() }

// pods returns endpoint addresses. An address below podCIDR is local.
func pods(first, number int) []string {
	return repeat(number, func(i int) []string { return []string{offset("10.128.4.0", first+i).String()} })
}

func service(number int, change edit) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s%06d", number)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: clusterIP(number), ClusterIPs: []string{clusterIP(number)},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, SessionAffinity: corev1.ServiceAffinityNone,
			Ports: []corev1.ServicePort{{Name: "p", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

// slice returns a slice of s. In odd steps its first endpoint is not ready. If step is
// negative, all its endpoints are ready only in even steps.
func slice(s *corev1.Service, number, step int, addresses []string) *discoveryv1.EndpointSlice {
	e := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: fmt.Sprintf("%s-%d", s.Name, number),
			Labels: map[string]string{discoveryv1.LabelServiceName: s.Name},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for key, value := range s.Labels { // as the controller does
		e.Labels[key] = value
	}
	for i, p := range s.Spec.Ports {
		e.Ports = append(e.Ports, discoveryv1.EndpointPort{Name: new(p.Name), Protocol: new(p.Protocol), Port: new(int32(8080 + i))})
	}
	for i, a := range addresses {
		ready := step%2 == 0 || step > 0 && (i > 0 || number > 0)
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a}, NodeName: new(nodeName),
			Conditions: discoveryv1.EndpointConditions{Ready: new(ready), Serving: new(ready), Terminating: new(false)},
		})
	}
	return e
}

// one returns a service and its slice with endpoints of its own. Endpoints change only in
// service 0.
func one(number, step, endpoints int, change edit) []object {
	if number > 0 {
		step = 0
	}
	s := service(number, change)
	return []object{s, slice(s, 0, step, pods(number*endpoints, endpoints))}
}

// inSlices returns s with slices of at most 100 endpoints, as the controller writes them.
func inSlices(s *corev1.Service, step, endpoints int) []object {
	all := []object{s}
	for first := 0; first < endpoints; first += 100 {
		all = append(all, slice(s, first/100, step, pods(first, min(100, endpoints-first))))
	}
	return all
}

// edited calls change for each endpoint of the slices in list.
func edited(list []object, change func(i int, e *discoveryv1.Endpoint)) []object {
	i := 0
	for _, o := range list {
		if s, ok := o.(*discoveryv1.EndpointSlice); ok {
			for e := range s.Endpoints {
				change(i, &s.Endpoints[e])
				i++
			}
		}
	}
	return list
}

func protocolServices(protocol corev1.Protocol) func(n, step int) []object {
	return func(n, step int) []object {
		return repeat(n, func(i int) []object {
			return one(i, step, 2, func(s *corev1.Service) { s.Spec.Ports[0].Protocol = protocol })
		})
	}
}

func ports(n int) edit {
	return func(s *corev1.Service) {
		s.Spec.Ports = repeat(n, func(i int) []corev1.ServicePort {
			return []corev1.ServicePort{{Name: fmt.Sprint("p", i), Protocol: corev1.ProtocolTCP, Port: int32(1000 + i)}}
		})
	}
}

func externalIPs(n int) edit {
	return func(s *corev1.Service) {
		s.Spec.ExternalIPs = repeat(n, func(i int) []string { return []string{offset("203.0.0.0", i).String()} })
	}
}

// loadBalancer gives s the type LoadBalancer and an address.
func loadBalancer(s *corev1.Service) {
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	number := 0
	fmt.Sscanf(s.Name, "s%d", &number)
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: offset("198.18.0.0", number).String()}}
}

// ranges returns an edit that makes a service a load balancer and gives it source ranges.
func ranges(first, number int) edit {
	return func(s *corev1.Service) {
		loadBalancer(s)
		for i := range number {
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, offset("20.0.0.0", (first+i)<<4).String()+"/29")
		}
	}
}

func affinity(s *corev1.Service) {
	s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(3600))}}
}

func dual(s *corev1.Service) {
	number := 0
	fmt.Sscanf(s.Name, "s%d", &number)
	s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf("fd00:96::%x", 256+number))
}
