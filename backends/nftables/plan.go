// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// planner turns views into elements. It is pure but for its memory of names.
type planner struct {
	// nodeAddrs are the node's addresses, for source ranges that admit it, and admitsNode
	// says that some service has such ranges.
	nodeAddrs  []netip.Addr
	admitsNode bool
	// names are the chains of classes seen.
	names map[sharedChain]string
}

func newPlanner() *planner { return &planner{names: map[sharedChain]string{}} }

// plan emits the elements that se needs, each once unless its map is shared, and the
// objects, perhaps several times. Of a nil se there are none.
func (p *planner) plan(se *api.ServiceEndpoints, emit func(element), own func(object)) {
	if se == nil {
		return
	}
	for f := range nodeview.Frontends(se) {
		p.frontend(se, &f, emit, own)
	}
	for _, ip := range [...][]netip.Addr{se.Service.IPs.ClusterIPs.V4, se.Service.IPs.ClusterIPs.V6} {
		for _, a := range ip {
			p.member(mapID{kind: clusterIPs}, a, emit)
		}
	}
	for i := range se.Endpoints {
		if e := &se.Endpoints[i]; e.Local {
			p.hairpins(se, e, emit)
		}
	}
}

func (p *planner) frontend(se *api.ServiceEndpoints, f *nodeview.Frontend, emit func(element), own func(object)) {
	c := sharedChain{
		match:      matchOf(f),
		family:     f.Family,
		filtered:   f.Sources.Restricted,
		masquerade: f.Masquerade,
	}
	list := "external"
	if f.Kind == nodeview.ClusterIP {
		list = "internal"
	}
	p.traffic(se, c, f, list, &f.Elsewhere, emit, own)
	if f.Masquerade == nodeview.MasqueradeNode {
		p.traffic(se, sharedChain{match: c.match, family: f.Family, fromNode: true}, f, "cluster", &f.Node, emit, own)
	}
	if f.Sources.Restricted {
		p.sources(c.match, f, emit)
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

// traffic emits what leads some of f's traffic where t says. list is what the list
// of endpoints is called.
func (p *planner) traffic(se *api.ServiceEndpoints, c sharedChain, f *nodeview.Frontend, list string, t *nodeview.Traffic, emit func(element), own func(object)) {
	c.verdict = t.Verdict
	targets := t.Endpoints[:min(len(t.Endpoints), maxEndpoints)]
	switch {
	case c.verdict != nodeview.Forward:
	case f.Affinity > 0:
		c.affinity = true
		e, _ := frontendKey(c.mapOf(affinityChains), f)
		e.chain = p.affinity(se, f, list, targets, own)
		emit(e)
	default:
		c.endpoints = len(targets)
	}
	e, _ := frontendKey(c.mapOf(frontends), f)
	e.chain, e.comment = p.chain(c), comment(se, f)
	binary.NativeEndian.PutUint32(e.data[:], c.number())
	emit(e)

	if c.endpoints == 0 {
		return
	}
	e, at := frontendKey(c.mapOf(endpoints), f)
	for i := range targets {
		w := keyWriter{&e.elementID, at}
		w.slot(i)
		e.value = target(targets[i].Addr, targets[i].Port)
		emit(e)
	}
}

// maxEndpoints is how many endpoints of a service get traffic: the number of a class has room
// for no more.
const maxEndpoints = 1<<20 - 1

// comment names the service port of f.
func comment(se *api.ServiceEndpoints, f *nodeview.Frontend) string {
	s := se.Service.Namespace + "/" + se.Service.Name
	if f.ServicePort != nil && f.ServicePort.Name != "" {
		s += ":" + f.ServicePort.Name
	}
	return s[:min(len(s), maxComment)]
}

// maxComment is the length of the longest comment that nft loads.
const maxComment = 127

// frontendKey returns an element of m whose key begins with f, and where the
// rest of the key goes.
func frontendKey(m mapID, f *nodeview.Frontend) (element, int) {
	e := element{elementID: elementID{m: m}}
	w := keyWriter{id: &e.elementID}
	if m.match != matchNodePort {
		w.addr(f.Addr)
	}
	if m.match != matchAddress {
		w.protocol(f.Protocol)
		w.port(f.Port)
	}
	return e, w.at
}

// sources emits who gets in. The kernel refuses ranges that overlap, which
// prefixes only do where one contains the other.
func (p *planner) sources(s match, f *nodeview.Frontend, emit func(element)) {
	p.admitsNode = true
	prefixes := f.Sources.Prefixes(p.nodeAddrs)
	for i, prefix := range prefixes {
		if containedInOther(prefixes, i) {
			continue
		}
		e, at := frontendKey(mapID{sources, s, f.Family}, f)
		w := keyWriter{&e.elementID, at}
		w.addr(prefix.Masked().Addr())
		e.key[maxKey-1] = byte(prefix.Bits())
		emit(e)
	}
}

// containedInOther reports whether another prefix contains prefixes[i]; of equal
// ones the first counts.
func containedInOther(prefixes []netip.Prefix, i int) bool {
	for j, other := range prefixes {
		if j != i && other.Overlaps(prefixes[i]) &&
			(other.Bits() < prefixes[i].Bits() || other.Bits() == prefixes[i].Bits() && j < i) {
			return true
		}
	}
	return false
}

// hairpins emits that connections from the endpoint e to itself through the service are
// masqueraded.
func (p *planner) hairpins(se *api.ServiceEndpoints, e *api.Endpoint, emit func(element)) {
	emitOne := func(s match, protocol api.Protocol, port int32) {
		h := element{elementID: elementID{m: mapID{hairpins, s, api.FamilyOf(e.Addr)}}}
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

// member emits that a is in the set m of its family.
func (p *planner) member(m mapID, a netip.Addr, emit func(element)) {
	emit(addressElement(m, a))
}

func addressElement(m mapID, a netip.Addr) element {
	m.family = api.FamilyOf(a)
	e := element{elementID: elementID{m: m}}
	w := keyWriter{id: &e.elementID}
	w.addr(a)
	return e
}

// chain returns the name of a class's chain, or verdict, and remembers it.
func (p *planner) chain(c sharedChain) string {
	name, ok := p.names[c]
	if !ok {
		name = c.name()
		p.names[c] = name
	}
	return name
}
