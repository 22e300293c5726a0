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

// clients is the number of client addresses for checks of independent choices. The
// probability that all of them choose the same one of three endpoints is 1 in 100,000.
const clients = 12

var affinityCases = []testCase{
	{name: "a client keeps its endpoint, and clients use different endpoints", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800)
		s.publish()
		for _, protocol := range s.protocols {
			chosen := s.choices(protocol, web.loadBalancerIP())
			if len(slices.Compact(slices.Sorted(slices.Values(chosen)))) == 1 {
				s.failf("%s: %d client addresses have all chosen %s", protocol, clients, chosen[0])
			}
			for range 4 {
				s.same(chosen, s.choices(protocol, web.loadBalancerIP()), all)
			}
		}
	}},
	{name: "affinity applies to the node and its pods", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800)
		s.publish()
		for _, from := range []person{s.node, s.c} {
			first := s.choice(s.protocols[0], from, web.clusterIP())
			for range tries {
				if now := s.choice(s.protocols[0], from, web.clusterIP()); now != first {
					s.failf("%s moved from %s to %s", from, first, now)
				}
			}
		}
	}},
	{name: "a client has the same endpoint at all addresses of a service", needs: []Feature{Affinity, AffinityAcrossFrontends}, run: func(s *scene) {
		web := s.affine(10800)
		s.publish()
		chosen := s.choices(api.TCP, web.loadBalancerIP())
		for _, to := range web.external() {
			s.same(chosen, s.choices(api.TCP, to), all)
		}
	}},
	{name: "affinity ends only when a client has made no new connection for the timeout", needs: []Feature{Affinity}, run: func(s *scene) {
		const timeout = time.Second
		web := s.affine(int32(timeout.Seconds()))
		s.publish()
		for attempt := 0; ; attempt++ {
			before := time.Now()
			first := s.choices(api.TCP, web.loadBalancerIP())
			inTime := true
			for range 2 {
				s.pass(timeout * 6 / 10)
				now := time.Now()
				again := s.choices(api.TCP, web.loadBalancerIP())
				// No client's last connection was earlier than before.
				if inTime = inTime && time.Since(before) < timeout; inTime {
					s.same(first, again, all)
				}
				before = now
			}
			if !inTime && attempt < 5 {
				continue // the machine is too busy for a result
			}
			s.pass(timeout + timeout/4)
			if slices.Equal(first, s.choices(api.TCP, web.loadBalancerIP())) {
				s.failf("%d client addresses still have their endpoints %s after the timeout of %s", clients, timeout, timeout)
			}
			return
		}
	}},
	{name: "when an endpoint is removed, only its clients move to other endpoints", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800)
		s.publish()
		for _, protocol := range s.protocols {
			web.leadsTo(ready(s.a), ready(s.b), ready(s.d))
			s.publish()
			first := s.choices(protocol, web.loadBalancerIP())
			web.leadsTo(ready(s.b), ready(s.d))
			s.publish()
			second := s.choices(protocol, web.loadBalancerIP())
			s.same(first, second, func(name string) bool { return name != "a" })
			s.same(second, s.choices(protocol, web.loadBalancerIP()), all)
		}
	}},
	{name: "when an endpoint is no longer ready, only its clients move to other endpoints", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800)
		s.publish()
		first := s.choices(api.TCP, web.loadBalancerIP())
		web.leadsTo(draining(s.a), ready(s.b), ready(s.d))
		s.publish()
		second := s.choices(api.TCP, web.loadBalancerIP())
		s.same(first, second, func(name string) bool { return name != "a" })
		if slices.Contains(second, "a") {
			s.failf("a client address still uses endpoint a, which is draining")
		}
		s.same(second, s.choices(api.TCP, web.loadBalancerIP()), all)
	}},
	{name: "clients keep their endpoints while others are added and removed", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800)
		web.leadsTo(ready(s.b), ready(s.d))
		s.publish()
		first := s.choices(api.TCP, web.loadBalancerIP())
		web.leadsTo(ready(s.a), ready(s.b), ready(s.d), ready(s.e))
		s.publish()
		s.same(first, s.choices(api.TCP, web.loadBalancerIP()), all)
		web.leadsTo(ready(s.b), ready(s.d), ready(s.e))
		s.publish()
		s.same(first, s.choices(api.TCP, web.loadBalancerIP()), all)
	}},
	{name: "affinity never selects an endpoint that the traffic policy excludes", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800).leadsTo(ready(s.d))
		s.publish()
		s.choices(api.TCP, web.loadBalancerIP()) // includes d
		web.externalLocal().leadsTo(ready(s.a), ready(s.b), ready(s.d))
		s.publish()
		for i, name := range s.choices(api.TCP, web.loadBalancerIP()) {
			if name == "d" {
				s.failf("%s reaches d on the other node", s.as(s.outside, i))
			}
		}
	}},
	{name: "each port of a service has its own affinity", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.service("web").addPort("alt", 81, 8081).withLoadBalancer().withAffinity(10800).leadsTo(ready(s.a), ready(s.b), ready(s.d))
		s.publish()
		if slices.Equal(s.choices(api.TCP, web.loadBalancerIP()), s.choices(api.TCP, on(web.loadBalancerIP(), 81))) {
			s.failf("%d client addresses have the same endpoints at both ports", clients)
		}
	}},
	{name: "disabling and enabling affinity takes effect immediately", needs: []Feature{Affinity}, run: func(s *scene) {
		web := s.affine(10800)
		s.publish()
		s.choices(api.TCP, web.loadBalancerIP())
		web.Spec.SessionAffinity, web.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
		s.publish()
		s.reaches(s.as(s.outside, 0), web.loadBalancerIP(), s.a, s.b, s.d)
		web.withAffinity(10800)
		s.publish()
		s.same(s.choices(api.TCP, web.loadBalancerIP()), s.choices(api.TCP, web.loadBalancerIP()), all)
	}},
}

// affine creates a service with affinity that is reachable from outside and has two pods
// on this node and one on the other as endpoints.
func (s *scene) affine(seconds int32) *service {
	return s.service("web").exposed().withAffinity(seconds).leadsTo(ready(s.a), ready(s.b), ready(s.d))
}

// choice returns the name of the endpoint that a new connection reaches.
func (s *scene) choice(protocol api.Protocol, from person, to netip.AddrPort) string {
	answer, err := s.ask(from, protocol, to, s.opts.Patience)
	if err != nil {
		s.failf("%s: %w", what(from, protocol, to), err)
	}
	return answer.Name
}

// choices returns the choices of all client addresses.
func (s *scene) choices(protocol api.Protocol, to netip.AddrPort) []string {
	var names []string
	for i := range clients {
		names = append(names, s.choice(protocol, s.as(s.outside, i), to))
	}
	return names
}

func all(string) bool { return true }

// same checks that no client has moved whose endpoint satisfies stays.
func (s *scene) same(before, after []string, stays func(name string) bool) {
	for i, name := range before {
		if stays(name) && after[i] != name {
			s.must(fmt.Errorf("%s has moved from %s to %s", s.as(s.outside, i), name, after[i]))
		}
	}
}

// pass waits for the duration that the case tests.
func (s *scene) pass(d time.Duration) {
	select {
	case <-time.After(d):
	case <-s.ctx.Done():
		s.must(s.ctx.Err())
	}
}
