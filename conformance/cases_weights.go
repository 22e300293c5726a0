// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

var weightCases = []testCase{
	{name: "endpoints of equal weights get equal shares", run: func(s *scene) {
		web := s.addService("web").withWeights(weight("7", asReady(s.a), asReady(s.b)), weight("7", asReady(s.d)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "b": 1, "d": 1})
	}},
	{name: "weights set the shares of new connections", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(s.oneTwoSeven()...)
		s.publish()
		s.mustShare(s.c, web.clusterIP(), oneTwoSeven)
	}},
	{name: "a slice without a weight has weight 100", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(weight("", asReady(s.a)), weight("200", asReady(s.b)), weight("700", asReady(s.d)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), oneTwoSeven)
	}},
	{name: "weights apply to the node's own connections", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(s.oneTwoSeven()...)
		s.publish()
		s.mustShare(s.node, web.clusterIP(), oneTwoSeven)
	}},
	{name: "weights apply at external IPs and load-balancer IPs", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withLoadBalancer().withWeights(s.oneTwoSeven()...)
		s.publish()
		s.mustShare(s.outside, web.externalIP(), oneTwoSeven)
		s.mustShare(s.outside, web.loadBalancerIP(), oneTwoSeven)
	}},
	{name: "weights apply at node ports", needs: []Feature{Weights, NodePorts}, run: func(s *scene) {
		web := s.addService("web").withNodePort().withWeights(s.oneTwoSeven()...)
		s.publish()
		s.mustShare(s.outside, web.nodePort(0), oneTwoSeven)
	}},
	{name: "with external policy Local, weights apply to the endpoints on this node", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().externalLocal().withWeights(weight("1", asReady(s.a)), weight("9", asReady(s.b), asReady(s.d)))
		s.publish()
		s.mustShare(s.outside, web.loadBalancerIP(), shares{"a": 1, "b": 9})
	}},
	{name: "with internal policy Local, weights apply to the endpoints on this node", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").internalLocal().withWeights(weight("1", asReady(s.a)), weight("9", asReady(s.b), asReady(s.d)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "b": 9})
	}},
	{name: "topology hints come before weights", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(weight("1", asReady(s.a).forZone(zone)), weight("9", asReady(s.b).forZone(zone), asReady(s.d).forZone("elsewhere")))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "b": 9})
	}},
	{name: "weights apply to terminating endpoints if no endpoint is ready", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(weight("1", asDraining(s.a)), weight("9", asDraining(s.b)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "b": 9})
	}},
	{name: "each service has its own weights", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(s.oneTwoSeven()...)
		dns := s.addService("dns").withWeights(weight("7", asReady(s.a)), weight("2", asReady(s.b)), weight("1", asReady(s.d)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), oneTwoSeven)
		s.mustShare(s.c, dns.clusterIP(), shares{"a": 7, "b": 2, "d": 1})
	}},
	{name: "the smallest and the largest weight are valid", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(weight("1", asReady(s.a)), weight("65535", asReady(s.b), asReady(s.d)))
		s.publish()
		// The probability that the endpoint a gets 5 of 300 connections is below 1 in
		// 10^12.
		for _, protocol := range s.protocols {
			if n := s.count(protocol, s.c, web.clusterIP())["a"]; n >= 5 {
				s.failf("%s: the endpoint of weight 1 got %d of %d connections", describe(s.c, protocol, web.clusterIP()), n, shareTotal)
			}
		}
		s.mustReach(s.c, web.clusterIP(), s.b, s.d)
	}},
	{name: "a change of weights takes effect and ends no connection", needs: []Feature{Weights, EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withWeights(s.oneTwoSeven()...)
		s.publish()
		stay := s.openMany(web)
		web.withWeights(weight("7", asReady(s.a)), weight("2", asReady(s.b)), weight("1", asReady(s.d)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 7, "b": 2, "d": 1})
		stay()
	}},
	{name: "without their weights, endpoints get equal shares again", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(s.oneTwoSeven()...)
		s.publish()
		s.mustShare(s.c, web.clusterIP(), oneTwoSeven)
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "b": 1, "d": 1})
	}},
	{name: "an endpoint of weight zero gets no new connections", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withWeights(weight("0", asReady(s.a)), weight("5", asReady(s.b), asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.b, s.d)
		s.mustReach(s.outside, web.externalIP(), s.b, s.d)
	}},
	{name: "established TCP connections continue when the weight of their endpoint becomes zero", needs: []Feature{Weights, EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withWeights(weight("5", asReady(s.a)))
		s.publish()
		inside, outside := s.openTo(s.c, web, s.a), s.openTo(s.outside, web, s.a)
		web.withWeights(weight("0", asReady(s.a)), weight("5", asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.d)
		inside.mustReach(s.a)
		outside.mustReach(s.a)
	}},
	{name: "UDP flows continue when the weight of their endpoint becomes zero", needs: []Feature{Weights, UDP, EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withWeights(weight("5", asReady(s.a)))
		s.publish()
		f := s.openFlow(s.c, api.UDP, web.clusterIP())
		f.mustReach(s.a)
		web.withWeights(weight("0", asReady(s.a)), weight("5", asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.d)
		f.mustReach(s.a)
	}},
	{name: "an endpoint gets new connections again when its weight is no longer zero", needs: []Feature{Weights}, run: func(s *scene) {
		web := s.addService("web").withWeights(weight("0", asReady(s.a)), weight("5", asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.d)
		web.withWeights(weight("5", asReady(s.a), asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "if all endpoints have weight zero, connections are refused", needs: []Feature{Weights, Reject}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withWeights(weight("0", asReady(s.a), asReady(s.d)))
		s.publish()
		s.mustRefuse(s.c, web.clusterIP())
		s.mustRefuse(s.outside, web.externalIP())
	}},
	{name: "a change of weights does not end session affinity", needs: []Feature{Weights, Affinity}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withAffinity(10800).withWeights(s.oneTwoSeven()...)
		s.publish()
		first := s.endpointsByClient(api.TCP, web.loadBalancerIP())
		web.withWeights(weight("1000", asReady(s.a)), weight("1", asReady(s.b), asReady(s.d)))
		s.publish()
		s.mustNotMove(first, s.endpointsByClient(api.TCP, web.loadBalancerIP()), all)
	}},
	{name: "with session affinity, weights set the shares of new clients", needs: []Feature{Weights, Affinity}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withAffinity(10800).withWeights(weight("1", asReady(s.a)), weight("1000", asReady(s.b)))
		s.publish()
		n := 0
		for _, name := range s.endpointsByCrowd(api.TCP, web.loadBalancerIP()) {
			if name == "a" {
				n++
			}
		}
		// The probability of n >= 8 is below 1 in 10^12. With equal shares, the probability of
		// n < 8 is below 1 in 10^20.
		if n >= 8 {
			s.failf("%d of %d clients use the endpoint with 1 of 1001 parts", n, crowdClients)
		}
	}},
	{name: "each family of a dual-stack service has the weights of its own endpoints", needs: []Feature{Weights}, runsOnce: true, run: func(s *scene) {
		web := s.addService("web").withWeights(s.oneTwoSeven()...)
		for _, slice := range web.slices {
			slice.only = api.IPv4
		}
		web.withSlice("other", targetPorts(web.Spec.Ports), asReady(s.a), asReady(s.b), asReady(s.d))
		web.slices[3].only = api.IPv6
		s.publish()
		s.mustShare(s.c, web.at(web.Spec.ClusterIPs[0]), oneTwoSeven)
		s.mustShare(s.c, web.at(web.Spec.ClusterIPs[1]), shares{"a": 1, "b": 1, "d": 1})
	}},
}

// shares has the share of the connections that each endpoint gets, by its name.
type shares map[string]float64

var oneTwoSeven = shares{"a": 1, "b": 2, "d": 7}

// oneTwoSeven returns endpoints with the weights 1, 2 and 7.
func (s *scene) oneTwoSeven() []weighted {
	return []weighted{weight("1", asReady(s.a)), weight("2", asReady(s.b)), weight("7", asReady(s.d))}
}

// shareTotal is the number of connections in checks of shares.
const shareTotal = 300

// count opens shareTotal connections and counts how many each endpoint gets.
func (s *scene) count(protocol api.Protocol, from person, to netip.AddrPort) map[string]int {
	count := map[string]int{}
	for range shareTotal {
		count[s.reachedEndpoint(protocol, from, to)]++
	}
	return count
}

// mustShare asserts that endpoints get these shares of connections.
func (s *scene) mustShare(from person, to netip.AddrPort, want shares) {
	for _, protocol := range s.protocols {
		s.mustHaveShares(describe(from, protocol, to), s.count(protocol, from, to), want)
	}
}

// mustHaveShares asserts that the counted connections have these shares.
func (s *scene) mustHaveShares(what string, count map[string]int, want shares) {
	total, parts, counted := 0, 0.0, 0
	for _, n := range count {
		total += n
	}
	for name, part := range want {
		parts += part
		counted += count[name]
	}
	if counted < total {
		s.failf("%s: connections reached %v, want only the endpoints %v", what, count, want)
	}
	var chi2 float64
	for name, part := range want {
		expected := float64(total) * part / parts
		chi2 += (float64(count[name]) - expected) * (float64(count[name]) - expected) / expected
	}
	// If four endpoints get the right shares, chi2 exceeds this limit once in 10 billion
	// checks. If endpoints with the weights 1, 2 and 7 get equal shares, chi2 is 240 on
	// average.
	if limit := 50.0; chi2 > limit {
		s.failf("%s: %d connections have the shares %v, want %v: chi-squared is %.0f, limit %.0f", what, total, count, want, chi2, limit)
	}
}
