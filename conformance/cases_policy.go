// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

var endpointCases = []testCase{
	{name: "endpoints that are not ready get no connections", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asUnready(s.a), asReady(s.b), asUnready(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.b)
		web.withEndpoints(asReady(s.a), asUnready(s.b), asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "missing conditions mean ready", run: func(s *scene) {
		e := asReady(s.a)
		e.Conditions = discoveryv1.EndpointConditions{}
		web := s.addService("web").withEndpoints(e, asUnready(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
	{name: "connections are refused if no endpoint is ready and none is both serving and terminating", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asUnready(s.a), s.b.serves(false, true, false), s.d.serves(false, false, true))
		s.publish()
		s.mustRefuse(s.c, web.clusterIP())
	}},
	{name: "an endpoint that is both ready and terminating counts as ready", run: func(s *scene) {
		web := s.addService("web").withEndpoints(s.a.serves(true, true, true), asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b)
	}},
	{name: "terminating endpoints get no connections while another endpoint is ready", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asDraining(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.d)
	}},
	{name: "if no endpoint is ready, those that are both serving and terminating get connections", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asDraining(s.a), asDraining(s.d), asUnready(s.b), s.e.serves(false, false, true))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "policy Local falls back to terminating endpoints on this node even if other nodes have ready ones", run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().externalLocal().withEndpoints(asDraining(s.a), asReady(s.d))
		dns := s.addService("dns").internalLocal().withEndpoints(asDraining(s.b), asUnready(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a)
		s.mustReach(s.c, dns.clusterIP(), s.b)
	}},
	{name: "policy Local prefers ready endpoints on this node to terminating ones", run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().externalLocal().withEndpoints(asDraining(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.b)
	}},
}

var topologyCases = []testCase{
	{name: "if all endpoints have zone hints, only endpoints hinted for this node's zone are used", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a).forZone(zone), asReady(s.b).forZone("elsewhere"), asReady(s.d).forZone("elsewhere").forZone(zone))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
		web.withEndpoints(asReady(s.a).forZone("elsewhere"), asReady(s.b).forZone(zone), asReady(s.d).forZone("elsewhere"))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.b)
	}},
	{name: "if all endpoints have node hints, only endpoints hinted for this node are used, whatever the zone hints", run: func(s *scene) {
		web := s.addService("web").withEndpoints(
			asReady(s.a).forZone(zone).forNode(nodeNames[1]),
			asReady(s.b).forZone("elsewhere").forNode(nodeNames[0]),
			asReady(s.d).forZone(zone).forNode(nodeNames[1]).forNode(nodeNames[0]))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.b, s.d)
	}},
	{name: "hints are ignored if a ready endpoint has none", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a).forZone(zone), asReady(s.b), asReady(s.d).forZone("elsewhere"))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b, s.d)
		web.withEndpoints(asReady(s.a).forZone(zone), asUnready(s.b), asReady(s.d).forZone("elsewhere"))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
	{name: "hints are ignored if all are for other zones", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a).forZone("elsewhere"), asReady(s.d).forZone("elsewhere"))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "zone hints apply if all node hints are for other nodes", run: func(s *scene) {
		web := s.addService("web").withEndpoints(
			asReady(s.a).forZone(zone).forNode(nodeNames[1]),
			asReady(s.b).forZone("elsewhere").forNode(nodeNames[1]))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
	}},
	{name: "the fallback to terminating endpoints ignores hints", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asDraining(s.a).forZone(zone), asDraining(s.d).forZone("elsewhere"))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "policy Local ignores hints", run: func(s *scene) {
		web := s.addService("web").internalLocal().withEndpoints(asReady(s.a).forZone("elsewhere"), asReady(s.b).forZone(zone), asReady(s.d).forZone(zone))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.b)
	}},
	{name: "hints also apply at external addresses", run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a).forZone(zone), asReady(s.d).forZone("elsewhere"))
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a)
	}},
	{name: "a node that loses its zone uses all endpoints", run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a).forZone(zone), asReady(s.d).forZone("elsewhere"))
		s.publish()
		// The proxy watches Nodes and Services separately, so s.publish may return before the
		// proxy has received the changed Nodes.
		s.eventually(func() { s.mustReach(s.c, web.clusterIP(), s.a) })
		s.mustReach(s.c, web.clusterIP(), s.a) // again: the method eventually tries so often that one success may be chance
		s.nodeObjects = s.nodes()
		delete(s.nodeObjects[0].Labels, corev1.LabelTopologyZone)
		s.publish()
		s.eventually(func() { s.mustReach(s.c, web.clusterIP(), s.a, s.d) })
	}},
}

var policyCases = []testCase{
	{name: "internal policy Local uses only endpoints on this node", run: func(s *scene) {
		web := s.addService("web").internalLocal().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		for _, from := range []person{s.node, s.c} {
			s.mustReach(from, web.clusterIP(), s.a, s.b)
		}
	}},
	{name: "internal policy Local drops connections if all endpoints are on other nodes", run: func(s *scene) {
		web := s.addService("web").internalLocal().withEndpoints(asReady(s.d))
		s.publish()
		s.mustDrop(s.c, web.clusterIP())
		s.mustDrop(s.node, web.clusterIP())
	}},
	{name: "internal policy Local refuses connections if there are no endpoints at all", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").internalLocal().withEndpoints(asUnready(s.d))
		s.publish()
		s.mustRefuse(s.c, web.clusterIP())
		s.mustRefuse(s.node, web.clusterIP())
	}},
	{name: "internal policy Local does not apply at external addresses", run: func(s *scene) {
		web := s.addService("web").internalLocal().withAllFrontends().withEndpoints(asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustReach(s.outside, to, s.d)
		}
	}},
	{name: "external policy Local uses only endpoints on this node for connections from outside", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustReach(s.outside, to, s.a, s.b)
		}
	}},
	{name: "external policy Local drops connections from outside if all endpoints are on other nodes", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.d))
		s.publish()
		s.mustDrop(s.outside, web.externalAddresses()...)
		s.mustDrop(s.e, web.externalAddresses()...)
	}},
	{name: "external policy Local refuses connections if there are no endpoints at all", needs: []Feature{Reject}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asUnready(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustRefuse(s.outside, to)
			s.mustRefuse(s.node, to)
		}
	}},
	{name: "external policy Local does not apply at cluster IPs", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "external policy Local applies to external IPs of services of type ClusterIP", run: func(s *scene) {
		web := s.addService("web").withExternalIP().externalLocal().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.outside, web.externalIP(), s.a)
	}},
	{name: "the node's own connections ignore external policy Local", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.a), asReady(s.d))
		dns := s.addService("dns").withAllFrontends().externalLocal().withEndpoints(asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustReach(s.node, to, s.a, s.d)
		}
		for _, to := range dns.externalAddresses() {
			s.mustReach(s.node, to, s.d)
		}
	}},
	{name: "connections of this node's pods ignore external policy Local", needs: []Feature{ShortCircuitPods}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.a), asReady(s.d))
		dns := s.addService("dns").withAllFrontends().externalLocal().withEndpoints(asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustReach(s.c, to, s.a, s.d)
		}
		for _, to := range dns.externalAddresses() {
			s.mustReach(s.c, to, s.d)
		}
	}},
	{name: "with both policies Local, the node's own connections ignore them only at external addresses", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().internalLocal().withEndpoints(asReady(s.d))
		s.publish()
		s.mustReach(s.node, web.loadBalancerIP(), s.d)
		s.mustDrop(s.node, web.clusterIP())
	}},
	{name: "changes of the traffic policies take effect", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a, s.d)
		web.externalLocal().internalLocal()
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a)
		s.mustReach(s.c, web.clusterIP(), s.a)
		cluster := corev1.ServiceInternalTrafficPolicyCluster
		web.Spec.ExternalTrafficPolicy, web.Spec.InternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster, &cluster
		s.publish()
		s.mustReach(s.outside, web.loadBalancerIP(), s.a, s.d)
		s.mustReach(s.c, web.clusterIP(), s.a, s.d)
	}},
}

var sourceAddressCases = []testCase{
	{name: "an endpoint that connects to itself through its service sees an address of the node", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a))
		dns := s.addService("dns").withAllFrontends().externalLocal().withEndpoints(asReady(s.a))
		s.publish()
		for _, to := range append(web.allAddresses(), dns.allAddresses()...) {
			s.mustMasquerade(s.a, to, s.a)
		}
	}},
	{name: "at a cluster IP, connections from pods and from the node keep their source address", needs: []Feature{SourceAddress}, run: func(s *scene) {
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustKeepSource(s.c, web.clusterIP(), s.a, s.d)
		s.mustKeepSource(s.node, web.clusterIP(), s.a, s.d)
	}},
	{name: "at external addresses with policy Cluster, connections from elsewhere get an address of the node", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			for _, from := range []person{s.outside, s.e} {
				s.mustMasquerade(from, to, s.a, s.d)
			}
		}
	}},
	{name: "at external addresses with policy Cluster, connections of the node and its pods get an address of the node", run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			for _, from := range []person{s.c, s.node} {
				s.mustMasquerade(from, to, s.a, s.d)
			}
		}
	}},
	{name: "at external addresses with policy Local, connections from outside keep their source address", needs: []Feature{SourceAddress}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustKeepSource(s.outside, to, s.a, s.b)
		}
	}},
	{name: "at external addresses with policy Local, the node's own connections get the source address of the route to the endpoint", needs: []Feature{SourceAddress}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().externalLocal().withEndpoints(asReady(s.d))
		s.publish()
		// The client uses the node's second address as source. The proxy must replace this
		// source address.
		for _, to := range web.externalAddresses() {
			for _, peer := range s.mustReach(s.withAddress(s.node, 1), to, s.d) {
				if peer != s.node.Addrs.Family(s.family)[0] {
					s.failf("from node to %s: %s sees %s, not the address towards it", to, s.d.Name, peer)
				}
			}
		}
	}},
	{name: "at external addresses with policy Local, connections of this node's pods keep their source address", needs: []Feature{SourceAddress, ShortCircuitPods}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withLoadBalancer().externalLocal().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, to := range web.externalAddresses() {
			s.mustKeepSource(s.c, to, s.a, s.d)
		}
	}},
	{name: "at a cluster IP, connections from outside the pod network get an address of the node if so configured", needs: []Feature{Masquerade, ClusterIPsFromOutside, SourceAddress}, run: func(s *scene) {
		s.restartWith(func(site *Site) { site.Masquerade = MasqueradeOutside })
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		s.mustMasquerade(s.outside, web.clusterIP(), s.a, s.d)
		s.mustKeepSource(s.c, web.clusterIP(), s.a, s.d)
	}},
	{name: "at a cluster IP, all connections get an address of the node if so configured", needs: []Feature{Masquerade}, run: func(s *scene) {
		s.restartWith(func(site *Site) { site.Masquerade = MasqueradeAll })
		web := s.addService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, from := range []person{s.c, s.node, s.b} {
			s.mustMasquerade(from, web.clusterIP(), s.a, s.d)
		}
	}},
}
