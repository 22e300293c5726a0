// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

var externalCases = []testCase{
	{name: "a node port is served at every node address to all clients", needs: []Feature{NodePorts}, run: func(s *scene) {
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for i := range 2 {
			for _, from := range []person{s.outside, s.c, s.node, s.e} {
				s.mustReach(from, web.nodePort(i), s.a, s.d)
			}
		}
	}},
	{name: "a node port is not served on loopback addresses", needs: []Feature{NodePorts}, run: func(s *scene) {
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a))
		s.publish()
		s.mustRefuse(s.node, netip.AddrPortFrom(loopback(s.family), uint16(web.Spec.Ports[0].NodePort)))
	}},
	{name: "a node port is served only at the configured node addresses", needs: []Feature{NodePorts, NodePortCIDRs}, run: func(s *scene) {
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a))
		s.publish()
		s.mustRefuse(s.b, netip.AddrPortFrom(gateway(s.family), uint16(web.Spec.Ports[0].NodePort)))
	}},
	{name: "a node port of a service without endpoints refuses connections", needs: []Feature{NodePorts, Reject}, run: func(s *scene) {
		web := s.addService("web").withNodePort()
		s.publish()
		for _, from := range []person{s.outside, s.a, s.node} {
			s.mustRefuse(from, web.nodePort(0))
		}
	}},
	{name: "a node port is closed when its service changes to another", needs: []Feature{NodePorts}, run: func(s *scene) {
		web := s.addService("web").withNodePort().withEndpoints(asReady(s.a))
		s.publish()
		to := web.nodePort(0)
		s.mustReach(s.outside, to, s.a)
		web.withNodePort()
		s.publish()
		s.mustRefuse(s.outside, to)
		s.mustReach(s.outside, web.nodePort(0), s.a)
	}},
	{name: "an external IP is served to all clients", run: func(s *scene) {
		web := s.addService("web").withExternalIP().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, from := range []person{s.outside, s.c, s.node} {
			s.mustReach(from, web.externalIP(), s.a, s.d)
		}
	}},
	{name: "a load-balancer IP is served to all clients", run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, from := range []person{s.outside, s.c, s.node} {
			s.mustReach(from, web.loadBalancerIP(), s.a, s.d)
		}
	}},
	{name: "traffic to a load-balancer IP of mode Proxy passes unchanged", run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		mode := corev1.LoadBalancerIPModeProxy
		web.Status.LoadBalancer.Ingress[0].IPMode = &mode
		s.publish()
		s.mustIgnore(s.outside, web.loadBalancerIP())
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
	{name: "external addresses of a service without endpoints refuse connections", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withLoadBalancer()
		s.publish()
		for _, from := range []person{s.outside, s.a, s.node} {
			s.mustRefuse(from, web.externalIP())
			s.mustRefuse(from, web.loadBalancerIP())
		}
	}},
	{name: "traffic to an external IP that was removed from its service passes unchanged", run: func(s *scene) {
		web := s.addService("web").withExternalIP().withEndpoints(asReady(s.a))
		s.publish()
		to := web.externalIP()
		s.mustReach(s.outside, to, s.a)
		web.Spec.ExternalIPs = nil
		web.withExternalIP()
		s.publish()
		s.mustReach(s.outside, web.externalIP(), s.a)
		s.mustIgnore(s.outside, to)
	}},
	{name: "two services can swap their external IPs", run: func(s *scene) {
		web := s.addService("web").withExternalIP().withEndpoints(asReady(s.a))
		dns := s.addService("dns").withExternalIP().withEndpoints(asReady(s.d))
		s.publish()
		for range 3 {
			s.mustReach(s.outside, web.externalIP(), s.a)
			s.mustReach(s.outside, dns.externalIP(), s.d)
			web.Spec.ExternalIPs, dns.Spec.ExternalIPs = dns.Spec.ExternalIPs, web.Spec.ExternalIPs
			s.publish()
		}
		s.mustReach(s.outside, web.externalIP(), s.a)
		s.mustReach(s.outside, dns.externalIP(), s.d)
	}},
	{name: "if two services claim an address and port, the older one has it until it is deleted", needs: []Feature{Claims}, run: func(s *scene) {
		older := s.addService("a").withExternalIP().withEndpoints(asReady(s.a))
		younger := s.addService("b").withEndpoints(asReady(s.b))
		younger.Spec.ExternalIPs, younger.Spec.ExternalTrafficPolicy = older.Spec.ExternalIPs, older.Spec.ExternalTrafficPolicy
		s.publish()
		s.mustReach(s.outside, older.externalIP(), s.a)
		s.mustReach(s.c, younger.clusterIP(), s.b)
		s.remove(older)
		s.publish()
		s.mustReach(s.outside, younger.externalIP(), s.b)
	}},
	{name: "two services can share an address with different ports", run: func(s *scene) {
		web := s.addService("web").withExternalIP().withEndpoints(asReady(s.a))
		dns := s.addService("dns")
		dns.Spec.ExternalIPs, dns.Spec.ExternalTrafficPolicy = web.Spec.ExternalIPs, web.Spec.ExternalTrafficPolicy
		for i := range dns.Spec.Ports {
			dns.Spec.Ports[i].Port = 81
		}
		dns.withEndpoints(asReady(s.d))
		s.publish()
		s.mustReach(s.outside, web.externalIP(), s.a)
		s.mustReach(s.outside, dns.externalIP(), s.d)
		s.remove(web)
		s.publish()
		s.mustReach(s.outside, dns.externalIP(), s.d)
	}},
}

func loopback(f api.Family) netip.Addr {
	return map[api.Family]netip.Addr{api.IPv4: netip.MustParseAddr("127.0.0.1"), api.IPv6: netip.IPv6Loopback()}[f]
}

// gateway returns the node's own address in the network of its pods.
func gateway(f api.Family) netip.Addr { return number(world.PodCIDRs[f], 1) }

var sourceRangeCases = []testCase{
	{name: "clients outside the source ranges cannot use the load-balancer IP", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		friend, stranger := s.withAddress(s.outside, 1), s.withAddress(s.outside, 2)
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(friend)}
		s.publish()
		s.mustReach(friend, web.loadBalancerIP(), s.a)
		s.mustDrop(stranger, web.loadBalancerIP())
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(stranger), " " + onlySource(s.withAddress(s.outside, 3)) + " "}
		s.publish()
		s.mustReach(stranger, web.loadBalancerIP(), s.a)
		s.mustReach(s.withAddress(s.outside, 3), web.loadBalancerIP(), s.a)
		s.mustDrop(friend, web.loadBalancerIP())
		web.Spec.LoadBalancerSourceRanges = nil
		s.publish()
		s.mustReach(friend, web.loadBalancerIP(), s.a)
	}},
	{name: "source ranges apply to clients on this node", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.c, 0))}
		s.publish()
		s.mustReach(s.c, web.loadBalancerIP(), s.a)
		s.mustDrop(s.b, web.loadBalancerIP())
		s.mustDrop(s.node, web.loadBalancerIP())
	}},
	{name: "source ranges apply only to load-balancer IPs", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 1))}
		s.publish()
		stranger := s.withAddress(s.outside, 2)
		s.mustDrop(stranger, web.loadBalancerIP())
		s.mustReach(stranger, web.externalIP(), s.a)
		s.mustReach(s.c, web.clusterIP(), s.a)
		if _, lacks := s.opts.Unsupported[NodePorts]; !lacks {
			s.mustReach(stranger, web.nodePort(0), s.a)
		}
	}},
	{name: "source ranges apply to a load-balancer IP that is also an external IP", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		web.Spec.ExternalIPs = []string{web.Status.LoadBalancer.Ingress[0].IP}
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 1))}
		s.publish()
		s.mustReach(s.withAddress(s.outside, 1), web.externalIP(), s.a)
		s.mustDrop(s.withAddress(s.outside, 2), web.externalIP())
	}},
	{name: "a range of all addresses admits all clients", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.b, 0)), map[api.Family]string{api.IPv4: "0.0.0.0/0", api.IPv6: "::/0"}[s.family]}
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a)
		s.mustReach(s.node, web.loadBalancerIP(), s.a)
	}},
	{name: "source ranges of only the other family admit no client of this family", needs: []Feature{SourceRanges, FamilyOnlyRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{map[api.Family]string{api.IPv4: "::/0", api.IPv6: "0.0.0.0/0"}[s.family]}
		s.publish()
		s.mustDrop(s.outside, web.loadBalancerIP())
		s.mustDrop(s.c, web.loadBalancerIP())
	}},
	{name: "a service without endpoints drops clients outside its source ranges and refuses the others", needs: []Feature{SourceRanges, Reject, RangesBeforeReject}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer()
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 1))}
		s.publish()
		s.mustRefuse(s.withAddress(s.outside, 1), web.loadBalancerIP())
		s.mustDrop(s.withAddress(s.outside, 2), web.loadBalancerIP())
	}},
	{name: "a range that admits the node also admits its traffic from the service's own load-balancer IP", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.node, 0))}
		s.addNodeAddress(web.loadBalancerIP().Addr())
		node := s.node
		node.source = web.loadBalancerIP().Addr()
		s.publish()
		s.mustReach(node, web.loadBalancerIP(), s.a)
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 0))}
		s.publish()
		s.mustDrop(node, web.loadBalancerIP())
	}},
}

// onlySource returns the range that contains only the source address of p.
func onlySource(p person) string { return netip.PrefixFrom(p.source, p.source.BitLen()).String() }

// addNodeAddress adds an address to the node for the rest of the case. Some controllers
// that announce load-balancer IPs also add addresses to nodes.
func (s *scene) addNodeAddress(addr netip.Addr) {
	change := func(f func(netlink.Link, *netlink.Addr) error) error {
		return s.node.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(netip.PrefixFrom(addr, addr.BitLen()).String())
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD // without this flag, a new IPv6 address is unusable at first
			return f(lo, a)
		})
	}
	s.must(change(netlink.AddrAdd))
	s.addCleanup(func() error { return change(netlink.AddrDel) })
}
