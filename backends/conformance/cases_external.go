// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/conformance/internal/world"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

var externalCases = []testCase{
	{name: "a node port is served at every node address to all clients", needs: []Feature{NodePorts}, run: func(s *scene) {
		web := s.service("web").withNodePort().withEndpoints(ready(s.a), ready(s.d))
		s.publish()
		for i := range 2 {
			for _, from := range []person{s.outside, s.c, s.node, s.e} {
				s.reaches(from, web.nodePort(i), s.a, s.d)
			}
		}
	}},
	{name: "a node port is not served on loopback addresses", needs: []Feature{NodePorts}, run: func(s *scene) {
		web := s.service("web").withNodePort().withEndpoints(ready(s.a))
		s.publish()
		s.refuses(s.node, netip.AddrPortFrom(loopback(s.family), uint16(web.Spec.Ports[0].NodePort)))
	}},
	{name: "a node port is served only at the configured node addresses", needs: []Feature{NodePorts, NodePortCIDRs}, run: func(s *scene) {
		web := s.service("web").withNodePort().withEndpoints(ready(s.a))
		s.publish()
		s.refuses(s.b, netip.AddrPortFrom(gateway(s.family), uint16(web.Spec.Ports[0].NodePort)))
	}},
	{name: "a node port of a service without endpoints refuses connections", needs: []Feature{NodePorts, Reject}, run: func(s *scene) {
		web := s.service("web").withNodePort()
		s.publish()
		for _, from := range []person{s.outside, s.a, s.node} {
			s.refuses(from, web.nodePort(0))
		}
	}},
	{name: "a node port is closed when its service changes to another", needs: []Feature{NodePorts}, run: func(s *scene) {
		web := s.service("web").withNodePort().withEndpoints(ready(s.a))
		s.publish()
		to := web.nodePort(0)
		s.reaches(s.outside, to, s.a)
		web.withNodePort()
		s.publish()
		s.refuses(s.outside, to)
		s.reaches(s.outside, web.nodePort(0), s.a)
	}},
	{name: "an external IP is served to all clients", run: func(s *scene) {
		web := s.service("web").withExternalIP().withEndpoints(ready(s.a), ready(s.d))
		s.publish()
		for _, from := range []person{s.outside, s.c, s.node} {
			s.reaches(from, web.externalIP(), s.a, s.d)
		}
	}},
	{name: "a load-balancer IP is served to all clients", run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a), ready(s.d))
		s.publish()
		for _, from := range []person{s.outside, s.c, s.node} {
			s.reaches(from, web.loadBalancerIP(), s.a, s.d)
		}
	}},
	{name: "traffic to a load-balancer IP of mode Proxy passes unchanged", run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		mode := corev1.LoadBalancerIPModeProxy
		web.Status.LoadBalancer.Ingress[0].IPMode = &mode
		s.publish()
		s.ignores(s.outside, web.loadBalancerIP())
		s.reaches(s.c, web.clusterIP(), s.a)
	}},
	{name: "external addresses of a service without endpoints refuse connections", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.service("web").withExternalIP().withLoadBalancer()
		s.publish()
		for _, from := range []person{s.outside, s.a, s.node} {
			s.refuses(from, web.externalIP())
			s.refuses(from, web.loadBalancerIP())
		}
	}},
	{name: "traffic to an external IP that was removed from its service passes unchanged", run: func(s *scene) {
		web := s.service("web").withExternalIP().withEndpoints(ready(s.a))
		s.publish()
		to := web.externalIP()
		s.reaches(s.outside, to, s.a)
		web.Spec.ExternalIPs = nil
		web.withExternalIP()
		s.publish()
		s.reaches(s.outside, web.externalIP(), s.a)
		s.ignores(s.outside, to)
	}},
	{name: "two services can swap their external IPs", run: func(s *scene) {
		web := s.service("web").withExternalIP().withEndpoints(ready(s.a))
		dns := s.service("dns").withExternalIP().withEndpoints(ready(s.d))
		s.publish()
		for range 3 {
			s.reaches(s.outside, web.externalIP(), s.a)
			s.reaches(s.outside, dns.externalIP(), s.d)
			web.Spec.ExternalIPs, dns.Spec.ExternalIPs = dns.Spec.ExternalIPs, web.Spec.ExternalIPs
			s.publish()
		}
		s.reaches(s.outside, web.externalIP(), s.a)
		s.reaches(s.outside, dns.externalIP(), s.d)
	}},
	{name: "if two services claim an address and port, the older one has it until it is deleted", needs: []Feature{Claims}, run: func(s *scene) {
		older := s.service("a").withExternalIP().withEndpoints(ready(s.a))
		younger := s.service("b").withEndpoints(ready(s.b))
		younger.Spec.ExternalIPs, younger.Spec.ExternalTrafficPolicy = older.Spec.ExternalIPs, older.Spec.ExternalTrafficPolicy
		s.publish()
		s.reaches(s.outside, older.externalIP(), s.a)
		s.reaches(s.c, younger.clusterIP(), s.b)
		s.remove(older)
		s.publish()
		s.reaches(s.outside, younger.externalIP(), s.b)
	}},
	{name: "two services can share an address with different ports", run: func(s *scene) {
		web := s.service("web").withExternalIP().withEndpoints(ready(s.a))
		dns := s.service("dns")
		dns.Spec.ExternalIPs, dns.Spec.ExternalTrafficPolicy = web.Spec.ExternalIPs, web.Spec.ExternalTrafficPolicy
		for i := range dns.Spec.Ports {
			dns.Spec.Ports[i].Port = 81
		}
		dns.withEndpoints(ready(s.d))
		s.publish()
		s.reaches(s.outside, web.externalIP(), s.a)
		s.reaches(s.outside, dns.externalIP(), s.d)
		s.remove(web)
		s.publish()
		s.reaches(s.outside, dns.externalIP(), s.d)
	}},
}

func loopback(f api.Family) netip.Addr {
	return map[api.Family]netip.Addr{api.IPv4: netip.MustParseAddr("127.0.0.1"), api.IPv6: netip.IPv6Loopback()}[f]
}

// gateway returns the node's address in the pod network.
func gateway(f api.Family) netip.Addr { return number(world.PodCIDRs[f], 1) }

var sourceRangeCases = []testCase{
	{name: "clients outside the source ranges cannot use the load-balancer IP", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		friend, stranger := s.withAddress(s.outside, 1), s.withAddress(s.outside, 2)
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(friend)}
		s.publish()
		s.reaches(friend, web.loadBalancerIP(), s.a)
		s.drops(stranger, web.loadBalancerIP())
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(stranger), " " + onlySource(s.withAddress(s.outside, 3)) + " "}
		s.publish()
		s.reaches(stranger, web.loadBalancerIP(), s.a)
		s.reaches(s.withAddress(s.outside, 3), web.loadBalancerIP(), s.a)
		s.drops(friend, web.loadBalancerIP())
		web.Spec.LoadBalancerSourceRanges = nil
		s.publish()
		s.reaches(friend, web.loadBalancerIP(), s.a)
	}},
	{name: "source ranges apply to clients on this node", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.c, 0))}
		s.publish()
		s.reaches(s.c, web.loadBalancerIP(), s.a)
		s.drops(s.b, web.loadBalancerIP())
		s.drops(s.node, web.loadBalancerIP())
	}},
	{name: "source ranges apply only to load-balancer IPs", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.service("web").exposed().withEndpoints(ready(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 1))}
		s.publish()
		stranger := s.withAddress(s.outside, 2)
		s.drops(stranger, web.loadBalancerIP())
		s.reaches(stranger, web.externalIP(), s.a)
		s.reaches(s.c, web.clusterIP(), s.a)
		if _, lacks := s.opts.Unsupported[NodePorts]; !lacks {
			s.reaches(stranger, web.nodePort(0), s.a)
		}
	}},
	{name: "source ranges apply to a load-balancer IP that is also an external IP", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		web.Spec.ExternalIPs = []string{web.Status.LoadBalancer.Ingress[0].IP}
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 1))}
		s.publish()
		s.reaches(s.withAddress(s.outside, 1), web.externalIP(), s.a)
		s.drops(s.withAddress(s.outside, 2), web.externalIP())
	}},
	{name: "a range of all addresses admits all clients", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.b, 0)), map[api.Family]string{api.IPv4: "0.0.0.0/0", api.IPv6: "::/0"}[s.family]}
		s.publish()
		s.reaches(s.outside, web.loadBalancerIP(), s.a)
		s.reaches(s.node, web.loadBalancerIP(), s.a)
	}},
	{name: "source ranges of only the other family admit no client of this family", needs: []Feature{SourceRanges, FamilyOnlyRanges}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{map[api.Family]string{api.IPv4: "::/0", api.IPv6: "0.0.0.0/0"}[s.family]}
		s.publish()
		s.drops(s.outside, web.loadBalancerIP())
		s.drops(s.c, web.loadBalancerIP())
	}},
	{name: "a service without endpoints drops clients outside its source ranges and refuses the others", needs: []Feature{SourceRanges, Reject, RangesBeforeReject}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer()
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 1))}
		s.publish()
		s.refuses(s.withAddress(s.outside, 1), web.loadBalancerIP())
		s.drops(s.withAddress(s.outside, 2), web.loadBalancerIP())
	}},
	{name: "a range that admits the node also admits its traffic from the service's own load-balancer IP", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().withEndpoints(ready(s.a))
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.node, 0))}
		s.addNodeAddress(web.loadBalancerIP().Addr())
		node := s.node
		node.source = web.loadBalancerIP().Addr()
		s.publish()
		s.reaches(node, web.loadBalancerIP(), s.a)
		web.Spec.LoadBalancerSourceRanges = []string{onlySource(s.withAddress(s.outside, 0))}
		s.publish()
		s.drops(node, web.loadBalancerIP())
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
	s.later(func() error { return change(netlink.AddrDel) })
}
