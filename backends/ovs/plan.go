// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"encoding/binary"
	"hash/fnv"
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
	// groups are the buckets of groups. The field lists has the ID of the group for each
	// list of endpoints.
	groups map[uint32][]openflow.Actions
	lists  map[list]uint32
	// affinities are the values of affinityRegister, by family.
	affinities map[affinity]bool
	// datagrams has the frontends whose protocol is UDP.
	datagrams map[netip.AddrPort]datagrams
}

// affinity identifies the learned flows of a service port.
type affinity struct {
	family api.Family
	port   uint32
}

// datagrams is what a frontend of protocol UDP does with packets.
type datagrams struct {
	// endpoints get packets of new or existing flows.
	endpoints []netip.AddrPort
	rejects   bool
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
	// group returns the ID of the group of a list.
	group func(list) uint32
}

// plan returns the plan of a service. For nil, it returns an empty plan.
func (p *planner) plan(se *api.ServiceEndpoints) *plan {
	out := &plan{
		flows: flowSet{}, shared: flowSet{}, groups: map[uint32][]openflow.Actions{}, lists: map[list]uint32{},
		affinities: map[affinity]bool{}, datagrams: map[netip.AddrPort]datagrams{},
	}
	if se == nil {
		return out
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
	l := list{service: se.Key(), id: t.List}
	if f.Affinity != 0 {
		l.port = affinityOf(se, f).port
	}
	id, made := out.lists[l]
	if !made {
		id = p.group(l)
		out.lists[l] = id
		p.addList(out, se, f, t, l, id)
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
		setRegister(listRegister, id), setRegister(affinityRegister, affinityOf(se, f).port), setEndpoint(0),
		p.opts.resubmit(clientTable), p.opts.resubmit(memberTable))...)
}

func setRegister(register int, value uint32) openflow.Actions {
	return openflow.SetRegister(register, openflow.Bits{Value: uint64(value), Mask: 1<<32 - 1})
}

// setEndpoint sets endpointRegister.
func setEndpoint(hash uint64) openflow.Actions {
	return openflow.Join(setRegister(2*endpointRegister, uint32(hash>>32)), setRegister(2*endpointRegister+1, uint32(hash)))
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

// addList adds a group, and the flows that its endpoints need.
func (p *planner) addList(out *plan, se *api.ServiceEndpoints, f *nodeview.Frontend, t nodeview.Traffic, l list, id uint32) {
	a := affinityOf(se, f)
	member := openflow.Match{EtherType: etherType(f.Family)}
	member.Registers[listRegister/2] = openflow.Bits{Value: uint64(id), Mask: 1<<32 - 1}
	// Groups with many buckets consist of groups with few.
	parts := make([][]openflow.Actions, partsFor(len(t.Endpoints)))
	for _, e := range t.Endpoints {
		forward := p.forward(e.Addr, uint16(e.Port))
		bucket := forward
		hash := endpointHash(netip.AddrPortFrom(e.Addr, uint16(e.Port)))
		if f.Affinity != 0 {
			// The switch ignores learn actions in buckets, so the bucket selects a flow.
			bucket = openflow.Join(setEndpoint(hash), p.opts.resubmit(memberTable))
			m := member
			m.Registers[endpointRegister] = openflow.Bits{Value: hash, Mask: 1<<64 - 1}
			p.opts.add(out.flows, memberTable, middle, m, p.learn(a, f.Affinity, hash), forward)
		}
		part := &parts[hash>>1%uint64(len(parts))]
		*part = append(*part, bucket)
		if from := addressOf(p.opts.MasqueradeAddresses, f.Family); e.Local && from.IsValid() {
			m := openflow.Match{EtherType: etherType(f.Family), Source: single(e.Addr), Destination: single(e.Addr)}
			p.opts.add(out.shared, sentTable, high, m, p.opts.translateSource(from))
		}
	}
	if len(parts) == 1 {
		out.groups[id] = parts[0]
	} else {
		var all []openflow.Actions
		for i, part := range parts {
			if len(part) > 0 {
				l.part = i + 1
				sub := p.group(l)
				out.groups[sub] = part
				all = append(all, openflow.ToGroup(sub))
			}
		}
		out.groups[id] = all
	}
	if f.Affinity != 0 {
		p.opts.add(out.flows, memberTable, low, member, openflow.ToGroup(id))
		out.affinities[a] = true
	}
}

// maxBuckets limits the buckets of a group. Open vSwitch cannot list groups of more than 64
// KB.
const maxBuckets = 256

// partsFor returns into how many groups to divide a list of n endpoints. The endpoints are
// divided by their hashes. So a change of an endpoint changes only one group, and the sizes
// of the groups differ a little.
func partsFor(n int) int {
	parts := 1
	for n > parts*maxBuckets {
		parts *= 2
	}
	if parts > 1 {
		parts *= 2 // the hashes do not divide the endpoints evenly
	}
	return parts
}

// learn keeps the endpoint of a client.
func (p *planner) learn(a affinity, timeout time.Duration, endpoint uint64) openflow.Actions {
	return openflow.Learn{
		Table: p.opts.FirstTable + clientTable, Priority: low, Cookie: p.opts.cookie() | learnedCookie,
		Idle: timeout, EtherType: etherType(a.family),
		MatchRegister: affinityRegister, MatchValue: a.port, LoadRegister: endpointRegister, LoadValue: endpoint,
	}.Action()
}

// forward translates the destination of a new connection.
func (p *planner) forward(addr netip.Addr, port uint16) openflow.Actions {
	return openflow.CT{
		Zone: p.opts.Zone, Table: p.opts.FirstTable + sentTable, Commit: true,
		Actions: openflow.Join(openflow.CopyToMark(flagsRegister, masqueradeBit), openflow.TranslateDestination(addr, port)),
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
	return p.forward(a, refusingPort)
}

// affinityOf returns the affinity of a frontend's service port. The number is a hash: a
// collision between two ports has the effect that their clients lose their endpoints.
func affinityOf(se *api.ServiceEndpoints, f *nodeview.Frontend) affinity {
	h := fnv.New32a()
	h.Write([]byte(se.Service.Namespace + "/" + se.Service.Name))
	if f.ServicePort != nil {
		h.Write([]byte{byte(f.ServicePort.Protocol), byte(f.ServicePort.Port >> 8), byte(f.ServicePort.Port)})
	}
	return affinity{f.Family, h.Sum32()}
}

// endpointHash returns a number for an endpoint, for endpointRegister. It is never 0.
func endpointHash(e netip.AddrPort) uint64 {
	h := fnv.New64a()
	h.Write(e.Addr().AsSlice())
	h.Write(binary.BigEndian.AppendUint16(nil, e.Port()))
	return h.Sum64() | 1
}
