// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// This file is a second implementation of those rules of docs/reference/semantics.md that
// kube-proxy does not have. It follows the text of the rules, and is slow. For the other
// rules, test/kpdiff compares kpng with kube-proxy.

// entry is an endpoint of an EndpointSlice, for one port.
type entry struct {
	slice *api.EndpointSlice
	ep    *api.SliceEndpoint
	port  int32 // 0 means all ports
}

// oracleKey returns the Key of the endpoint with address addr in an EndpointSlice.
func oracleKey(svc *api.Service, slice *api.EndpointSlice, addr netip.Addr) string {
	e := api.Endpoint{Addr: addr}
	if !svc.AllPorts {
		for _, p := range oraclePorts(svc) {
			e.PortOverrides = append(e.PortOverrides, oracleOverride(slice, p)...)
		}
	}
	return e.Key()
}

// oracleEntries returns the endpoints that serve a port in one family. Each pair of
// address and port occurs once.
func oracleEntries(state *api.ServiceState, p *api.PortMapping, family api.Family) map[netip.AddrPort]entry {
	best := map[netip.AddrPort]entry{}
	for _, slice := range state.Slices {
		for i := range slice.Endpoints {
			e := entry{slice: slice, ep: &slice.Endpoints[i]}
			if p != nil {
				e.port = oracleTarget(slice, p)
				if e.port == 0 {
					continue
				}
			}
			if api.FamilyOf(e.ep.Addr) != family {
				continue
			}
			at := netip.AddrPortFrom(e.ep.Addr, uint16(e.port))
			if other, ok := best[at]; !ok || oraclePrefers(e, other) {
				best[at] = e
			}
		}
	}
	return best
}

func oraclePrefers(a, b entry) bool {
	switch {
	case a.ep.Ready != b.ep.Ready:
		return a.ep.Ready
	case a.ep.Terminating != b.ep.Terminating:
		return b.ep.Terminating
	case a.ep.Serving != b.ep.Serving:
		return a.ep.Serving
	case a.slice.Name != b.slice.Name:
		return a.slice.Name < b.slice.Name
	}
	// The order of entries in an EndpointSlice must not matter, so compare their content.
	return slices.Compare(oracleContent(a), oracleContent(b)) < 0
}

// oracleContent returns all fields in which two entries of one slice may differ. An empty
// string follows each list of hints, so that a shorter list sorts first.
func oracleContent(e entry) []string {
	d := e.ep.Details.Value()
	out := []string{d.NodeName, d.Hostname, d.Zone}
	h := d.Hints
	if h == nil {
		h = &api.Hints{}
	}
	for _, list := range [][]string{h.ForNodes, h.ForZones} {
		for _, name := range list {
			out = append(out, "+"+name)
		}
		out = append(out, "")
	}
	return out
}

// oraclePorts returns the served ports. A single nil element means that all ports are
// served.
func oraclePorts(svc *api.Service) []*api.PortMapping {
	if svc.AllPorts || len(svc.Ports) == 0 {
		return []*api.PortMapping{nil}
	}
	var out []*api.PortMapping
	numbers := map[[2]int32]bool{}
	names := map[string]bool{}
	for i := range svc.Ports {
		p := &svc.Ports[i]
		if p.Protocol == api.UnknownProtocol || p.Port == 0 {
			continue
		}
		out = append(out, p)
	}
	return slices.DeleteFunc(out, func(p *api.PortMapping) bool {
		id, name := [2]int32{p.Port, int32(p.Protocol)}, cmp.Or(p.Name, p.TargetPortName)
		twice := numbers[id] || names[name]
		numbers[id], names[name] = true, true
		return twice
	})
}

func oracleTarget(slice *api.EndpointSlice, p *api.PortMapping) int32 {
	for _, sp := range slice.Ports {
		if sp.Name == p.Name && sp.Protocol == p.Protocol {
			return sp.Port
		}
	}
	return 0
}

func oracleOverride(slice *api.EndpointSlice, p *api.PortMapping) []api.PortName {
	if p == nil {
		return nil
	}
	n := oracleTarget(slice, p)
	switch {
	case n == 0:
		return nil
	case p.Name != "":
		return []api.PortName{{Name: p.Name, Port: n}}
	case p.TargetPortName != "":
		return []api.PortName{{Name: p.TargetPortName, Port: n}}
	case n != p.TargetPort:
		return []api.PortName{{Port: n}}
	}
	return nil
}

// oracleClaims returns the claims that the service owns, with their families.
func oracleClaims(state *api.ServiceState) map[api.Claim]map[api.Family]bool {
	svc := state.Service
	out := map[api.Claim]map[api.Family]bool{}
	add := func(c api.Claim, f api.Family) {
		lost := slices.ContainsFunc(state.Lost, func(l api.LostClaim) bool { return l.Claim == c })
		if lost || !slices.Contains(svc.Families(), f) {
			return
		}
		if out[c] == nil {
			out[c] = map[api.Family]bool{}
		}
		out[c][f] = true
	}
	if len(svc.Ports) == 0 && !svc.AllPorts {
		return out
	}
	for _, p := range oraclePorts(svc) {
		sets := []api.IPSet{svc.IPs.ExternalIPs, svc.IPs.LoadBalancerIPs}
		if !svc.IPs.Headless {
			sets = append(sets, svc.IPs.ClusterIPs)
		}
		for _, set := range sets {
			for a := range set.All() {
				c := api.Claim{IP: a}
				if p != nil {
					c.Protocol, c.Port = p.Protocol, p.Port
				}
				add(c, api.FamilyOf(a))
			}
		}
		if p != nil && p.NodePort != 0 {
			for _, f := range svc.Families() {
				add(api.Claim{Family: f, Protocol: p.Protocol, Port: p.NodePort}, f)
			}
		}
	}
	return out
}
