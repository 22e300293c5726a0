// SPDX-License-Identifier: Apache-2.0

// Package nodeview computes what a Service means on one node. The package is pure: it has
// no clock, no I/O and no state. All results are safe for concurrent use.
//
// [View] computes the endpoints that one node uses, from the cluster's state of a
// service. [Frontends] lists the frontends that a backend has to program for a view, with
// all decisions. [Unserved] lists the frontends that a backend must not program, each
// with the reason. [Explain] gives the reason for each decision.
//
//	view := nodeview.View(state, node)
//	for f := range nodeview.Frontends(view) {
//		// Program f: f.Elsewhere and f.Node have the verdicts and endpoints for traffic
//		// from elsewhere and from this node.
//		fmt.Println(f.FrontendKey, f.Elsewhere, f.Node)
//	}
//
// docs/reference/semantics.md contains the rules. The file rules_test.go names the functions that
// implement each rule, and its tests.
package nodeview

import (
	"cmp"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/lookup"
)

// View returns the node's view of the service in s. It returns nil if s has
// EndpointSlices but no service, or if the service has the type ExternalName.
//
// View uses the name and the zone of node. If node is nil or has no name, no endpoint is
// local. The result shares memory with s and is immutable.
func View(s *api.ServiceState, node *api.Node) *api.View {
	return view(s, node, nil)
}

// view implements View. If tr is not nil, tr records every decision.
func view(s *api.ServiceState, node *api.Node, tr *trace) *api.View {
	svc := s.Service
	if svc == nil || svc.Type == api.ExternalName {
		return nil
	}

	// These buffers are on the stack. They suffice for most services, because most have few
	// endpoints in few EndpointSlices. If a function stored a buffer through a pointer, the
	// buffer would escape to the heap. So functions that fill a buffer return it.
	var (
		ports      [4]*api.PortMapping
		targets    [8]int32
		overrides  [2][]api.PortName
		candidates [16]candidate
		reasons    [32]listReasons
	)
	c := selection{slices: s.Slices, ports: servedPorts(ports[:0], svc)}
	c.targets, c.overrides = matchPorts(targets[:0], overrides[:0], c.slices, c.ports)
	families := svc.Families()
	endpoints := 0
	for _, slice := range s.Slices {
		endpoints += len(slice.Endpoints)
	}
	c.candidates = c.gather(grow(candidates[:0], endpoints), families, tr)
	c.sort()
	size := len(c.ports) * len(c.candidates)
	c.reasons = grow(reasons[:0], size)[:size]
	c.dropUnserved()
	c.dropDuplicates()

	view := &api.View{Service: svc, Lost: s.Lost}
	here := locationOf(node)
	v4 := c.countV4()
	for p, port := range c.ports {
		for _, f := range [...]api.Family{api.IPv4, api.IPv6} {
			if !slices.Contains(families, f) {
				continue
			}
			lo, hi := 0, v4
			if f == api.IPv6 {
				lo, hi = v4, len(c.candidates)
			}
			t := decide(c.row(p)[lo:hi], c.candidates[lo:hi], here)
			if !t.usable {
				view.Unusable = append(view.Unusable, portFamily(port, f))
			}
			tr.addList(&c, p, f, &t, lo, hi)
		}
	}
	c.list(view, policiesOf(svc), here)
	return view
}

func (c *selection) list(view *api.View, pol policies, here location) {
	listed, draining := c.assignLists(pol)
	if listed+draining == 0 {
		return
	}
	endpoints := make([]api.Endpoint, listed+draining)
	if listed > 0 {
		view.Endpoints = endpoints[:listed:listed]
	}
	if draining > 0 {
		view.Draining = endpoints[listed:]
	}
	nextListed, nextDraining := 0, listed
	for i := range c.candidates {
		cand := &c.candidates[i]
		var e *api.Endpoint
		switch {
		case cand.scopes != api.Scopes{}:
			e = &endpoints[nextListed]
			nextListed++
		case cand.drains:
			e = &endpoints[nextDraining]
			nextDraining++
		default:
			continue
		}
		d := cand.ep.Details.Value()
		e.Hostname, e.NodeName, e.Zone, e.Target = d.Hostname, d.NodeName, d.Zone, d.Target
		e.Addr, e.Weight, e.Conditions = cand.addr, cand.ep.Weight, cand.ep.Conditions
		e.Local = here.runs(cand.ep)
		e.PortOverrides = c.overrides[cand.slice]
		e.Scopes = cand.scopes
		if cand.uneven {
			e.PortScopes = c.portScopes(i, pol)
		}
	}
}

// assignLists finds the lists of each candidate. These lists contain the candidate for at
// least one port. It returns how many candidates are listed, and how many are draining. A
// draining candidate is eligible for a port, but is on no list. It may still have
// connections.
func (c *selection) assignLists(pol policies) (listed, draining int) {
	for i := range c.candidates {
		cand := &c.candidates[i]
		eligible := false
		for p := range c.ports {
			m := c.reasonsAt(p, i)
			scopes := pol.scopes(m)
			cand.uneven = cand.uneven || p > 0 && scopes != pol.scopes(c.reasonsAt(0, i))
			cand.scopes = eitherOf(cand.scopes, scopes)
			eligible = eligible || m.eligible()
		}
		switch {
		case cand.scopes != api.Scopes{}:
			listed++
		case eligible && answers(cand.ep.Conditions):
			cand.drains = true
			draining++
		}
	}
	return listed, draining
}

func (c *selection) portScopes(candidate int, pol policies) []api.PortScopes {
	var out []api.PortScopes
	for p, port := range c.ports {
		if s := pol.scopes(c.reasonsAt(p, candidate)); s != (api.Scopes{}) {
			out = append(out, api.PortScopes{Protocol: port.Protocol, Port: port.Port, Scopes: s})
		}
	}
	lookup.Sort(out, func(a, b api.PortScopes) int { return comparePorts(a, b.Port, b.Protocol) })
	return out
}

// scopesOf returns the lists of the service port p that contain the endpoint. A nil p stands
// for the only "port" of an all-ports service.
func scopesOf(e *api.Endpoint, p *api.PortMapping) api.Scopes {
	if len(e.PortScopes) == 0 || p == nil {
		return e.Scopes
	}
	s := lookup.Find(e.PortScopes, p, func(s api.PortScopes, p *api.PortMapping) int { return comparePorts(s, p.Port, p.Protocol) })
	if s == nil {
		return api.Scopes{}
	}
	return s.Scopes
}

func comparePorts(s api.PortScopes, port int32, protocol api.Protocol) int {
	return cmp.Or(cmp.Compare(s.Port, port), cmp.Compare(s.Protocol, protocol))
}

// eitherOf returns the lists that are set in a, or in b, or in both.
func eitherOf(a, b api.Scopes) api.Scopes {
	return api.Scopes{Internal: a.Internal || b.Internal, External: a.External || b.External, Cluster: a.Cluster || b.Cluster}
}

// grow returns an empty slice with room for n elements. If buf is large enough, the slice
// uses the memory of buf.
func grow[T any](buf []T, n int) []T {
	if n > cap(buf) {
		return make([]T, 0, n)
	}
	return buf
}
