// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"errors"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
	"github.com/kpng-project/kpng/internal/parameters"
	"golang.org/x/sys/unix"
)

var resetCases = []testCase{
	{name: "connections to a removed endpoint are reset at the cluster IP", needs: []Feature{Resets}, run: func(s *scene) {
		s.resetsAt(s.c, (*service).clusterIP)
	}},
	{name: "the node's own connections to a removed endpoint are reset", needs: []Feature{Resets}, run: func(s *scene) {
		s.resetsAt(s.node, (*service).clusterIP)
	}},
	{name: "connections to a removed endpoint are reset at the external IP", needs: []Feature{Resets}, run: func(s *scene) {
		s.resetsAt(s.outside, (*service).externalIP)
	}},
	{name: "connections to a removed endpoint are reset at the load-balancer IP", needs: []Feature{Resets}, run: func(s *scene) {
		s.resetsAt(s.outside, (*service).loadBalancerIP)
	}},
	{name: "connections to a removed endpoint are reset at node ports", needs: []Feature{Resets, NodePorts}, run: func(s *scene) {
		s.resetsAt(s.outside, func(svc *service) netip.AddrPort { return svc.nodePort(0) })
	}},
	{name: "connections of an idle client to a removed endpoint are reset", needs: []Feature{Resets}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		inside, outside := s.openTo(s.c, web, s.a), s.openTo(s.outside, web, s.a)
		web.withEndpoints(asReady(s.d))
		s.publish()
		inside.mustBeResetWhileIdle()
		outside.mustBeResetWhileIdle()
	}},
	{name: "all connections to a removed endpoint are reset", needs: []Feature{Resets}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		var flows []*flow
		for range 40 {
			flows = append(flows, s.openTo(s.c, web, s.a))
		}
		web.withEndpoints(asReady(s.d))
		s.publish()
		for _, f := range flows {
			f.mustBeReset()
		}
		s.mustReach(s.c, web.clusterIP(), s.d)
	}},
	{name: "connections are reset when the last endpoint is removed", needs: []Feature{Resets, Reject}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openTo(s.outside, web, s.a)
		web.withEndpoints()
		s.publish()
		f.mustBeReset()
		s.mustRefuse(s.outside, web.loadBalancerIP())
	}},
	{name: "connections to an endpoint that is no longer ready are reset", needs: []Feature{Resets}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openTo(s.c, web, s.a)
		web.withEndpoints(asUnready(s.a), asReady(s.d))
		s.publish()
		f.mustBeReset()
	}},
	{name: "connections to a terminating endpoint are reset if another is ready", needs: []Feature{Resets}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openTo(s.c, web, s.a)
		web.withEndpoints(asDraining(s.a), asReady(s.d))
		s.publish()
		f.mustBeReset()
	}},
	{name: "each family of a dual-stack service resets its own connections", needs: []Feature{Resets, EstablishedStay}, runsOnce: true, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		four, six := s.openFlow(s.c, api.TCP, web.at(web.Spec.ClusterIPs[0])), s.openFlow(s.c, api.TCP, web.at(web.Spec.ClusterIPs[1]))
		four.mustReach(s.a)
		six.mustReach(s.a)
		web.withEndpoints(asReady(s.a)).withSlice("2", targetPorts(web.Spec.Ports), asReady(s.d))
		web.slices[0].only, web.slices[1].only = api.IPv6, api.IPv4
		s.publish()
		four.mustBeReset()
		six.mustReach(s.a)
	}},
	{name: "resets leave connections to other endpoints untouched", needs: []Feature{Resets, EstablishedStay}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		other := s.resettingService("other").withEndpoints(asReady(s.a), asReady(s.e))
		s.publish()
		lost, others := s.openTo(s.c, web, s.a), s.openMany(other)
		remote := s.openTo(s.outside, web, s.d)
		web.withEndpoints(asReady(s.b), asReady(s.d))
		s.publish()
		lost.mustBeReset()
		for range 3 {
			others()
			remote.mustReach(s.d)
		}
	}},
	{name: "without a request for resets, connections to a lost endpoint continue beside a service with resets", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web, keep := s.resettingService("web").withEndpoints(asReady(s.a)), s.addService("keep").withLoadBalancer().with(parameters.Connections, "keep").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openTo(s.c, keep, s.a)
		for _, svc := range []*service{web, keep} {
			svc.withEndpoints(asReady(s.d))
		}
		s.publish()
		s.staysWith(f, s.a)
	}},
	{name: "connections to an endpoint of weight zero are not reset", needs: []Feature{Weights, EstablishedStay}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openTo(s.c, web, s.a)
		web.withWeights(weight("0", asReady(s.a)), weight("5", asReady(s.d)))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.d)
		s.staysWith(f, s.a)
	}},
	{name: "connections to a terminating endpoint that still gets new connections are not reset", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a), asReady(s.d))
		s.publish()
		f := s.openTo(s.c, web, s.a)
		web.withEndpoints(asDraining(s.a), asUnready(s.d))
		s.publish()
		s.mustReach(s.c, web.clusterIP(), s.a)
		s.staysWith(f, s.a)
	}},
	{name: "a request for resets does not end connections to ready endpoints", needs: []Feature{Resets, EstablishedStay}, run: func(s *scene) {
		web := s.addService("web").withLoadBalancer().withEndpoints(asReady(s.a), asReady(s.b))
		s.publish()
		stay, lost := s.openMany(web), s.openTo(s.c, web, s.a)
		web.with(parameters.Connections, "reset")
		s.publish()
		stay()
		lost.mustReach(s.a)
		web.withEndpoints(asReady(s.b))
		s.publish()
		lost.mustBeReset()
	}},
	{name: "connections continue when their service with resets is deleted", needs: []Feature{EstablishedStay}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		inside, outside := s.openTo(s.c, web, s.a), s.openTo(s.outside, web, s.a)
		s.remove(web)
		s.publish()
		s.staysWith(inside, s.a)
		s.staysWith(outside, s.a)
	}},
	{name: "with resets, UDP flows move as without", needs: []Feature{UDP, FlowCleanup}, run: func(s *scene) {
		web := s.resettingService("web").withEndpoints(asReady(s.a))
		s.publish()
		f := s.openFlow(s.c, api.UDP, web.clusterIP())
		f.mustReach(s.a)
		web.withEndpoints(asReady(s.d))
		s.publish()
		f.movesTo(s.d)
	}},
}

// resettingService creates a service that requests resets, with an external IP and a
// load-balancer IP.
func (s *scene) resettingService(name string) *service {
	return s.addService(name).withExternalIP().withLoadBalancer().with(parameters.Connections, "reset")
}

// resetsAt checks that a client's connection to an address of a service is reset when the
// endpoint of the connection is removed.
func (s *scene) resetsAt(from person, at func(*service) netip.AddrPort) {
	web := s.resettingService("web").withNodePort().withEndpoints(asReady(s.a))
	s.publish()
	f := s.openFlow(from, api.TCP, at(web))
	f.mustReach(s.a)
	web.withEndpoints(asReady(s.d))
	s.publish()
	f.mustBeReset()
	s.mustReach(from, at(web), s.d)
}

// staysWith checks that a connection reaches p for a while.
func (s *scene) staysWith(f *flow, p person) {
	for range 5 {
		f.mustReach(p)
		s.sleep(50 * time.Millisecond)
	}
}

// mustBeReset checks that the TCP connection is reset within opts.Patience.
func (f *flow) mustBeReset() {
	for deadline := time.Now().Add(f.scene.opts.Patience); ; {
		answer, err := f.Ask(time.Now().Add(answerTimeout))
		switch {
		case isReset(err) || errors.Is(err, unix.EPIPE):
			return
		case err != nil && !world.TimedOut(err), time.Now().After(deadline):
			f.scene.failf("flow %s must be reset: answer from %q, error %v", f.what, answer.Name, err)
		}
		f.scene.sleep(5 * time.Millisecond)
	}
}

// mustBeResetWhileIdle checks that the TCP connection is reset within opts.Patience,
// although the client sends nothing.
func (f *flow) mustBeResetWhileIdle() {
	f.scene.must(f.SetDeadline(time.Now().Add(f.scene.opts.Patience)))
	if n, err := f.Read(make([]byte, 1)); !isReset(err) {
		f.scene.failf("idle flow %s must be reset: %d bytes, error %v", f.what, n, err)
	}
}

// isReset reports whether a connection was reset. A socket that the kernel destroys on its
// own node has the error ECONNABORTED.
func isReset(err error) bool {
	return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.ECONNABORTED)
}
