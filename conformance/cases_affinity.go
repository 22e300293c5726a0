// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
)

// clientCount is the number of client addresses in cases with affinity. With three
// endpoints, the probability that all 12 clients get the same endpoint by chance is below
// 1 in 100,000.
const clientCount = 12

var affinityCases = []testCase{
	{name: "a client keeps its endpoint, and clients use different endpoints", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800)
		s.publish()
		for _, protocol := range s.protocols {
			chosen := s.endpointsByClient(protocol, web.loadBalancerIP())
			if len(slices.Compact(slices.Sorted(slices.Values(chosen)))) == 1 {
				s.failf("%s: %d client addresses have all chosen %s", protocol, clientCount, chosen[0])
			}
			for range 4 {
				s.mustNotMove(chosen, s.endpointsByClient(protocol, web.loadBalancerIP()), all)
			}
		}
	}},
	{name: "affinity applies to the node and its pods", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800)
		s.publish()
		for _, from := range []person{s.node, s.c} {
			first := s.reachedEndpoint(s.protocols[0], from, web.clusterIP())
			for range connectionsPerCheck {
				if now := s.reachedEndpoint(s.protocols[0], from, web.clusterIP()); now != first {
					s.failf("%s moved from %s to %s", from, first, now)
				}
			}
		}
	}},
	{name: "a client has the same endpoint at all addresses of a service", needs: []Feature{Affinity, AffinityAcrossFrontends}, run: func(s *scene) {
		web := s.affineService(10800)
		s.publish()
		chosen := s.endpointsByClient(api.TCP, web.loadBalancerIP())
		for _, to := range web.externalAddresses() {
			s.mustNotMove(chosen, s.endpointsByClient(api.TCP, to), all)
		}
	}},
	{name: "affinity ends only when a client has made no new connection for the timeout", needs: []Feature{Affinity}, run: func(s *scene) {
		const timeout = time.Second
		web := s.affineService(int32(timeout.Seconds()))
		s.publish()
		for attempt := 0; ; attempt++ {
			before := time.Now()
			first := s.endpointsByClient(api.TCP, web.loadBalancerIP())
			inTime := true
			for range 2 {
				s.sleep(timeout * 6 / 10)
				now := time.Now()
				again := s.endpointsByClient(api.TCP, web.loadBalancerIP())
				// inTime is false if a client's pause may have been longer than the timeout.
				if inTime = inTime && time.Since(before) < timeout; inTime {
					s.mustNotMove(first, again, all)
				}
				before = now
			}
			if !inTime && attempt < 5 {
				continue // the machine was too busy, so try again
			}
			s.sleep(timeout + timeout/4)
			if slices.Equal(first, s.endpointsByClient(api.TCP, web.loadBalancerIP())) {
				s.failf("%d client addresses still have their endpoints %s after the timeout of %s", clientCount, timeout, timeout)
			}
			return
		}
	}},
	{name: "when an endpoint is removed, only its clients move to other endpoints", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800)
		s.publish()
		for _, protocol := range s.protocols {
			web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
			s.publish()
			first := s.endpointsByClient(protocol, web.loadBalancerIP())
			web.withEndpoints(asReady(s.b), asReady(s.d))
			s.publish()
			second := s.endpointsByClient(protocol, web.loadBalancerIP())
			s.mustNotMove(first, second, func(name string) bool { return name != "a" })
			s.mustNotMove(second, s.endpointsByClient(protocol, web.loadBalancerIP()), all)
		}
	}},
	{name: "when an endpoint is no longer ready, only its clients move to other endpoints", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800)
		s.publish()
		first := s.endpointsByClient(api.TCP, web.loadBalancerIP())
		web.withEndpoints(asDraining(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		second := s.endpointsByClient(api.TCP, web.loadBalancerIP())
		s.mustNotMove(first, second, func(name string) bool { return name != "a" })
		if slices.Contains(second, "a") {
			s.failf("a client address still uses endpoint a, which is draining")
		}
		s.mustNotMove(second, s.endpointsByClient(api.TCP, web.loadBalancerIP()), all)
	}},
	{name: "clients keep their endpoints while others are added and removed", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800)
		web.withEndpoints(asReady(s.b), asReady(s.d))
		s.publish()
		first := s.endpointsByClient(api.TCP, web.loadBalancerIP())
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		s.mustNotMove(first, s.endpointsByClient(api.TCP, web.loadBalancerIP()), all)
		web.withEndpoints(asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		s.mustNotMove(first, s.endpointsByClient(api.TCP, web.loadBalancerIP()), all)
	}},
	{name: "affinity never selects an endpoint that the traffic policy excludes", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800).withEndpoints(asReady(s.d))
		s.publish()
		s.endpointsByClient(api.TCP, web.loadBalancerIP()) // all clients reach d, the only endpoint
		web.externalLocal().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		for i, name := range s.endpointsByClient(api.TCP, web.loadBalancerIP()) {
			if name == "d" {
				s.failf("%s reaches d on the other node", s.withAddress(s.outside, i))
			}
		}
	}},
	{name: "each port of a service has its own affinity", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.addService("web").addPort("alt", 81, 8081).withLoadBalancer().withAffinity(10800).withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		if slices.Equal(s.endpointsByClient(api.TCP, web.loadBalancerIP()), s.endpointsByClient(api.TCP, withPort(web.loadBalancerIP(), 81))) {
			s.failf("%d client addresses have the same endpoints at both ports", clientCount)
		}
	}},
	{name: "disabling and enabling affinity takes effect immediately", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affineService(10800)
		s.publish()
		s.endpointsByClient(api.TCP, web.loadBalancerIP())
		web.Spec.SessionAffinity, web.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
		s.publish()
		s.mustReach(s.withAddress(s.outside, 0), web.loadBalancerIP(), s.a, s.b, s.d)
		web.withAffinity(10800)
		s.publish()
		s.mustNotMove(s.endpointsByClient(api.TCP, web.loadBalancerIP()), s.endpointsByClient(api.TCP, web.loadBalancerIP()), all)
	}},
}

// affineService creates a service with session affinity and all kinds of frontends. Its
// endpoints are two pods on this node and one pod on the other node.
func (s *scene) affineService(seconds int32) *service {
	return s.addService("web").withAllFrontends().withAffinity(seconds).withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
}

// reachedEndpoint returns the name of the endpoint that a new connection reaches.
func (s *scene) reachedEndpoint(protocol api.Protocol, from person, to netip.AddrPort) string {
	answer, err := s.answer(from, protocol, to)
	if err != nil {
		s.failf("%s: %w", describe(from, protocol, to), err)
	}
	return answer.Name
}

// endpointsByClient opens a connection from each client address. It returns the names of
// the endpoints that they reach.
func (s *scene) endpointsByClient(protocol api.Protocol, to netip.AddrPort) []string {
	var names []string
	for i := range clientCount {
		names = append(names, s.reachedEndpoint(protocol, s.withAddress(s.outside, i), to))
	}
	return names
}

func all(string) bool { return true }

// mustNotMove compares the endpoints of the clients before and after a change. A client
// must keep its endpoint if mustStay returns true for the endpoint.
func (s *scene) mustNotMove(before, after []string, mustStay func(name string) bool) {
	for i, name := range before {
		if mustStay(name) && after[i] != name {
			s.must(fmt.Errorf("%s has moved from %s to %s", s.withAddress(s.outside, i), name, after[i]))
		}
	}
}

// sleep waits for the duration d or until the case is cancelled.
func (s *scene) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-s.ctx.Done():
		s.must(s.ctx.Err())
	}
}
