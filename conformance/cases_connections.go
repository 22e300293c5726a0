// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"time"

	"github.com/kpng-project/kpng/api"
)

// flowCount is the number of UDP flows in cases that check whether flows move or stay. If
// a change distributed the flows at random over four endpoints, the probability that all
// 8 flows keep their endpoint would be 1 in 65,000.
const flowCount = 8

var connectionCases = []testCase{
	{name: "established TCP connections to draining endpoints continue, and new ones use other endpoints", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		inside, outside := s.openTo(s.c, web, s.a), s.openTo(s.outside, web, s.a)
		web.withEndpoints(asDraining(s.a), asReady(s.b))
		s.publish()
		inside.mustReach(s.a)
		outside.mustReach(s.a)
		s.mustReach(s.c, web.clusterIP(), s.b)
		inside.mustReach(s.a)
		outside.mustReach(s.a)
	}},
	{name: "established TCP connections continue when their endpoint or service is removed", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a))
		s.addService("stays").withEndpoints(asReady(s.b))
		s.publish()
		inside, outside := s.openTo(s.c, web, s.a), s.openTo(s.outside, web, s.a)
		web.withEndpoints(asReady(s.b))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.b)
		inside.mustReach(s.a)
		outside.mustReach(s.a)
		s.remove(web)
		s.publish()
		inside.mustReach(s.a)
		outside.mustReach(s.a)
	}},
	{name: "established TCP connections continue when all ready endpoints are on other nodes and when none remains", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().externalLocal().withEndpoints(asReady(s.a))
		s.publish()
		outside := s.openTo(s.outside, web, s.a)
		web.withEndpoints(asDraining(s.a), asReady(s.d))
		s.publish()
		outside.mustReach(s.a)
		web.withEndpoints(asUnready(s.a), asReady(s.d))
		s.publish()
		outside.mustReach(s.a)
		web.withEndpoints(asUnready(s.a))
		s.publish()
		outside.mustReach(s.a)
	}},
	{name: "a UDP flow to a removed endpoint moves to another", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a))
		s.publish()
		flows := s.flowsTo(web)
		web.withEndpoints(asReady(s.b))
		s.publish()
		for _, f := range flows {
			f.movesTo(s.b)
		}
		web.withEndpoints(asUnready(s.b), asReady(s.d))
		s.publish()
		for _, f := range flows {
			f.movesTo(s.d)
		}
	}},
	{name: "UDP flows keep a serving endpoint while other endpoints are added and removed", needs: []Feature{UDP, EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		dns := s.addService("dns").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		flows := map[*flow]person{}
		for range flowCount {
			for _, svc := range []*service{web, dns} {
				f := s.openFlow(s.c, api.UDP, svc.clusterIP())
				flows[f] = f.mustReach(s.a, s.b, s.d, s.e)
			}
		}
		stay := func() {
			for f, p := range flows {
				f.mustReach(p)
			}
		}
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		stay()
		web.withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		stay()
		web.withEndpoints(asDraining(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		stay()
		s.addService("other").withEndpoints(asReady(s.a))
		s.publish()
		stay()
	}},
	{name: "a UDP flow stops when its service loses its last endpoint, and resumes when the service gets an endpoint", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a))
		s.publish()
		flows := s.flowsTo(web)
		web.withEndpoints()
		s.publish()
		for _, f := range flows {
			f.mustEnd()
		}
		web.withEndpoints(asReady(s.b))
		s.publish()
		for _, f := range flows {
			f.movesTo(s.b)
		}
	}},
	{name: "a UDP flow through a deleted service no longer reaches its endpoints", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withEndpoints(asReady(s.a))
		s.publish()
		inside, outside := s.openFlow(s.c, api.UDP, web.clusterIP()), s.openFlow(s.outside, api.UDP, web.externalIP())
		inside.mustReach(s.a)
		outside.mustReach(s.a)
		s.remove(web)
		s.publish()
		inside.movesTo(person{Host: s.world.Beyond})
		outside.movesTo(person{Host: s.world.Beyond})
	}},
	{name: "a UDP flow that bypassed a service moves to its first endpoint", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.addService("web").withExternalIP().withEndpoints(asReady(s.a))
		inside, outside := s.openFlow(s.c, api.UDP, web.clusterIP()), s.openFlow(s.outside, api.UDP, web.externalIP())
		beyond := person{Host: s.world.Beyond}
		inside.mustReach(beyond)
		outside.mustReach(beyond)
		s.publish()
		inside.movesTo(s.a)
		outside.movesTo(s.a)
	}},
	{name: "flows and connections survive a restart", needs: []Feature{Restart, EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withAllFrontends().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d), asReady(s.e))
		s.publish()
		stream := s.openTo(s.c, web, s.a)
		flows := map[*flow]person{}
		if len(s.protocols) > 1 {
			for range flowCount {
				for _, f := range []*flow{s.openFlow(s.c, api.UDP, web.clusterIP()), s.openFlow(s.outside, api.UDP, web.loadBalancerIP())} {
					flows[f] = f.mustReach(s.a, s.b, s.d, s.e)
				}
			}
		}
		s.restart()
		stream.mustReach(s.a)
		for f, p := range flows {
			f.mustReach(p)
		}
	}},
}

// openTo opens TCP connections until one reaches the endpoint p, and returns that
// connection. Clients outside the cluster connect to the load-balancer IP, and others to
// the cluster IP.
func (s *scene) openTo(from person, svc *service, p person) *flow {
	to := svc.clusterIP()
	if from.Host == s.outside.Host {
		to = svc.loadBalancerIP()
	}
	for range 400 {
		f := s.openFlow(from, api.TCP, to)
		if f.mustReach(s.a, s.b, s.d, s.e).Name == p.Name {
			return f
		}
	}
	s.failf("%s: 400 connections and none to %s", describe(from, api.TCP, to), p)
	return nil
}

// openMany opens TCP connections from a pod to the cluster IP of a service. The returned
// function checks that each connection still reaches its endpoint. If a change
// distributed the connections at random over two equal endpoints, all connections would
// keep their endpoint with a probability of at most 1 in 1000.
func (s *scene) openMany(svc *service) (stay func()) {
	flows := map[*flow]person{}
	for range 10 {
		f := s.openFlow(s.c, api.TCP, svc.clusterIP())
		flows[f] = f.mustReach(s.a, s.b, s.d, s.e)
	}
	return func() {
		for f, p := range flows {
			f.mustReach(p)
		}
	}
}

// flowsTo opens UDP flows from several clients to all addresses of a service.
func (s *scene) flowsTo(svc *service) []*flow {
	flows := []*flow{s.openFlow(s.c, api.UDP, svc.clusterIP()), s.openFlow(s.node, api.UDP, svc.clusterIP())}
	for _, to := range svc.externalAddresses() {
		flows = append(flows, s.openFlow(s.outside, api.UDP, to), s.openFlow(s.c, api.UDP, to))
	}
	for _, f := range flows {
		f.mustReach(s.a)
	}
	return flows
}

// movesTo checks that the flow reaches p within opts.Patience. It tries repeatedly,
// because a proxy may program new connections first and move existing flows a little
// later.
func (f *flow) movesTo(p person) {
	for deadline := time.Now().Add(f.scene.opts.Patience); ; {
		answer, err := f.Ask(time.Now().Add(answerTimeout))
		if err == nil && answer.Name == p.Name {
			return
		}
		if time.Now().After(deadline) {
			f.scene.failf("flow %s must move to %s: answer from %s, error %v", f.what, p.Name, answer.Name, err)
		}
		f.scene.sleep(time.Millisecond)
	}
}

// mustEnd checks that the answers to the flow stop within opts.Patience.
func (f *flow) mustEnd() {
	for deadline := time.Now().Add(f.scene.opts.Patience); ; {
		answer, err := f.Ask(time.Now().Add(answerTimeout))
		if err != nil {
			return
		}
		if time.Now().After(deadline) {
			f.scene.failf("flow %s must end: answer from %s", f.what, answer.Name)
		}
		f.scene.sleep(time.Millisecond)
	}
}
