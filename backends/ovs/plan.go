// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/nodeview"
)

// plan is what a service needs in the switch.
type plan struct {
	// flows belong to this service alone. The service may share the flows in the field
	// shared with other services.
	flows, shared flowSet
	// groups are the buckets of the groups with these numbers. A group without buckets only
	// records the number of a service.
	groups map[uint32][]openflow.Actions
	// lists has the numbers of lists of endpoints.
	lists map[name]uint32
	// affinities are the service ports with session affinity.
	affinities map[affinity]bool
	// datagrams has the frontends whose protocol is UDP.
	datagrams map[netip.AddrPort]datagrams
}

// affinity identifies the learned flows of a service port.
type affinity struct {
	family api.Family
	client uint64 // the value of clientRegister
}

// datagrams is what a frontend of protocol UDP does with packets.
type datagrams struct {
	// endpoints get packets of new or existing flows. They are sorted.
	endpoints []netip.AddrPort
	rejects   bool
}

// sends reports whether packets reach an endpoint.
func (d *datagrams) sends(to netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(d.endpoints, to, netip.AddrPort.Compare)
	return ok
}

// protocols has the numbers of protocols.
var protocols = map[api.Protocol]uint8{api.TCP: 6, api.UDP: 17, api.SCTP: 132}

// The base of the priorities of a kind of frontend. A frontend may use it and the next two
// priorities.
const (
	unknownPorts = 1000 * (iota + 1)
	wholeAddress
	addressAndPort
	nodePort
)

// planner makes plans.
type planner struct {
	opts *Options
	node
	// number returns the number of a name.
	number func(name) uint32
}

// plan returns the plan of a service.
func (p *planner) plan(se *api.ServiceEndpoints) *plan {
	out := &plan{
		flows: flowSet{}, shared: flowSet{}, groups: map[uint32][]openflow.Actions{}, lists: map[name]uint32{},
		affinities: map[affinity]bool{}, datagrams: map[netip.AddrPort]datagrams{},
	}
	for f := range nodeview.Frontends(se) {
		if f.Protocol == 0 || protocols[f.Protocol] != 0 {
			p.addFrontend(out, se, &f)
		}
	}
	return out
}

func (p *planner) addFrontend(out *plan, se *api.ServiceEndpoints, f *nodeview.Frontend) {
	m := openflow.Match{EtherType: etherType(f.Family), Protocol: protocols[f.Protocol], Port: uint16(f.Port)}
	base := uint16(addressAndPort)
	switch {
	case f.Kind == nodeview.NodePort:
		m.Registers = flags(toNode)
		base = nodePort
	case f.Protocol == 0:
		base = wholeAddress
		fallthrough
	default:
		m.Destination = single(f.Addr)
	}
	elsewhere := p.actions(out, se, f, f.Elsewhere)
	here := p.actions(out, se, f, f.Node)
	sources := []netip.Prefix{{}}
	if f.Sources.Restricted {
		p.opts.add(out.flows, frontendTable, base, m) // drops
		sources = f.Sources.Prefixes(p.machineAddrs)
	}
	for _, source := range sources {
		m := m
		m.Source = source
		p.opts.add(out.flows, frontendTable, base+1, m, elsewhere)
		if here != elsewhere {
			local := flags(fromHere)
			m.Registers[0].Value |= local[0].Value
			m.Registers[0].Mask |= local[0].Mask
			p.opts.add(out.flows, frontendTable, base+2, m, here)
		}
	}
	if f.Kind == nodeview.ClusterIP && f.Protocol != 0 {
		for _, protocol := range protocols {
			m := openflow.Match{EtherType: etherType(f.Family), Protocol: protocol, Destination: single(f.Addr)}
			p.opts.add(out.shared, frontendTable, unknownPorts, m, p.reject(f.Family))
		}
	}
	if f.Protocol == api.UDP {
		p.addDatagrams(out, se, f)
	}
}

// addDatagrams records a frontend of protocol UDP.
func (p *planner) addDatagrams(out *plan, se *api.ServiceEndpoints, f *nodeview.Frontend) {
	d := datagrams{rejects: f.Elsewhere.Verdict == nodeview.Reject || f.Node.Verdict == nodeview.Reject}
	for _, t := range slices.Concat(f.Elsewhere.Endpoints, f.Node.Endpoints) {
		d.endpoints = append(d.endpoints, netip.AddrPortFrom(t.Addr, uint16(t.Port)))
	}
	for i := range se.Draining {
		e := &se.Draining[i]
		if f.ServicePort != nil && api.FamilyOf(e.Addr) == f.Family {
			d.endpoints = append(d.endpoints, netip.AddrPortFrom(e.Addr, uint16(e.TargetPort(f.ServicePort))))
		}
	}
	slices.SortFunc(d.endpoints, netip.AddrPort.Compare)
	addrs := []netip.Addr{f.Addr}
	if f.Kind == nodeview.NodePort {
		addrs = p.nodePortAddrs
	}
	for _, a := range addrs {
		if api.FamilyOf(a) == f.Family {
			out.datagrams[netip.AddrPortFrom(a, uint16(f.Port))] = d
		}
	}
}

// actions returns the actions for a part of the traffic to a frontend. It adds the
// endpoints to the plan.
func (p *planner) actions(out *plan, se *api.ServiceEndpoints, f *nodeview.Frontend, t nodeview.Traffic) openflow.Actions {
	switch t.Verdict {
	case nodeview.Drop:
		return ""
	case nodeview.Reject:
		return p.reject(f.Family)
	}
	l := name{service: se.Key(), list: t.List}
	var a affinity
	if f.Affinity != 0 {
		a = p.affinityOf(out, se, f)
		l.port = uint32(a.client)
	}
	id, made := out.lists[l]
	if !made {
		id = p.number(l)
		out.lists[l] = id
		p.addList(out, f, t, l, a)
	}
	var all []openflow.Actions
	if selected := p.masqueraded(f.Masquerade); selected != 0 {
		all = append(all,
			openflow.SetRegister(flagsRegister, openflow.Bits{Value: uint64(selected << selectShift), Mask: fromAny << selectShift}),
			p.opts.resubmit(masqueradeTable))
	}
	if f.Affinity == 0 {
		return openflow.Join(append(all, openflow.ToGroup(id))...)
	}
	return openflow.Join(append(all,
		setRegister(listRegister, id), setRegister(serviceRegister, uint32(a.client>>32)), setRegister(portRegister, uint32(a.client)),
		openflow.SetRegister64(2*addressRegister, 0), openflow.SetRegister64(2*addressRegister+1, 0),
		p.opts.resubmit(clientTable), p.opts.resubmit(memberTable))...)
}

func setRegister(register int, value uint32) openflow.Actions {
	return openflow.SetRegister(register, openflow.Bits{Value: uint64(value), Mask: 1<<32 - 1})
}

// endpointFields returns the values of registers that mean an endpoint: the bits of
// register 0, and the halves of addressRegister.
func endpointFields(e netip.AddrPort) (port openflow.Bits, high, low uint64) {
	a := e.Addr().As16()
	return openflow.Bits{Value: uint64(e.Port()) << portShift, Mask: 0xffff << portShift},
		binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])
}

// setEndpoint sets the registers that mean an endpoint. They are 0 before.
func setEndpoint(e netip.AddrPort) openflow.Actions {
	port, high, low := endpointFields(e)
	all := []openflow.Actions{openflow.SetRegister(flagsRegister, port)}
	if high != 0 { // always for IPv6
		all = append(all, openflow.SetRegister64(2*addressRegister, high))
	}
	return openflow.Join(append(all, openflow.SetRegister64(2*addressRegister+1, low))...)
}

// masqueraded returns the kinds of sources whose connections to masquerade.
func (p *planner) masqueraded(m nodeview.Masquerade) uint32 {
	switch {
	case m == nodeview.MasqueradeAll, m == nodeview.MasqueradeIfConfigured && p.opts.MasqueradeAll:
		return fromAny
	case m == nodeview.MasqueradeNode:
		return fromNode
	case p.opts.MasqueradeOutsiders:
		return fromOutside
	default:
		return 0
	}
}

// addList adds the groups of a list, and the flows that its endpoints need.
func (p *planner) addList(out *plan, f *nodeview.Frontend, t nodeview.Traffic, l name, a affinity) {
	endpoints := make([]netip.AddrPort, 0, len(t.Endpoints))
	from := addressOf(p.opts.MasqueradeAddresses, f.Family)
	for _, e := range t.Endpoints {
		endpoints = append(endpoints, netip.AddrPortFrom(e.Addr, uint16(e.Port)))
		if e.Local && from.IsValid() {
			m := openflow.Match{EtherType: etherType(f.Family), Source: single(e.Addr), Destination: single(e.Addr)}
			p.opts.add(out.shared, sentTable, high, m, p.opts.translateSource(single(from)))
		}
	}
	slices.SortFunc(endpoints, netip.AddrPort.Compare)
	endpoints = slices.Compact(endpoints)
	if f.Affinity == 0 {
		p.addGroups(out, l, endpoints, p.forward)
		return
	}
	// The switch ignores learn actions in buckets, so the bucket selects a flow.
	p.addGroups(out, l, endpoints, func(e netip.AddrPort) openflow.Actions {
		return openflow.Join(setEndpoint(e), p.opts.resubmit(memberTable))
	})
	id := uint64(out.lists[l])
	member := openflow.Match{EtherType: etherType(f.Family)}
	member.Registers[listRegister/2] = openflow.Bits{Value: id, Mask: 1<<32 - 1}
	p.opts.add(out.flows, memberTable, low, member, openflow.ToGroup(uint32(id)))
	for _, e := range endpoints {
		port, high, low := endpointFields(e)
		member.Registers[0] = openflow.Bits{Value: port.Value<<32 | id, Mask: port.Mask<<32 | (1<<32 - 1)}
		member.Registers[2*addressRegister] = openflow.Bits{Value: high, Mask: 1<<64 - 1}
		member.Registers[2*addressRegister+1] = openflow.Bits{Value: low, Mask: 1<<64 - 1}
		p.opts.add(out.flows, memberTable, middle, member, p.learn(a, f.Affinity, e), p.forward(e))
	}
}

// maxBuckets limits the buckets of a group. Open vSwitch ends if it has to list a group of
// more than 64 KB. A bucket has at most 112 bytes.
const maxBuckets = 256

// addGroups adds the group of a list of sorted endpoints. If they are too many, its buckets
// are groups with equal parts of the list. The parts are sections, so no choice of
// addresses makes one of them larger, and a change of an endpoint moves at most one
// endpoint between neighbouring parts.
func (p *planner) addGroups(out *plan, l name, endpoints []netip.AddrPort, bucket func(netip.AddrPort) openflow.Actions) {
	parts := 1
	for parts < maxBuckets && len(endpoints) > parts*maxBuckets {
		parts *= 2
	}
	var buckets []openflow.Actions
	if parts == 1 {
		for _, e := range endpoints {
			buckets = append(buckets, bucket(e))
		}
	} else {
		part := l
		for i := range parts {
			part.part = l.part*maxBuckets + i + 1
			p.addGroups(out, part, endpoints[i*len(endpoints)/parts:(i+1)*len(endpoints)/parts], bucket)
			buckets = append(buckets, openflow.ToGroup(p.number(part)))
		}
	}
	out.groups[p.number(l)] = buckets
}

// learn keeps the endpoint of a client.
func (p *planner) learn(a affinity, timeout time.Duration, e netip.AddrPort) openflow.Actions {
	return openflow.Learn{
		Table: p.opts.FirstTable + clientTable, Priority: low, Cookie: p.opts.learnedCookies(uint32(a.client >> 32)).Value,
		Limit: p.opts.MaxClients, Idle: timeout, EtherType: etherType(a.family),
		MatchRegister: clientRegister, MatchValue: a.client,
		AddressRegister: addressRegister, LoadAddress: e.Addr().As16(), PortRegister: flagsRegister, LoadPort: e.Port(),
	}.Action()
}

// forward translates the destination of a new connection.
func (p *planner) forward(to netip.AddrPort) openflow.Actions {
	return openflow.CT{
		Zone: p.opts.Zone, Table: p.opts.FirstTable + sentTable, Commit: true,
		Actions: openflow.Join(openflow.CopyToMark(flagsRegister, masqueradeBit), openflow.TranslateDestination(to.Addr(), to.Port())),
	}.Action()
}

// reject sends packets to a closed port of the node, which refuses them. The answer of the
// node is translated, so it seems to come from the service. All protocols with ports are
// refused. Other protocols have no ports, so their packets are answered by the node.
func (p *planner) reject(f api.Family) openflow.Actions {
	a := addressOf(p.opts.MasqueradeAddresses, f)
	if !a.IsValid() {
		return "" // drops
	}
	return p.forward(netip.AddrPortFrom(a, refusingPort))
}

// affinityOf returns the affinity of a frontend's service port, and adds it to the plan.
func (p *planner) affinityOf(out *plan, se *api.ServiceEndpoints, f *nodeview.Frontend) affinity {
	service := p.number(name{service: se.Key(), part: wholeService})
	out.groups[service] = nil
	a := affinity{f.Family, uint64(service) << 32}
	if f.ServicePort != nil {
		a.client |= uint64(f.ServicePort.Protocol)<<16 | uint64(uint16(f.ServicePort.Port))
	}
	out.affinities[a] = true
	return a
}
