// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"time"

	"github.com/kpng-project/kpng/conformance/internal/world"
)

var allPortsCases = []testCase{
	{name: "all ports of all addresses lead to the same ports of endpoints", needs: []Feature{AllPorts}, run: func(s *scene) {
		web := s.allPorts().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		for _, port := range world.PodPorts {
			s.mustReach(s.outside, withPort(web.externalIP(), int(port)), s.a, s.d)
			s.mustReach(s.c, withPort(web.clusterIP(), int(port)), s.a, s.d)
			s.mustReach(s.node, withPort(web.externalIP(), int(port)), s.a, s.d)
		}
	}},
	{name: "echo requests lead to endpoints", needs: []Feature{AllPorts}, run: func(s *scene) {
		web := s.allPorts().withEndpoints(asReady(s.a))
		s.publish()
		for _, from := range []person{s.outside, s.c, s.node} {
			s.must(s.ping(from, web, s.opts.Patience))
		}
		s.remove(web)
		s.publish()
		for _, from := range []person{s.outside, s.c} {
			if s.ping(from, web, answerTimeout) == nil {
				s.failf("from %s to %s: an echo request is answered after the service was deleted", from, web.externalIP())
			}
		}
	}},
	{name: "an endpoint reaches itself through its all-ports service", needs: []Feature{AllPorts}, run: func(s *scene) {
		web := s.allPorts().withEndpoints(asReady(s.a))
		s.publish()
		s.mustMasquerade(s.a, withPort(web.externalIP(), 8080), s.a)
	}},
	{name: "without endpoints, connections to any port are refused", needs: []Feature{AllPorts, Reject}, run: func(s *scene) {
		web := s.allPorts()
		s.publish()
		for _, port := range []int{80, 8080} {
			s.mustRefuse(s.outside, withPort(web.externalIP(), port))
			s.mustRefuse(s.node, withPort(web.externalIP(), port))
		}
	}},
	{name: "with policy Local and all endpoints on other nodes, connections to any port are dropped", needs: []Feature{AllPorts}, run: func(s *scene) {
		web := s.allPorts().externalLocal().withEndpoints(asReady(s.d))
		s.publish()
		s.mustDrop(s.outside, withPort(web.externalIP(), 80), withPort(web.externalIP(), 8080))
	}},
	{name: "the ports of the service and of its slices are ignored", needs: []Feature{AllPorts}, run: func(s *scene) {
		web := s.allPorts()
		web.withSlice("1", nil, asReady(s.a))
		s.publish()
		s.mustReach(s.outside, withPort(web.externalIP(), 8081), s.a)
	}},
	{name: "a younger service gets no port of an address that an all-ports service has claimed", needs: []Feature{AllPorts, Claims}, run: func(s *scene) {
		older := s.allPorts().withEndpoints(asReady(s.a))
		younger := s.addService("younger").withEndpoints(asReady(s.b))
		younger.Spec.ExternalIPs, younger.Spec.ExternalTrafficPolicy = older.Spec.ExternalIPs, older.Spec.ExternalTrafficPolicy
		for i := range younger.Spec.Ports {
			younger.Spec.Ports[i].Port = 8080
		}
		younger.withEndpoints(asReady(s.b))
		s.publish()
		s.mustReach(s.outside, withPort(older.externalIP(), 8080), s.a)
		s.remove(older)
		s.publish()
		s.mustReach(s.outside, younger.externalIP(), s.b)
	}},
}

// allPorts creates an all-ports service with an external IP.
func (s *scene) allPorts() *service {
	svc := s.addService("all").withExternalIP()
	svc.Annotations = map[string]string{AllPortsAnnotation: "true"}
	return svc
}

// ping sends an echo request to a service's external IP.
func (s *scene) ping(from person, svc *service, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(s.ctx, wait)
	defer cancel()
	return from.Ping(ctx, svc.externalIP().Addr())
}
