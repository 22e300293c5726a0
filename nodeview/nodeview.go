// SPDX-License-Identifier: Apache-2.0

// Package nodeview says what a Service means on one node. It is pure: no
// clock, no I/O, no state; everything it returns may be used by any goroutine.
//
// [View] turns what the cluster says about a service into the endpoints that
// one node balances to. [Frontends] lists what a backend has to program for
// such a view, with everything decided, and [Unserved] what it has to leave
// alone, and why. [Explain] gives the reason of each of these decisions.
//
// The rules are those of docs/semantics.md, which names for each the function
// that implements it and the test that shows it.
package nodeview

import (
	"slices"

	"github.com/kpng-project/kpng/api"
)

// View returns what the node has to do for the service of s, nil if there is
// no service (only slices of one) or if it is of type ExternalName.
//
// Of node it uses the name and the zone. A nil node, or one without a name,
// has no local endpoints. The result shares what it can with s and is
// immutable like everything else.
func View(s *api.ServiceState, node *api.Node) *api.ServiceEndpoints {
	return view(s, node, nil)
}

// view is View; tr, if it is not nil, is told how each decision was made.
func view(s *api.ServiceState, node *api.Node, tr *trace) *api.ServiceEndpoints {
	svc := s.Service
	if svc == nil || svc.Type == api.ExternalName {
		return nil
	}

	// The buffers keep a common service, few endpoints in few slices, off the
	// heap, as long as what fills them returns the result: stored through a
	// pointer, they would escape.
	var (
		ports      [4]*api.PortMapping
		targets    [8]int32
		overrides  [2][]api.PortName
		candidates [16]candidate
		members    [32]membership
	)
	c := contest{slices: s.Slices, ports: servedPorts(ports[:0], svc)}
	c.targets, c.overrides = matchPorts(targets[:0], overrides[:0], c.slices, c.ports)
	families := svc.Families()
	endpoints := 0
	for _, slice := range s.Slices {
		endpoints += len(slice.Endpoints)
	}
	c.candidates = c.gather(grow(candidates[:0], endpoints), families, tr)
	c.sort()
	size := len(c.ports) * len(c.candidates)
	c.members = grow(members[:0], size)[:size]
	c.dropUnserved()
	c.dropDuplicates()

	se := &api.ServiceEndpoints{Service: svc, Lost: s.Lost}
	here := placeOf(node)
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
				se.Unusable = append(se.Unusable, portFamily(port, f))
			}
			tr.decided(&c, p, f, &t, lo, hi)
		}
	}
	c.list(se, policiesOf(svc), here)
	return se
}

// list fills in the endpoints of se from what was decided.
func (c *contest) list(se *api.ServiceEndpoints, pol policies, here place) {
	listed, draining := c.settle(pol)
	if listed+draining == 0 {
		return
	}
	endpoints := make([]api.Endpoint, listed+draining)
	if listed > 0 {
		se.Endpoints = endpoints[:listed:listed]
	}
	if draining > 0 {
		se.Draining = endpoints[listed:]
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
		e.Hostname, e.Addr, e.NodeName, e.Zone, e.Conditions = cand.ep.Hostname, cand.addr, cand.ep.NodeName, cand.ep.Zone, cand.ep.Conditions
		e.Target = cand.ep.Target
		e.Local = here.runs(cand.ep)
		e.PortOverrides = c.overrides[cand.slice]
		e.Scopes = cand.scopes
		if cand.uneven {
			e.PortScopes = c.portScopes(i, pol)
		}
	}
}

// settle works out the lists that each candidate is on over all ports, and returns how
// many are on a list and how many drain: those that competed for a port, are on no list,
// and answer.
func (c *contest) settle(pol policies) (listed, draining int) {
	for i := range c.candidates {
		cand := &c.candidates[i]
		competes := false
		for p := range c.ports {
			m := c.member(p, i)
			scopes := pol.scopes(m)
			cand.uneven = cand.uneven || p > 0 && scopes != pol.scopes(c.member(0, i))
			cand.scopes = cand.scopes.Or(scopes)
			competes = competes || m.competes()
		}
		switch {
		case cand.scopes != api.Scopes{}:
			listed++
		case competes && answers(cand.ep.Conditions):
			cand.drains = true
			draining++
		}
	}
	return listed, draining
}

// portScopes returns the lists of a candidate port by port.
func (c *contest) portScopes(candidate int, pol policies) []api.PortScopes {
	var out []api.PortScopes
	for p, port := range c.ports {
		if s := pol.scopes(c.member(p, candidate)); s != (api.Scopes{}) {
			out = append(out, api.PortScopes{Protocol: port.Protocol, Port: port.Port, Scopes: s})
		}
	}
	return out
}

// grow returns an empty slice with room for n: buf if it has it.
func grow[T any](buf []T, n int) []T {
	if n > cap(buf) {
		return make([]T, 0, n)
	}
	return buf
}
