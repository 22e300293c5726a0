// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

var clusterIPCases = []testCase{
	{name: "a cluster IP leads to every ready endpoint, on this node and elsewhere", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		for _, from := range []person{s.node, s.c, s.a} {
			s.mustReach(from, web.clusterIP(), s.a, s.b, s.d)
		}
	}},
	{name: "clients outside the cluster with a route to a cluster IP can use it", needs: []Feature{ClusterIPsFromOutside}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.b))
		s.publish()
		s.mustReach(s.outside, web.clusterIP(), s.a, s.b)
	}},
	{name: "endpoints may use the host network, also that of this node", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.node), asReady(s.node2))
		s.publish()
		s.mustReach(s.a, web.clusterIP(), s.node, s.node2)
		s.mustReach(s.node, web.clusterIP(), s.node, s.node2)
	}},
	{name: "a service without endpoints refuses connections", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web")
		s.publish()
		s.mustRefuse(s.node, web.clusterIP())
		s.mustRefuse(s.a, web.clusterIP())
	}},
	{name: "a service without endpoints refuses connections from outside", needs: []Feature{Reject, ClusterIPsFromOutside}, run: func(s *scene) {
		web := s.addService("web")
		s.publish()
		s.mustRefuse(s.outside, web.clusterIP())
	}},
	{name: "connections succeed after the first endpoint is added, and are refused again after it is removed", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").withEndpoints()
		s.publish()
		s.mustRefuse(s.c, web.clusterIP())
		web.withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		web.withEndpoints()
		s.publish()
		s.mustRefuse(s.c, web.clusterIP())
	}},
	{name: "a cluster IP refuses connections to ports that its service does not have", needs: []Feature{RejectUnknownPorts}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		for _, from := range []person{s.node, s.b} {
			s.mustRefuse(from, withPort(web.clusterIP(), 81))
		}
	}},
	{name: "connections are distributed evenly", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		s.mustDistributeEvenly(s.c, web.clusterIP(), s.a, s.b, s.d, s.e)
	}},
	{name: "an endpoint in two slices counts once", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.b))
		web.withSlice("2", targetPorts(web.Spec.Ports), asReady(s.a))
		s.publish()
		s.mustDistributeEvenly(s.c, web.clusterIP(), s.a, s.b)
	}},
	{name: "an added endpoint gets connections, and a removed endpoint gets none", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b, s.d)
		web.withEndpoints(asReady(s.b), asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.b, s.d)
	}},
	{name: "traffic to a deleted service passes unchanged", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.addService("stays").withEndpoints(asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.remove(web)
		s.publish()
		s.mustIgnore(s.c, web.clusterIP())
	}},
	{name: "traffic to a service of another proxy passes unchanged", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		web.Labels = map[string]string{proxyNameLabel: "somebody-else"}
		s.publish()
		s.mustIgnore(s.c, web.clusterIP())
		web.Labels = nil
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		web.Labels = map[string]string{proxyNameLabel: "somebody-else"}
		s.publish()
		s.mustIgnore(s.c, web.clusterIP())
	}},
}

var portCases = []testCase{
	{name: "TCP and UDP ports with the same number are independent", needs: []Feature{UDP}, run: func(s *scene) {
		web := s.addService("web")
		web.Spec.Ports[1].TargetPort = intstr.FromInt32(8081)
		web.withEndpoints().withSlice("tcp", targetPorts(web.Spec.Ports[:1]), asReady(s.a)).
			withSlice("udp", targetPorts(web.Spec.Ports[1:]), asReady(s.b))
		s.publish()
		s.mustReachOver(api.TCP, s.c, web.clusterIP(), s.a)
		s.mustReachOver(api.UDP, s.c, web.clusterIP(), s.b)
	}},
	{name: "each port has its own endpoints", run: func(s *scene) {
		web := s.addService("web").addPort("alt", 81, 8081)
		half := len(web.Spec.Ports) / 2
		web.withEndpoints().withSlice("2", targetPorts(web.Spec.Ports[:half]), asReady(s.a), asReady(s.d)).
			withSlice("3", targetPorts(web.Spec.Ports[half:]), asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
		s.mustReach(s.c, withPort(web.clusterIP(), 81), s.b)
	}},
	{name: "a port without endpoints refuses connections while another port accepts them", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").addPort("alt", 81, 8081)
		half := len(web.Spec.Ports) / 2
		web.withEndpoints().withSlice("2", targetPorts(web.Spec.Ports[:half]), asReady(s.a))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.mustRefuse(s.c, withPort(web.clusterIP(), 81))
	}},
	{name: "a named target port may have a different number in each slice", run: func(s *scene) {
		web := s.addService("web")
		one := targetPorts(web.Spec.Ports)
		for i := range web.Spec.Ports {
			web.Spec.Ports[i].TargetPort = intstr.FromString("serve")
		}
		var other []discoveryv1.EndpointPort
		for _, p := range one {
			number := int32(8082)
			p.Port = &number
			other = append(other, p)
		}
		web.withSlice("1", withPortNumber(one, 8080), asReady(s.a)).withSlice("2", withPortNumber(other, 8082), asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b)
	}},
	{name: "changing only a port's number makes the new number work, and the old one not", needs: []Feature{RejectUnknownPorts}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		for i := range web.Spec.Ports {
			web.Spec.Ports[i].Port = 82
		}
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.mustRefuse(s.c, withPort(web.clusterIP(), 80))
	}},
	{name: "changing only a target port redirects new connections to it", needs: []Feature{EndpointRefusals}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		// Set target port 9. No server listens there, so the endpoint refuses connections.
		for i := range web.Spec.Ports {
			web.Spec.Ports[i].TargetPort = intstr.FromInt32(9)
		}
		web.withEndpoints(asReady(s.a))
		s.publish()
		s.mustRefuse(s.c, web.clusterIP())
		for i := range web.Spec.Ports {
			web.Spec.Ports[i].TargetPort = intstr.FromInt32(8081)
		}
		web.withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
	{name: "changing only a port's name changes nothing", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b)
		for i := range web.Spec.Ports {
			web.Spec.Ports[i].Name += "-renamed"
		}
		web.withEndpoints(asReady(s.a), asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b)
	}},
	{name: "a new service can take over the cluster IP of a deleted one", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		renamed := s.addService("renamed").withEndpoints(asReady(s.b))
		renamed.Spec.ClusterIP, renamed.Spec.ClusterIPs = web.Spec.ClusterIP, web.Spec.ClusterIPs
		s.remove(web)
		s.publish()
		s.mustReach(s.c, renamed.clusterIP(), s.b)
	}},
	{name: "a port of a protocol that the proxy may not support does not affect other ports", run: func(s *scene) {
		web := s.addService("web")
		web.Spec.Ports = append(web.Spec.Ports, corev1.ServicePort{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 80, TargetPort: intstr.FromInt32(8080)})
		web.withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "an SCTP port leads to every ready endpoint", needs: []Feature{SCTP}, run: func(s *scene) {
		web := s.addService("web")
		web.Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolSCTP, Port: 80, TargetPort: intstr.FromInt32(8080)}}
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish() // must succeed even if the kernel has no SCTP sockets
		if !s.world.SCTP {
			s.unavailable("the kernel has no SCTP sockets; the port was programmed, and no packet sent")
		}
		s.mustReachOver(api.SCTP, s.c, web.clusterIP(), s.a, s.b, s.d)
	}},
}

// withPortNumber returns a copy of ports in which each port has this number.
func withPortNumber(ports []discoveryv1.EndpointPort, number int32) []discoveryv1.EndpointPort {
	var all []discoveryv1.EndpointPort
	for _, p := range ports {
		p.Port = &number
		all = append(all, p)
	}
	return all
}

var dualStackCases = []testCase{
	{name: "a dual-stack service serves each family from its own endpoints", runsOnce: true, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, ip := range web.Spec.ClusterIPs {
			s.mustReach(s.c, netip.AddrPortFrom(netip.MustParseAddr(ip), servicePort), s.a, s.d)
		}
	}},
	{name: "a family without endpoints refuses connections while the other family accepts them", runsOnce: true, needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		web.slices[0].only = api.IPv4
		s.publish()
		s.mustReach(s.c, web.at(web.Spec.ClusterIPs[0]), s.a)
		s.mustRefuse(s.c, web.at(web.Spec.ClusterIPs[1]))
		web.slices[0].only = api.IPv6
		s.publish()
		s.mustRefuse(s.c, web.at(web.Spec.ClusterIPs[0]))
		s.mustReach(s.c, web.at(web.Spec.ClusterIPs[1]), s.a)
	}},
	{name: "a service that becomes dual-stack is served in both families", runsOnce: true, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a))
		families, ips := web.Spec.IPFamilies, web.Spec.ClusterIPs
		single, dual := corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyRequireDualStack
		web.Spec.IPFamilies, web.Spec.ClusterIPs, web.Spec.IPFamilyPolicy = families[:1], ips[:1], &single
		s.publish()
		s.mustReach(s.c, web.at(ips[0]), s.a)
		s.mustIgnore(s.c, web.at(ips[1]))
		web.Spec.IPFamilies, web.Spec.ClusterIPs, web.Spec.IPFamilyPolicy = families, ips, &dual
		s.publish()
		s.mustReach(s.c, web.at(ips[0]), s.a)
		s.mustReach(s.c, web.at(ips[1]), s.a)
	}},
}
