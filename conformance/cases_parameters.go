// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/parameters"
)

var rangeOptionCases = []testCase{
	{name: "denied source ranges refuse their clients and admit all others", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().with(parameters.SourceRanges, "deny").withEndpoints(asReady(s.a))
		foe, other := s.withAddress(s.outside, 1), s.withAddress(s.outside, 2)
		web.withRanges(onlySource(foe))
		s.publish()
		s.mustDrop(foe, web.loadBalancerIP())
		s.mustReach(other, web.loadBalancerIP(), s.a)
	}},
	{name: "denied source ranges apply to clients on this node", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().with(parameters.SourceRanges, "deny").withEndpoints(asReady(s.a))
		web.withRanges(onlySource(s.withAddress(s.c, 0)))
		s.publish()
		s.mustDrop(s.c, web.loadBalancerIP())
		s.mustReach(s.b, web.loadBalancerIP(), s.a)
		s.mustReach(s.node, web.loadBalancerIP(), s.a)
	}},
	{name: "denied source ranges may overlap", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().with(parameters.SourceRanges, "deny").withEndpoints(asReady(s.a))
		web.withRanges(onlySource(s.withAddress(s.outside, 1)), onlySource(s.withAddress(s.c, 0)),
			map[api.Family]string{api.IPv4: "203.0.113.0/24", api.IPv6: "fd00:203:113::/64"}[s.family], onlySource(s.withAddress(s.outside, 2)))
		s.publish()
		s.mustDrop(s.withAddress(s.outside, 2), web.loadBalancerIP())
		s.mustDrop(s.withAddress(s.outside, 5), web.loadBalancerIP())
		s.mustReach(s.b, web.loadBalancerIP(), s.a)
	}},
	{name: "denied source ranges of the other family refuse no client of this family", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().with(parameters.SourceRanges, "deny").withEndpoints(asReady(s.a))
		web.withRanges(anySource(api.IPv4 + api.IPv6 - s.family))
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a)
		s.mustReach(s.c, web.loadBalancerIP(), s.a)
	}},
	{name: "a denied range of all addresses refuses all clients", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().with(parameters.SourceRanges, "deny").withEndpoints(asReady(s.a))
		web.withRanges(anySource(s.family))
		s.publish()
		s.mustDrop(s.outside, web.loadBalancerIP())
		s.mustDrop(s.c, web.loadBalancerIP())
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
	{name: "a change between allowed and denied ranges takes effect", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		client, other := s.withAddress(s.outside, 1), s.withAddress(s.outside, 2)
		web.withRanges(onlySource(client))
		s.publish()
		s.mustReach(client, web.loadBalancerIP(), s.a)
		s.mustDrop(other, web.loadBalancerIP())
		web.with(parameters.SourceRanges, "deny")
		s.publish()
		s.mustReach(other, web.loadBalancerIP(), s.a)
		s.mustDrop(client, web.loadBalancerIP())
		web.withRanges()
		s.publish()
		s.mustReach(client, web.loadBalancerIP(), s.a)
	}},
	{name: "with scope all, source ranges apply at the cluster IP", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.b, 0)))
		s.publish()
		s.mustReach(s.b, web.clusterIP(), s.a)
		s.mustDrop(s.c, web.clusterIP())
		s.mustDrop(s.node, web.clusterIP())
	}},
	{name: "with scope all, source ranges apply at external IPs and load-balancer IPs", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.outside, 1)))
		s.publish()
		s.mustReach(s.withAddress(s.outside, 1), web.externalIP(), s.a)
		s.mustReach(s.withAddress(s.outside, 1), web.loadBalancerIP(), s.a)
		s.mustDrop(s.withAddress(s.outside, 2), web.externalIP(), web.loadBalancerIP())
		s.mustDrop(s.c, web.externalIP(), web.loadBalancerIP())
	}},
	{name: "with scope all, source ranges apply at node ports", needs: []Feature{SourceRanges, RangeOptions, NodePorts, NodePortRanges}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.outside, 1))).withNodePort()
		s.publish()
		s.mustReach(s.withAddress(s.outside, 1), web.nodePort(0), s.a)
		s.mustReach(s.withAddress(s.outside, 1), web.nodePort(1), s.a)
		s.mustDrop(s.withAddress(s.outside, 2), web.nodePort(0), web.nodePort(1))
		s.mustDrop(s.c, web.nodePort(0), web.nodePort(1))
	}},
	{name: "with scope all, denied ranges refuse their clients at all addresses", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.c, 0)), onlySource(s.withAddress(s.outside, 1))).with(parameters.SourceRanges, "deny")
		s.publish()
		s.mustDrop(s.c, web.clusterIP(), web.externalIP(), web.loadBalancerIP())
		s.mustDrop(s.withAddress(s.outside, 1), web.externalIP(), web.loadBalancerIP())
		s.mustReach(s.b, web.clusterIP(), s.a)
		s.mustReach(s.withAddress(s.outside, 2), web.externalIP(), s.a)
	}},
	{name: "with scope all, denied ranges refuse their clients at node ports", needs: []Feature{SourceRanges, RangeOptions, NodePorts, NodePortRanges}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.outside, 1))).with(parameters.SourceRanges, "deny").withNodePort()
		s.publish()
		s.mustDrop(s.withAddress(s.outside, 1), web.nodePort(0), web.nodePort(1))
		s.mustReach(s.withAddress(s.outside, 2), web.nodePort(0), s.a)
		s.mustReach(s.c, web.nodePort(0), s.a)
	}},
	{name: "with scope all, ranges of the other family only admit no client at any address", needs: []Feature{SourceRanges, FamilyOnlyRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(anySource(api.IPv4 + api.IPv6 - s.family))
		s.publish()
		s.mustDrop(s.c, web.clusterIP(), web.externalIP(), web.loadBalancerIP())
		s.mustDrop(s.outside, web.externalIP(), web.loadBalancerIP())
	}},
	{name: "with scope all, a service without endpoints drops clients outside its ranges and refuses the others", needs: []Feature{SourceRanges, RangeOptions, Reject, RangesBeforeReject}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.b, 0))).withEndpoints()
		s.publish()
		s.mustRefuse(s.b, web.clusterIP())
		s.mustDrop(s.c, web.clusterIP())
	}},
	{name: "with scope all and no source ranges, all clients are admitted", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.guardedService()
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.mustReach(s.outside, web.externalIP(), s.a)
	}},
	{name: "a change of the scope takes effect", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.outside, 1))).with(parameters.SourceRangesScope, "load-balancer")
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		web.with(parameters.SourceRangesScope, "all")
		s.publish()
		s.mustDrop(s.c, web.clusterIP())
		web.with(parameters.SourceRangesScope, "")
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.mustDrop(s.c, web.loadBalancerIP())
	}},
	{name: "open connections of clients that stay admitted continue when source ranges change", needs: []Feature{SourceRanges, RangeOptions, EstablishedStay}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.c, 0))).withEndpoints(asReady(s.a), asReady(s.b))
		s.publish()
		stay := s.openMany(web)
		web.with(parameters.SourceRanges, "deny").withRanges(onlySource(s.withAddress(s.outside, 2)))
		s.publish()
		stay()
		s.mustDrop(s.withAddress(s.outside, 2), web.loadBalancerIP(), web.externalIP())
		web.with(parameters.SourceRangesScope, "")
		s.publish()
		stay()
	}},
	{name: "source ranges of all addresses do not apply to other services", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web, other := s.guardedService(onlySource(s.withAddress(s.b, 0))), s.addService("other").withExternalIP().withEndpoints(asReady(s.d))
		s.publish()
		s.mustDrop(s.c, web.clusterIP())
		s.mustReach(s.c, other.clusterIP(), s.d)
		s.mustReach(s.outside, other.externalIP(), s.d)
	}},
}

// guardedService creates a service whose source ranges apply to all its addresses: a cluster
// IP, an external IP and a load-balancer IP.
func (s *scene) guardedService(ranges ...string) *service {
	return s.addService("web").withExternalIP().withLoadBalancer().with(parameters.SourceRangesScope, "all").withRanges(ranges...).withEndpoints(asReady(s.a))
}

// anySource returns the range of all addresses of a family.
func anySource(f api.Family) string {
	return map[api.Family]string{api.IPv4: "0.0.0.0/0", api.IPv6: "::/0"}[f]
}

var wrongParameterCases = []testCase{
	{name: "a service with a wrong algorithm is served, and distributes connections evenly", run: func(s *scene) {
		web := s.addService("web").with(parameters.Algorithm, "fastest").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "d": 1})
	}},
	{name: "endpoints with a wrong weight have the default weight", run: func(s *scene) {
		web := s.addService("web").withWeights(weight("-1", asReady(s.a)), weight("65536", asReady(s.b)), weight("much", asReady(s.d)), weight("1.5", asReady(s.e)))
		s.publish()
		s.mustShare(s.c, web.clusterIP(), shares{"a": 1, "b": 1, "d": 1, "e": 1})
	}},
	{name: "with a wrong request for resets, connections to a removed endpoint continue", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").with(parameters.Connections, "resets").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openTo(s.c, web, s.a)
		web.withEndpoints(asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.d)
		s.staysWith(f, s.a)
	}},
	{name: "with a wrong value, source ranges are admitted", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().with(parameters.SourceRanges, "no").withEndpoints(asReady(s.a))
		web.withRanges(onlySource(s.withAddress(s.outside, 1)))
		s.publish()
		s.mustReach(s.withAddress(s.outside, 1), web.loadBalancerIP(), s.a)
		s.mustDrop(s.withAddress(s.outside, 2), web.loadBalancerIP())
	}},
	{name: "with a wrong scope, source ranges apply only to load-balancer IPs", needs: []Feature{SourceRanges}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.outside, 1))).with(parameters.SourceRangesScope, "cluster")
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.mustReach(s.outside, web.externalIP(), s.a)
		s.mustDrop(s.withAddress(s.outside, 2), web.loadBalancerIP())
	}},
	{name: "beside a wrong value, the other parameters of a service apply", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.b, 0))).with(parameters.Algorithm, "fastest").with(parameters.Connections, "?")
		s.publish()
		s.mustReach(s.b, web.clusterIP(), s.a)
		s.mustDrop(s.c, web.clusterIP())
	}},
	{name: "very long and empty values disturb no service", run: func(s *scene) {
		web, other := s.addService("web"), s.addService("other").withEndpoints(asReady(s.b))
		for _, key := range []string{parameters.Algorithm, parameters.Connections, parameters.SourceRanges, parameters.SourceRangesScope} {
			web.with(key, strings.Repeat("deny\x00", 4000))
			other.with(key, " ")
		}
		web.withWeights(weight(strings.Repeat("9", 10000), asReady(s.a)), weight(" ", asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
		s.mustReach(s.c, other.clusterIP(), s.b)
	}},
	{name: "a right value after a wrong one takes effect", needs: []Feature{SourceRanges, RangeOptions}, run: func(s *scene) {
		web := s.guardedService(onlySource(s.withAddress(s.b, 0))).with(parameters.SourceRangesScope, "everything")
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		web.with(parameters.SourceRangesScope, "all")
		s.publish()
		s.mustDrop(s.c, web.clusterIP())
		web.with(parameters.SourceRangesScope, "everything")
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
}
