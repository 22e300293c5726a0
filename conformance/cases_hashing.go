// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
	"github.com/kpng-project/kpng/internal/parameters"
)

var hashingCases = []testCase{
	{name: "with hashing by client, a client keeps its endpoint, and clients share the endpoints", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		for _, protocol := range s.protocols {
			chosen := s.endpointsByCrowd(protocol, web.loadBalancerIP())
			s.mustHaveShares(protocol.String(), countOf(chosen), s.equalShares(6))
			s.mustStay(chosen, s.endpointsByCrowd(protocol, web.loadBalancerIP()))
		}
	}},
	{name: "with hashing by client, the node and its pods keep their endpoints", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		for _, from := range []person{s.node, s.c} {
			for _, protocol := range s.protocols {
				s.mustChooseOne(protocol, from, web.clusterIP())
			}
		}
	}},
	{name: "with hashing by client, all addresses of a service lead a client to the same endpoint", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		s.mustStay(first, s.endpointsByCrowd(api.TCP, web.externalIP()))
	}},
	{name: "hashing by client applies at node ports", needs: []Feature{StableHashing, NodePorts}, run: func(s *scene) {
		web := s.hashedService("hash-client").withNodePort()
		s.publish()
		for _, protocol := range s.protocols {
			chosen := s.endpointsByCrowd(protocol, web.nodePort(0))
			s.mustStay(chosen, s.endpointsByCrowd(protocol, web.nodePort(1)))
		}
	}},
	{name: "hashing by client applies to external policy Local", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client").externalLocal()
		s.publish()
		chosen := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		s.mustHaveShares("clients", countOf(chosen), shares{"a": 1, "b": 1, "c": 1})
		s.mustStay(chosen, s.endpointsByCrowd(api.TCP, web.loadBalancerIP()))
	}},
	{name: "with hashing by connection, the connections of a client share the endpoints", run: func(s *scene) {
		web := s.hashedService("hash-connection")
		s.publish()
		s.mustShare(s.withAddress(s.outside, 1), web.loadBalancerIP(), s.equalShares(6))
		s.mustShare(s.c, web.clusterIP(), s.equalShares(6))
	}},
	{name: "with hashing by connection, an address and port lead to the same endpoint again", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-connection")
		s.publish()
		first := s.endpointsByPort(web.loadBalancerIP())
		s.mustStay(first, s.endpointsByPort(web.externalIP()))
		s.addService("other").withEndpoints(asReady(s.a))
		s.publish()
		s.mustStay(first, s.endpointsByPort(web.loadBalancerIP()))
	}},
	{name: "a restarted proxy chooses the same endpoints by hashing", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		s.must(s.kill())
		s.must(s.subject.Cleanup(s.ctx, s.site))
		s.must(s.start(s.ctx, s.site))
		s.mustStay(first, s.endpointsByCrowd(api.TCP, web.loadBalancerIP()))
	}},
	{name: "two proxies choose the same endpoints by hashing", needs: []Feature{StableHashing, Instances}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		site := s.site
		site.Instance, site.ServiceProxyName = "kpng-second", "second"
		second, err := s.subject.Start(s.ctx, site)
		s.must(err)
		s.addCleanup(func() error { return s.subject.Cleanup(s.ctx, site) })
		s.addCleanup(second.Kill)
		web.Labels = map[string]string{proxyNameLabel: "second"} // now it is a service of the second proxy only
		s.publish()
		// Publishing may wait for the first proxy only.
		s.eventually(func() { s.mustStay(first, s.endpointsByCrowd(api.TCP, web.loadBalancerIP())) })
	}},
	{name: "when an endpoint is removed, few other clients of a hashed service move", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		for _, protocol := range s.protocols {
			web.withEndpoints(s.sixEndpoints()...)
			s.publish()
			first := s.endpointsByCrowd(protocol, web.loadBalancerIP())
			web.withEndpoints(s.sixEndpoints()[1:]...)
			s.publish()
			s.fewMustMove(first, s.endpointsByCrowd(protocol, web.loadBalancerIP()), "a")
		}
	}},
	{name: "when an endpoint is added, few other clients of a hashed service move", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client").withEndpoints(s.sixEndpoints()[1:]...)
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		web.withEndpoints(s.sixEndpoints()...)
		s.publish()
		second := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		s.fewMustMove(second, first, "a") // clients that now use the endpoint a must have moved
		if countOf(second)["a"] == 0 {
			s.failf("none of %d clients uses the new endpoint", crowdClients)
		}
	}},
	{name: "clients of a hashed service return to an endpoint that is ready again", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		web.withEndpoints(append(s.sixEndpoints()[1:], asUnready(s.a))...)
		s.publish()
		s.fewMustMove(first, s.endpointsByCrowd(api.TCP, web.loadBalancerIP()), "a")
		web.withEndpoints(s.sixEndpoints()...)
		s.publish()
		s.mustStay(first, s.endpointsByCrowd(api.TCP, web.loadBalancerIP()))
	}},
	{name: "hashing does not depend on the order of endpoints and slices", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		six := s.sixEndpoints()
		slices.Reverse(six)
		web.withEndpoints(six[:2]...).withSlice("0", targetPorts(web.Spec.Ports), six[2:]...)
		s.publish()
		s.mustStay(first, s.endpointsByCrowd(api.TCP, web.loadBalancerIP()))
	}},
	{name: "established connections stay when endpoints of a hashed service change", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.hashedService("hash-connection").withEndpoints(asReady(s.a), asReady(s.b))
		s.publish()
		stay := s.openMany(web)
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b, s.d, s.e)
		stay()
	}},
	{name: "session affinity comes before hashing", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.hashedService("hash-connection").withAffinity(10800)
		s.publish()
		for _, protocol := range s.protocols {
			chosen := s.endpointsByClient(protocol, web.loadBalancerIP())
			for range 3 {
				s.mustNotMove(chosen, s.endpointsByClient(protocol, web.loadBalancerIP()), all)
			}
		}
	}},
	{name: "weights set the shares of hashed connections", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.hashedService("hash-connection").withWeights(s.oneTwoSeven()...)
		s.publish()
		s.mustShare(s.c, web.clusterIP(), oneTwoSeven)
	}},
	{name: "when a weight changes, few clients of a hashed service move", needs: []Feature{StableHashing, Weights}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		first := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		web.withWeights(weight("50", asReady(s.a)), weight("", s.sixEndpoints()[1:]...))
		s.publish()
		second := s.endpointsByCrowd(api.TCP, web.loadBalancerIP())
		s.fewMustMove(first, second, "a")
		if n, before := countOf(second)["a"], countOf(first)["a"]; n >= before {
			s.failf("after the weight of a became half as large, %d clients use a, and %d before", n, before)
		}
	}},
	{name: "a change of the algorithm takes effect", needs: []Feature{StableHashing}, run: func(s *scene) {
		web := s.hashedService("hash-client")
		s.publish()
		s.mustChooseOne(api.TCP, s.c, web.clusterIP())
		web.with(parameters.Algorithm, "random")
		s.publish()
		s.mustShare(s.c, web.clusterIP(), s.equalShares(6))
		web.with(parameters.Algorithm, "hash-client")
		s.publish()
		s.mustChooseOne(api.TCP, s.c, web.clusterIP())
	}},
}

// hashedService creates a service with this algorithm, an external IP, a load-balancer IP and
// six endpoints.
func (s *scene) hashedService(algorithm string) *service {
	return s.addService("web").withExternalIP().withLoadBalancer().with(parameters.Algorithm, algorithm).withEndpoints(s.sixEndpoints()...)
}

func (s *scene) sixEndpoints() []endpoint {
	return []endpoint{asReady(s.a), asReady(s.b), asReady(s.c), asReady(s.d), asReady(s.e), asReady(s.node2)}
}

// equalShares returns equal shares of the first n of the six endpoints.
func (s *scene) equalShares(n int) shares {
	equal := shares{}
	for _, e := range s.sixEndpoints()[:n] {
		equal[e.Name] = 1
	}
	return equal
}

// crowdClients is the number of client addresses in checks of hashing.
const crowdClients = 120

// endpointsByCrowd opens a connection from each of many client addresses. It returns the
// names of the endpoints that they reach.
func (s *scene) endpointsByCrowd(protocol api.Protocol, to netip.AddrPort) []string {
	var names []string
	for i := range crowdClients {
		client := s.outside
		client.source = number(world.CrowdCIDRs[s.family], i+1)
		names = append(names, s.reachedEndpoint(protocol, client, to))
	}
	return names
}

// endpointsByPort opens TCP connections from the same address and many ports. It resets each
// connection, so that neither the client nor connection tracking remembers it.
func (s *scene) endpointsByPort(to netip.AddrPort) []string {
	ctx, cancel := context.WithTimeout(s.ctx, s.opts.Patience)
	defer cancel()
	var names []string
	for i := range 24 {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: number(world.CrowdCIDRs[s.family], crowdClients+1).AsSlice(), Port: 20000 + i}}
		var c net.Conn
		s.must(s.outside.Do(func() (err error) { c, err = dialer.DialContext(ctx, "tcp", to.String()); return err }))
		deadline, _ := ctx.Deadline()
		s.must(c.SetDeadline(deadline))
		_, err := fmt.Fprintln(c, "1")
		s.must(err)
		line, err := bufio.NewReader(c).ReadString('\n')
		s.must(err)
		var request, name string
		_, err = fmt.Sscan(line, &request, &name)
		s.must(err)
		s.must(c.(*net.TCPConn).SetLinger(0))
		s.must(c.Close())
		names = append(names, name)
	}
	return names
}

func countOf(names []string) map[string]int {
	count := map[string]int{}
	for _, name := range names {
		count[name]++
	}
	return count
}

// mustChooseOne asserts that all connections of a client reach the same endpoint.
func (s *scene) mustChooseOne(protocol api.Protocol, from person, to netip.AddrPort) {
	first := s.reachedEndpoint(protocol, from, to)
	for range connectionsPerCheck {
		if now := s.reachedEndpoint(protocol, from, to); now != first {
			s.failf("%s: the client moved from %s to %s", describe(from, protocol, to), first, now)
		}
	}
}

// mustStay asserts that hashed clients have the same endpoints as before.
func (s *scene) mustStay(before, after []string) {
	for i, name := range before {
		if after[i] != name {
			s.failf("client %d of %d has moved from %s to %s", i, len(before), name, after[i])
		}
	}
}

// fewMustMove asserts that few clients have moved, except the clients of the endpoint
// "lost". At most 1/6 + 1 % of them should move. If each client moves with this
// probability, 45 % or more move once in 10 billion checks. If the proxy chooses by the
// remainder of a division, 80 % move.
func (s *scene) fewMustMove(before, after []string, lost string) {
	others, moved := 0, 0
	for i, name := range before {
		if name != lost {
			others++
			if after[i] != name {
				moved++
			}
		}
	}
	if moved*100 >= others*45 {
		s.failf("%d of %d clients of other endpoints than %s have moved", moved, others, lost)
	}
}
