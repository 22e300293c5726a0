// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"time"

	"github.com/kpng-project/kpng/api"
)

// flowCount is the number of UDP flows in checks where each could stay or move by chance.
// With four endpoints, the probability that none moves is 1 in 65,000.
const flowCount = 8

var connectionCases = []testCase{
	{name: "established TCP connections to draining endpoints continue, and new ones use other endpoints", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().leadsTo(ready(s.a), ready(s.d))
		s.publish()
		inside, outside := s.established(s.c, web, s.a), s.established(s.outside, web, s.a)
		web.leadsTo(draining(s.a), ready(s.b))
		s.publish()
		inside.leadsTo(s.a)
		outside.leadsTo(s.a)
		s.reaches(s.c, web.clusterIP(), s.b)
		inside.leadsTo(s.a)
		outside.leadsTo(s.a)
	}},
	{name: "established TCP connections continue when their endpoint or service is removed", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().leadsTo(ready(s.a))
		s.service("stays").leadsTo(ready(s.b))
		s.publish()
		inside, outside := s.established(s.c, web, s.a), s.established(s.outside, web, s.a)
		web.leadsTo(ready(s.b))
		s.publish()
		s.reaches(s.c, web.clusterIP(), s.b)
		inside.leadsTo(s.a)
		outside.leadsTo(s.a)
		s.remove(web)
		s.publish()
		inside.leadsTo(s.a)
		outside.leadsTo(s.a)
	}},
	{name: "established TCP connections continue when all ready endpoints are on other nodes and when none remains", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.service("web").withLoadBalancer().externalLocal().leadsTo(ready(s.a))
		s.publish()
		outside := s.established(s.outside, web, s.a)
		web.leadsTo(draining(s.a), ready(s.d))
		s.publish()
		outside.leadsTo(s.a)
		web.leadsTo(unready(s.a), ready(s.d))
		s.publish()
		outside.leadsTo(s.a)
		web.leadsTo(unready(s.a))
		s.publish()
		outside.leadsTo(s.a)
	}},
	{name: "a UDP flow to a removed endpoint moves to another", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.service("web").exposed().leadsTo(ready(s.a))
		s.publish()
		flows := s.flowsTo(web)
		web.leadsTo(ready(s.b))
		s.publish()
		for _, f := range flows {
			f.movesTo(s.b)
		}
		web.leadsTo(unready(s.b), ready(s.d))
		s.publish()
		for _, f := range flows {
			f.movesTo(s.d)
		}
	}},
	{name: "UDP flows keep a serving endpoint while other endpoints are added and removed", needs: []Feature{UDP, EstablishedStay}, run: func(s *scene) {
		web := s.service("web").exposed().leadsTo(ready(s.a), ready(s.b), ready(s.d))
		dns := s.service("dns").exposed().leadsTo(ready(s.a), ready(s.b), ready(s.d), ready(s.e))
		s.publish()
		flows := map[*flow]person{}
		for range flowCount {
			for _, svc := range []*service{web, dns} {
				f := s.open(s.c, api.UDP, svc.clusterIP())
				flows[f] = f.leadsTo(s.a, s.b, s.d, s.e)
			}
		}
		stay := func() {
			for f, p := range flows {
				f.leadsTo(p)
			}
		}
		web.leadsTo(ready(s.a), ready(s.b), ready(s.d), ready(s.e))
		s.publish()
		stay()
		web.leadsTo(ready(s.a), ready(s.b), ready(s.d))
		s.publish()
		stay()
		web.leadsTo(draining(s.a), ready(s.b), ready(s.d))
		s.publish()
		stay()
		s.service("other").leadsTo(ready(s.a))
		s.publish()
		stay()
	}},
	{name: "a UDP flow ends when its service has no endpoints and continues with the next endpoint", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.service("web").exposed().leadsTo(ready(s.a))
		s.publish()
		flows := s.flowsTo(web)
		web.leadsTo()
		s.publish()
		for _, f := range flows {
			f.ends()
		}
		web.leadsTo(ready(s.b))
		s.publish()
		for _, f := range flows {
			f.movesTo(s.b)
		}
	}},
	{name: "a UDP flow through a deleted service no longer reaches its endpoints", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.service("web").withExternalIP().leadsTo(ready(s.a))
		s.publish()
		inside, outside := s.open(s.c, api.UDP, web.clusterIP()), s.open(s.outside, api.UDP, web.externalIP())
		inside.leadsTo(s.a)
		outside.leadsTo(s.a)
		s.remove(web)
		s.publish()
		inside.movesTo(person{Host: s.world.Beyond})
		outside.movesTo(person{Host: s.world.Beyond})
	}},
	{name: "a UDP flow that bypassed a service moves to its first endpoint", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.service("web").withExternalIP().leadsTo(ready(s.a))
		inside, outside := s.open(s.c, api.UDP, web.clusterIP()), s.open(s.outside, api.UDP, web.externalIP())
		beyond := person{Host: s.world.Beyond}
		inside.leadsTo(beyond)
		outside.leadsTo(beyond)
		s.publish()
		inside.movesTo(s.a)
		outside.movesTo(s.a)
	}},
	{name: "flows and connections survive a restart", needs: []Feature{Restart, EstablishedStay}, run: func(s *scene) {
		web := s.service("web").exposed().leadsTo(ready(s.a), ready(s.b), ready(s.d), ready(s.e))
		s.publish()
		stream := s.established(s.c, web, s.a)
		flows := map[*flow]person{}
		if len(s.protocols) > 1 {
			for range flowCount {
				for _, f := range []*flow{s.open(s.c, api.UDP, web.clusterIP()), s.open(s.outside, api.UDP, web.loadBalancerIP())} {
					flows[f] = f.leadsTo(s.a, s.b, s.d, s.e)
				}
			}
		}
		s.restart()
		stream.leadsTo(s.a)
		for f, p := range flows {
			f.leadsTo(p)
		}
	}},
}

// established opens TCP connections to endpoint p: from inside to the cluster IP and from
// outside to the load-balancer IP.
func (s *scene) established(from person, svc *service, p person) *flow {
	to := svc.clusterIP()
	if from.Host == s.outside.Host {
		to = svc.loadBalancerIP()
	}
	for range 400 {
		f := s.open(from, api.TCP, to)
		if f.leadsTo(s.a, s.b, s.d, s.e).Name == p.Name {
			return f
		}
	}
	s.failf("%s: 400 connections and none to %s", what(from, api.TCP, to), p)
	return nil
}

// flowsTo opens UDP flows from all clients to all addresses of a service.
func (s *scene) flowsTo(svc *service) []*flow {
	flows := []*flow{s.open(s.c, api.UDP, svc.clusterIP()), s.open(s.node, api.UDP, svc.clusterIP())}
	for _, to := range svc.external() {
		flows = append(flows, s.open(s.outside, api.UDP, to), s.open(s.c, api.UDP, to))
	}
	for _, f := range flows {
		f.leadsTo(s.a)
	}
	return flows
}

// movesTo checks that the flow soon reaches p. A proxy may move flows after it has
// programmed new connections.
func (f *flow) movesTo(p person) {
	for deadline := time.Now().Add(f.scene.opts.Patience); ; {
		answer, err := f.Ask(time.Now().Add(quiet))
		if err == nil && answer.Name == p.Name {
			return
		}
		if time.Now().After(deadline) {
			f.scene.failf("flow %s must move to %s: answer from %s, error %v", f.what, p.Name, answer.Name, err)
		}
		f.scene.pass(time.Millisecond)
	}
}

// ends checks that the flow soon gets no answers.
func (f *flow) ends() {
	for deadline := time.Now().Add(f.scene.opts.Patience); ; {
		answer, err := f.Ask(time.Now().Add(quiet))
		if err != nil {
			return
		}
		if time.Now().After(deadline) {
			f.scene.failf("flow %s must end: answer from %s", f.what, answer.Name)
		}
		f.scene.pass(time.Millisecond)
	}
}
