// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// planner computes the elements of views. Its results depend only on its fields and
// arguments.
type planner struct {
	names map[sharedChain]string
}

func newPlanner() *planner { return &planner{names: map[sharedChain]string{}} }

// plan emits the elements that the view se needs. If se is nil, plan emits nothing. It may
// emit an element of a shared map more than once. It emits all other elements only once.
func (p *planner) plan(se *api.ServiceEndpoints, numberOf numberer, listOf lister, emit func(element)) {
	if se == nil {
		return
	}
	for f := range nodeview.Frontends(se) {
		p.planFrontend(se, &f, numberOf, emit)
		if f.Sources.Restricted {
			emit(restrictedElement(matchOf(&f), &f, listOf(&f)))
		}
	}
	for _, ip := range [...][]netip.Addr{se.Service.IPs.ClusterIPs.V4, se.Service.IPs.ClusterIPs.V6} {
		for _, a := range ip {
			emit(addressElement(kindClusterIPs, a))
		}
	}
	for i := range se.Endpoints {
		if e := &se.Endpoints[i]; e.Local {
			planHairpins(se, e, emit)
		}
	}
}

func (p *planner) planFrontend(se *api.ServiceEndpoints, f *nodeview.Frontend, numberOf numberer, emit func(element)) {
	c := sharedChain{match: matchOf(f), family: f.Family, masquerade: f.Masquerade}
	p.planTraffic(se, c, f, &f.Elsewhere, numberOf, emit)
	if f.Masquerade == nodeview.MasqueradeNode {
		p.planTraffic(se, sharedChain{match: c.match, family: f.Family, fromNode: true}, f, &f.Node, numberOf, emit)
	}
}

func matchOf(f *nodeview.Frontend) match {
	switch {
	case f.Kind == nodeview.NodePort:
		return matchNodePort
	case f.Port == 0:
		return matchAddress
	default:
		return matchService
	}
}

// planTraffic emits elements for those packets of the frontend f that the chain c
// handles. The argument t has the endpoints for these packets.
func (p *planner) planTraffic(se *api.ServiceEndpoints, c sharedChain, f *nodeview.Frontend, t *nodeview.Traffic, numberOf numberer, emit func(element)) {
	c.verdict = t.Verdict
	var targets []nodeview.Target
	if c.verdict == nodeview.Forward {
		limit := maxEndpoints
		if f.Affinity > 0 {
			c.timeout, limit = timeoutOf(timeoutBits(f.Affinity)), maxAffineEndpoints
		}
		targets = t.Endpoints[:min(len(t.Endpoints), limit)]
		c.endpoints = len(targets)
	}
	e, _ := frontendElement(c.mapOf(kindFrontends), f)
	e.chain, e.comment = p.nameOf(c), comment(se, f)
	binary.NativeEndian.PutUint32(e.data[:], c.number())
	emit(e)
	for i := range targets {
		slot, v := firstSlot+uint32(i), endpointValue(targets[i].Addr, targets[i].Port)
		if c.timeout > 0 {
			endpoint := affineEndpoint{target: v.data}
			if p := f.ServicePort; p != nil {
				endpoint.protocol, endpoint.port = p.Protocol, p.Port
			}
			number := numberOf(e.frontendID(), endpoint)
			emit(element{slotID(c.mapOf(kindSlots), f, slot), priorityValue(number)})
			slot = number
		}
		emit(element{slotID(c.mapOf(kindEndpoints), f, slot), v})
	}
}

// maxEndpoints limits the endpoints of a frontend that get traffic. A shared chain's
// number has 20 bits for the number of endpoints.
const maxEndpoints = 1<<20 - 1

// maxComment is the length of the longest comment that nft loads.
const maxComment = 127

// comment returns the name of the service port of f, cut off after maxComment octets.
func comment(se *api.ServiceEndpoints, f *nodeview.Frontend) string {
	s := se.Service.Namespace + "/" + se.Service.Name
	if f.ServicePort != nil && f.ServicePort.Name != "" {
		s += ":" + f.ServicePort.Name
	}
	return s[:min(len(s), maxComment)]
}

func (p *planner) nameOf(c sharedChain) string {
	name, ok := p.names[c]
	if !ok {
		name = c.name()
		p.names[c] = name
	}
	return name
}

// planHairpins emits the elements that masquerade connections from the endpoint e to
// itself.
func planHairpins(se *api.ServiceEndpoints, e *api.Endpoint, emit func(element)) {
	emitOne := func(s match, protocol api.Protocol, port int32) {
		h := element{elementID: elementID{m: mapID{kindHairpins, s, api.FamilyOf(e.Addr)}}}
		w := keyWriter{id: &h.elementID}
		w.addr(e.Addr)
		w.addr(e.Addr)
		if s == matchService {
			w.protocol(protocol)
			w.port(port)
		}
		emit(h)
	}
	if se.Service.AllPorts {
		emitOne(matchAddress, 0, 0)
		return
	}
	for i := range se.Service.Ports {
		p := &se.Service.Ports[i]
		if port := e.TargetPort(p); port != 0 {
			emitOne(matchService, p.Protocol, port)
		}
	}
}
