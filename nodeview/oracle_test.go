// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// oracle reads docs/semantics.md a second time, as literally as it can and
// without regard to cost: sets of "address:port" for each service port and
// family.
type oracle struct {
	state *api.ServiceState
	lists map[api.PortFamily]oracleLists
	// draining are the keys of endpoints that serve but are on no list.
	draining []string
}

type oracleLists struct {
	Internal, External, ShortCircuit []string
	Unusable                         bool
}

type oracleTraffic struct {
	Verdict   Verdict
	Endpoints []string
}

// entry is an endpoint of a slice for one port.
type entry struct {
	slice *api.EndpointSlice
	ep    *api.SliceEndpoint
	port  int32 // 0: all
}

func (e entry) String() string { return addrPort(e.ep.Addr, e.port) }

func newOracle(state *api.ServiceState, node *api.Node) *oracle {
	o := &oracle{state: state, lists: map[api.PortFamily]oracleLists{}}
	svc := state.Service
	nodeName, zone := "", ""
	if node != nil {
		nodeName, zone = node.Name, node.Labels["topology.kubernetes.io/zone"]
	}
	isLocal := func(e entry) bool { return nodeName != "" && e.ep.NodeName == nodeName }
	isReady := func(e entry) bool { return e.ep.Ready }
	isTerminating := func(e entry) bool { return !e.ep.Ready && e.ep.Serving && e.ep.Terminating }

	externalLocal := svc.ExternalTrafficToLocal && (svc.Type == api.NodePort || svc.Type == api.LoadBalancer ||
		svc.Type == api.ClusterIP && svc.IPs.ExternalIPs.Len() > 0)

	listed := map[*api.SliceEndpoint]bool{}
	var serving []entry
	for _, p := range oraclePorts(svc) {
		for _, family := range svc.Families() {
			all := o.entries(p, family)
			ready := keep(all, isReady)
			cluster := ready
			nodeHinted := keep(ready, func(e entry) bool { return e.ep.Hints != nil && len(e.ep.Hints.ForNodes) > 0 })
			zoneHinted := keep(ready, func(e entry) bool { return e.ep.Hints != nil && len(e.ep.Hints.ForZones) > 0 })
			thisNode := keep(nodeHinted, func(e entry) bool { return nodeName != "" && slices.Contains(e.ep.Hints.ForNodes, nodeName) })
			thisZone := keep(zoneHinted, func(e entry) bool { return zone != "" && slices.Contains(e.ep.Hints.ForZones, zone) })
			switch {
			case len(ready) == 0:
				cluster = keep(all, isTerminating)
			case len(nodeHinted) == len(ready) && len(thisNode) > 0:
				cluster = thisNode
			case len(zoneHinted) == len(ready) && len(thisZone) > 0:
				cluster = thisZone
			}
			local := keep(ready, isLocal)
			if len(local) == 0 {
				local = keep(keep(all, isLocal), isTerminating)
			}

			internal, external := cluster, cluster
			var shortCircuit []entry
			if svc.InternalTrafficToLocal {
				internal = local
			}
			if externalLocal {
				external, shortCircuit = local, cluster
			}
			for _, list := range [][]entry{internal, external, shortCircuit} {
				for _, e := range list {
					listed[e.ep] = true
				}
			}
			serving = append(serving, keep(all, func(e entry) bool { return e.ep.Serving || e.ep.Ready })...)
			o.lists[portFamily(p, family)] = oracleLists{
				Internal: names(internal), External: names(external), ShortCircuit: names(shortCircuit),
				Unusable: len(ready) == 0 && len(keep(all, isTerminating)) == 0,
			}
		}
	}
	for _, e := range serving {
		if !listed[e.ep] {
			key := api.Endpoint{Addr: e.ep.Addr}
			if !wholeAddress(svc) {
				for _, p := range oraclePorts(svc) {
					key.PortOverrides = append(key.PortOverrides, oracleOverride(e.slice, p)...)
				}
			}
			o.draining = append(o.draining, key.Key())
		}
	}
	slices.Sort(o.draining)
	o.draining = slices.Compact(o.draining)
	return o
}

// entries returns the endpoints that serve a port in one family, each address
// and port once.
func (o *oracle) entries(p *api.PortMapping, family api.Family) []entry {
	best := map[netip.AddrPort]entry{}
	for _, slice := range o.state.Slices {
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
	var out []entry
	for _, e := range best {
		out = append(out, e)
	}
	return out
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
	// Within one slice, any order will do that is one of content.
	return slices.Compare(oracleContent(a), oracleContent(b)) < 0
}

// oracleContent returns what two entries of one slice may differ in, each list
// ended so that a shorter one comes first.
func oracleContent(e entry) []string {
	out := []string{e.ep.NodeName, e.ep.Hostname, e.ep.Zone}
	h := e.ep.Hints
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

// oraclePorts returns the ports that can be served; a nil one stands for all.
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

func keep(list []entry, f func(entry) bool) []entry {
	return slices.DeleteFunc(slices.Clone(list), func(e entry) bool { return !f(e) })
}

func names(list []entry) []string {
	var out []string
	for _, e := range list {
		out = append(out, e.String())
	}
	slices.Sort(out)
	return out
}

// oracleResult is a view in the terms of the oracle.
type oracleResult struct {
	Lists    map[api.PortFamily]oracleLists
	Draining []string
}

func (o *oracle) view() oracleResult { return oracleResult{o.lists, o.draining} }

func oracleView(se *api.ServiceEndpoints) oracleResult {
	r := oracleResult{Lists: map[api.PortFamily]oracleLists{}}
	for _, p := range oraclePorts(se.Service) {
		for _, family := range se.Service.Families() {
			l := oracleLists{Unusable: slices.Contains(se.Unusable, portFamily(p, family))}
			for _, e := range se.Endpoints {
				if api.FamilyOf(e.Addr) != family {
					continue
				}
				name := e.Addr.String()
				if p != nil {
					name = addrPort(e.Addr, e.TargetPort(p))
				}
				s := e.ScopesOf(p)
				if s.Internal {
					l.Internal = append(l.Internal, name)
				}
				if s.External {
					l.External = append(l.External, name)
				}
				if s.Cluster {
					l.ShortCircuit = append(l.ShortCircuit, name)
				}
			}
			slices.Sort(l.Internal)
			slices.Sort(l.External)
			slices.Sort(l.ShortCircuit)
			r.Lists[portFamily(p, family)] = l
		}
	}
	for i := range se.Draining {
		r.Draining = append(r.Draining, se.Draining[i].Key())
	}
	slices.Sort(r.Draining)
	return r
}

// traffic returns what becomes of traffic to f.
func (o *oracle) traffic(f *Frontend, fromNode bool) oracleTraffic {
	l := o.lists[portFamily(f.ServicePort, f.Family)]
	var t oracleTraffic
	switch {
	case f.Kind == ClusterIP:
		t.Endpoints = l.Internal
	case fromNode && f.Masquerade == MasqueradeNode:
		t.Endpoints = l.ShortCircuit
	default:
		t.Endpoints = l.External
	}
	switch {
	case len(t.Endpoints) > 0:
	case l.Unusable:
		t.Verdict = Reject
	default:
		t.Verdict = Drop
	}
	return t
}

// claims returns what the service should be served at, by family.
func (o *oracle) claims() map[api.Claim]map[api.Family]bool {
	svc := o.state.Service
	out := map[api.Claim]map[api.Family]bool{}
	add := func(c api.Claim, f api.Family) {
		lost := slices.ContainsFunc(o.state.Lost, func(l api.LostClaim) bool { return l.Claim == c })
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
				add(api.Claim{IP: map[api.Family]netip.Addr{api.IPv4: netip.IPv4Unspecified(), api.IPv6: netip.IPv6Unspecified()}[f], Protocol: p.Protocol, Port: p.NodePort}, f)
			}
		}
	}
	return out
}
