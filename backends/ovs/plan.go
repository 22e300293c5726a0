// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/nodeview"
)

// plan has the objects that a service needs in the switch.
type plan struct {
	// flows belong to this service alone. The flows in the field "shared" may also belong to
	// other services.
	flows, shared flowSet
	// groups maps numbers to groups without seeds. A group without buckets only records a
	// number.
	groups map[uint32]*group
	// affinities are the service ports with session affinity.
	affinities map[affinity]bool
	// kept has the UDP frontends, and the TCP frontends of services with resets. Frontends
	// with the same endpoints have the same value.
	kept map[frontendAt]*kept
	// counted has the service ports, by group, of groups whose connections are counted.
	// Without Options.Stats, it is empty.
	counted map[uint32]servicePort
}

// frontendAt is a frontend. The switch must forget its connections to lost endpoints.
type frontendAt struct {
	protocol uint8
	netip.AddrPort
}

// affinity identifies the learned flows of a service port.
type affinity struct {
	family api.Family
	client uint64 // the value of clientRegister
}

// kept has the endpoints that connections of a frontend may keep.
type kept struct {
	// endpoints get packets of new or existing connections. They are sorted.
	endpoints []netip.AddrPort
	rejects   bool
}

// sends reports whether packets reach an endpoint. If k is nil, they reach none.
func (k *kept) sends(to netip.AddrPort) bool {
	if k == nil {
		return false
	}
	_, ok := slices.BinarySearchFunc(k.endpoints, to, netip.AddrPort.Compare)
	return ok
}

// endpointsWithout returns the endpoints that packets do not reach according to o.
func (k *kept) endpointsWithout(o *kept) (all []netip.AddrPort) {
	for _, e := range k.endpoints {
		if !o.sends(e) {
			all = append(all, e)
		}
	}
	return all
}

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
	opts *options
	node
	// number returns the number of a name.
	number func(name) uint32
}

// plan returns the plan of a service. If the service needs too many groups, the result is
// incomplete, with an error.
func (p *planner) plan(view *api.View) (*plan, error) {
	s := servicePlan{
		plan: &plan{
			flows: flowSet{}, shared: flowSet{}, groups: map[uint32]*group{},
			affinities: map[affinity]bool{}, kept: map[frontendAt]*kept{}, counted: map[uint32]servicePort{},
		},
		planner: p, view: view, lists: map[name]uint32{}, ports: map[nodeview.ListID]*api.PortMapping{}, actions: map[actionsKey]openflow.Actions{},
	}
	for f := range nodeview.Frontends(view) {
		if f.Protocol == 0 || f.Protocol.Number() != 0 {
			s.addFrontend(&f)
		}
		if len(s.groups) > p.opts.maxGroups {
			return s.plan, fmt.Errorf("it needs more than %d groups, the share of a service", p.opts.maxGroups)
		}
	}
	for _, e := range nodeview.Hairpins(view) {
		family := api.FamilyOf(e.Addr)
		if from := addressOf(p.opts.MasqueradeAddresses, family); from.IsValid() {
			m := openflow.Match{EtherType: etherType(family), Source: single(e.Addr), Destination: single(e.Addr)}
			p.opts.add(s.shared, sentTable, high, m, p.opts.translateSource(single(from)))
		}
	}
	return s.plan, nil
}

// servicePlan is an unfinished plan. The maps have the parts that frontends share.
type servicePlan struct {
	*plan
	*planner
	view *api.View
	// lists has the number of each list of endpoints. ports has the first service port of
	// each list.
	lists   map[name]uint32
	ports   map[nodeview.ListID]*api.PortMapping
	actions map[actionsKey]openflow.Actions
	// ranges has the numbers of the lists of source ranges, by place in memory, and by
	// content.
	ranges        map[frontends.SourcesID]uint32
	rangesContent map[string]uint32
	// shares has the values of the map kept. Frontends share these values.
	shares map[keptKey]*kept
}

// actionsKey has the values that determine the actions of frontends for a part of the
// traffic.
type actionsKey struct {
	verdict    nodeview.Verdict
	list       name
	masquerade nodeview.Masquerade
	affinity   affinity
	family     api.Family
}

// keptKey has the values that determine the kept endpoints of frontends.
type keptKey struct {
	existing nodeview.Existing
	protocol api.Protocol
	rejects  bool
}

func (p *servicePlan) addFrontend(f *nodeview.Frontend) {
	m := openflow.Match{EtherType: etherType(f.Family), Protocol: f.Protocol.Number(), Port: uint16(f.Port)}
	base := uint16(addressAndPort)
	required := uint32(0)
	switch {
	case f.Kind == nodeview.NodePort:
		required = toNode
		base = nodePort
	case f.Protocol == 0:
		base = wholeAddress
		fallthrough
	default:
		m.Destination = single(f.Addr)
	}
	elsewhere := p.actionsFor(f, f.Elsewhere)
	here := p.actionsFor(f, f.Node)
	add := func(priority uint16, required uint32, actions openflow.Actions) {
		m.Registers = flags(required)
		p.opts.add(p.flows, frontendTable, priority, m, actions)
	}
	if f.Sources.Restricted {
		add(base, required, p.checkSource(f))
		required |= admitted
	}
	add(base+1, required, elsewhere)
	if here != elsewhere {
		add(base+2, required|fromHere, here)
	}
	if f.Kind == nodeview.ClusterIP && f.Protocol != 0 {
		for _, protocol := range [...]api.Protocol{api.TCP, api.UDP, api.SCTP} {
			m := openflow.Match{EtherType: etherType(f.Family), Protocol: protocol.Number(), Destination: single(f.Addr)}
			p.opts.add(p.shared, frontendTable, unknownPorts, m, p.reject(f.Family))
		}
	}
	if f.Protocol == api.UDP || f.Protocol == api.TCP && p.view.Service.ResetConnections {
		p.addKept(f)
	}
}

// checkSource returns actions that search the source of a packet in the source ranges of a
// frontend. If a range contains the source, the bit "admitted" is set, and the packet
// comes back to the flows of the frontend. Otherwise, the packet is dropped.
func (p *servicePlan) checkSource(f *nodeview.Frontend) openflow.Actions {
	s := frontends.SourcesOf(f)
	id, known := p.ranges[s]
	if !known {
		if p.ranges == nil {
			p.ranges, p.rangesContent = map[frontends.SourcesID]uint32{}, map[string]uint32{}
		}
		id = p.addRanges(f)
		p.ranges[s] = id
	}
	if id == 0 {
		return "" // without actions, a flow drops packets
	}
	return openflow.Join(setRegister(listRegister, id), p.opts.resubmit(memberTable))
}

// addRanges adds the flows of the source ranges of a frontend, unless equal flows exist.
// It returns the number of the list, or 0 if there are no ranges.
func (p *servicePlan) addRanges(f *nodeview.Frontend) uint32 {
	prefixes := f.Sources.Prefixes(p.machineAddrs)
	if len(prefixes) == 0 {
		return 0
	}
	var content []byte
	for _, prefix := range prefixes {
		content = append(append(content, prefix.Addr().AsSlice()...), byte(prefix.Bits()))
	}
	id, exists := p.rangesContent[string(content)]
	if exists {
		return id
	}
	id = p.number(name{service: p.view.Key(), part: firstRanges - len(p.rangesContent)})
	p.rangesContent[string(content)] = id
	p.groups[id] = &group{}
	m := openflow.Match{EtherType: etherType(f.Family)}
	m.Registers[listRegister/2] = openflow.Bits{Value: uint64(id), Mask: 1<<32 - 1}
	admit := openflow.Join(openflow.SetRegister(flagsRegister, openflow.Bits{Value: admitted, Mask: admitted}), p.opts.resubmit(frontendTable))
	for _, prefix := range prefixes {
		m.Source = prefix
		p.opts.add(p.flows, memberTable, middle, m, admit)
	}
	return id
}

// addKept records a frontend, so that the switch forgets its connections to lost
// endpoints.
func (p *servicePlan) addKept(f *nodeview.Frontend) {
	key := keptKey{f.Existing, f.Protocol, f.Elsewhere.Verdict == nodeview.Reject || f.Node.Verdict == nodeview.Reject}
	k := p.shares[key]
	if k == nil {
		if p.shares == nil {
			p.shares = map[keptKey]*kept{}
		}
		k = &kept{rejects: key.rejects}
		for t := range f.Existing.All() {
			if e := t.AddrPort(); f.Protocol == api.UDP || !f.Existing.Resets(e) {
				k.endpoints = append(k.endpoints, e)
			}
		}
		p.shares[key] = k
	}
	for at := range f.At(p.nodePortAddrs) {
		p.kept[frontendAt{f.Protocol.Number(), at}] = k
	}
}

// actionsFor returns the actions for a part of the traffic to a frontend. It adds the
// endpoints to the plan.
func (p *servicePlan) actionsFor(f *nodeview.Frontend, t nodeview.Traffic) openflow.Actions {
	k := actionsKey{verdict: t.Verdict, list: p.listName(f, t.List), masquerade: f.Masquerade, family: f.Family}
	if f.Affinity != 0 && t.Verdict == nodeview.Forward {
		k.affinity = p.affinityOf(f)
	}
	actions, ok := p.actions[k]
	if !ok {
		actions = p.makeActions(f, t, k.list, k.affinity)
		p.actions[k] = actions
	}
	return actions
}

// listName returns the name of a list. All service ports with the list share the name,
// unless their connections are counted.
func (p *servicePlan) listName(f *nodeview.Frontend, list nodeview.ListID) name {
	l := name{service: p.view.Key(), list: list}
	if !p.opts.Stats || f.ServicePort == nil || list == 0 {
		return l
	}
	if p.ports[list] == nil {
		p.ports[list] = f.ServicePort
	}
	if p.ports[list] != f.ServicePort {
		l.port = uint32(f.ServicePort.Protocol)<<16 | uint32(f.ServicePort.Port)
	}
	return l
}

func (p *servicePlan) makeActions(f *nodeview.Frontend, t nodeview.Traffic, l name, a affinity) openflow.Actions {
	switch t.Verdict {
	case nodeview.Drop:
		return ""
	case nodeview.Reject:
		return p.reject(f.Family)
	}
	id, made := p.lists[l]
	if !made {
		id = p.number(l)
		p.lists[l] = id
		p.addList(f, t, l, a)
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

// endpointFields returns the values of registers that stand for an endpoint: the bits of
// register 0, and both halves of addressRegister.
func endpointFields(e netip.AddrPort) (port openflow.Bits, high, low uint64) {
	a := e.Addr().As16()
	return openflow.Bits{Value: uint64(e.Port()) << portShift, Mask: 0xffff << portShift},
		binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])
}

// setEndpoint sets the registers that stand for an endpoint. The registers must be 0
// before.
func setEndpoint(e netip.AddrPort) openflow.Actions {
	port, high, low := endpointFields(e)
	all := []openflow.Actions{openflow.SetRegister(flagsRegister, port)}
	if high != 0 { // always for IPv6
		all = append(all, openflow.SetRegister64(2*addressRegister, high))
	}
	return openflow.Join(append(all, openflow.SetRegister64(2*addressRegister+1, low))...)
}

// masqueraded returns the kinds of sources whose connections are masqueraded.
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

// addList adds the groups of a list. With session affinity, it also adds the flows that
// the endpoints need. The argument a is the affinity of one of the service ports with
// this list.
func (p *servicePlan) addList(f *nodeview.Frontend, t nodeview.Traffic, l name, a affinity) {
	endpoints := make([]endpoint, 0, len(t.Endpoints))
	for _, e := range t.Endpoints {
		endpoints = append(endpoints, endpoint{e.AddrPort(), float64(cmp.Or(e.Weight, api.DefaultWeight))})
	}
	slices.SortStableFunc(endpoints, func(a, b endpoint) int { return a.AddrPort.Compare(b.AddrPort) })
	endpoints = slices.CompactFunc(endpoints, func(a, b endpoint) bool { return a.AddrPort == b.AddrPort })
	if f.Affinity == 0 {
		p.addGroups(l, f, endpoints, p.forward)
		return
	}
	id := p.number(l)
	p.count(id, f)
	// The switch ignores learn actions in buckets, so the bucket selects a flow.
	p.addGroups(l, f, endpoints, func(e netip.AddrPort) openflow.Actions {
		return openflow.Join(setEndpoint(e), p.opts.resubmit(memberTable))
	})
	member := openflow.Match{EtherType: etherType(f.Family)}
	member.Registers[listRegister/2] = openflow.Bits{Value: uint64(id), Mask: 1<<32 - 1}
	p.opts.add(p.flows, memberTable, low, member, openflow.ToGroup(id))
	for _, e := range endpoints {
		port, high, low := endpointFields(e.AddrPort)
		member.Registers[0] = openflow.Bits{Value: port.Value<<32 | uint64(id), Mask: port.Mask<<32 | (1<<32 - 1)}
		member.Registers[2*addressRegister] = openflow.Bits{Value: high, Mask: 1<<64 - 1}
		member.Registers[2*addressRegister+1] = openflow.Bits{Value: low, Mask: 1<<64 - 1}
		p.opts.add(p.flows, memberTable, middle, member, p.learn(a, f.Affinity, e.AddrPort), p.forward(e.AddrPort))
	}
}

// count records that connections to the endpoints of a group or list count for the service
// port of a frontend.
func (p *servicePlan) count(id uint32, f *nodeview.Frontend) {
	if !p.opts.Stats {
		return
	}
	port := servicePort{service: p.view.Key(), protocol: f.Protocol, inFlows: f.Affinity != 0}
	if f.ServicePort != nil {
		port.name = f.ServicePort.Name
	}
	p.counted[id] = port
}

// maxBuckets limits the buckets of a group. Open vSwitch ends if it has to list a group of
// more than 64 KB. A bucket has at most 112 bytes.
const maxBuckets = 256

// endpoint is an endpoint of a list, with its weight.
type endpoint struct {
	netip.AddrPort
	weight float64
}

// addGroups adds the group of a list of sorted endpoints. A part of the list with several
// endpoints is a group of its own.
func (p *servicePlan) addGroups(l name, f *nodeview.Frontend, endpoints []endpoint, bucket func(netip.AddrPort) openflow.Actions) {
	var parts []part
	switch {
	case f.Algorithm != api.Random && l.part == 0:
		parts = hashed(endpoints)
	case len(endpoints) > maxBuckets:
		parts = sections(endpoints)
	default:
		for _, e := range endpoints {
			parts = append(parts, part{e.String(), 0, []endpoint{e}})
		}
	}
	weights := make([]float64, len(parts))
	for i := range parts {
		for _, e := range parts[i].endpoints {
			weights[i] += e.weight
		}
	}
	if f.Algorithm == api.Random && len(parts) < len(endpoints) && slices.Min(weights) >= 0.98*slices.Max(weights) {
		clear(weights) // equal, so that few changes of the list change this group
	}
	factors := factorsOf(weights)
	g := &group{byClient: f.Algorithm == api.HashClient}
	for i, part := range parts {
		if len(part.endpoints) == 1 {
			g.add(part.key, factors[i], bucket(part.endpoints[0].AddrPort))
			if f.Affinity == 0 {
				p.count(p.number(l), f)
			}
			continue
		}
		of := l
		of.part = l.part*maxBuckets + part.number + 1
		p.addGroups(of, f, part.endpoints, bucket)
		g.add(part.key, factors[i], openflow.ToGroup(p.number(of)))
	}
	p.groups[p.number(l)] = g
}

// part is a part of a list. It has a bucket in the group of the list.
type part struct {
	// key determines the ID of the bucket.
	key       string
	number    int
	endpoints []endpoint
}

// sections returns equal parts of a list. The parts are sections of the sorted list. So no
// choice of addresses makes one part larger than the others, and a change of an endpoint
// moves at most one endpoint between neighbouring parts.
func sections(endpoints []endpoint) (parts []part) {
	n := 1
	for n < maxBuckets && len(endpoints) > n*maxBuckets {
		n *= 2
	}
	for i := range n {
		parts = append(parts, part{strconv.Itoa(i), i, endpoints[i*len(endpoints)/n : (i+1)*len(endpoints)/n]})
	}
	return parts
}

// hashed returns the parts of a list for stable hashing, without empty ones. The part of an
// endpoint does not depend on other endpoints. So a change of an endpoint moves no other
// endpoint, whatever the number of endpoints. In a short list, most parts have one endpoint.
func hashed(endpoints []endpoint) []part {
	parts := make([]part, maxBuckets)
	for _, e := range endpoints {
		i := int(maglev.Hash([]byte(e.String())) >> 32 % maxBuckets)
		parts[i] = part{strconv.Itoa(i), i, append(parts[i].endpoints, e)}
	}
	return slices.DeleteFunc(parts, func(p part) bool { return len(p.endpoints) == 0 })
}

// factorsOf returns the factors that buckets need to get shares proportional to weights.
// Equal weights have factors of 1. The factors are not proportional to the weights, because
// the switch multiplies them by uniform hashes. For example, weights 1 and 2 need factors 2
// and 3.
//
// Let the shares and the factors v be sorted. A product is between v(k-1) and v(k) only for
// the m buckets from k on, with equal probabilities. So the probability that such a bucket
// wins with a product in this interval is the difference of shares k-1 and k. The integral
// gives v(k-1) = v(k) * (q(k-1)/q(k))^(1/m). There q(k) is the sum of min(share, share k)
// over all shares.
func factorsOf(weights []float64) []uint16 {
	factors := make([]uint16, len(weights))
	order := make([]int, len(weights))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(weights[a], weights[b]) })
	if len(order) == 0 || weights[order[0]] == weights[order[len(order)-1]] {
		for i := range factors {
			factors[i] = 1
		}
		return factors
	}
	q := make([]float64, len(order))
	sum := 0.0
	for k, i := range order {
		q[k] = sum + float64(len(order)-k)*weights[i]
		sum += weights[i]
	}
	factor := float64(math.MaxUint16)
	for k := len(order) - 1; k >= 0; k-- {
		factors[order[k]] = uint16(max(math.Round(factor), 1))
		if k > 0 {
			factor *= math.Pow(q[k-1]/q[k], 1/float64(len(order)-k))
		}
	}
	return factors
}

// learn keeps the endpoint of a client. The client of a service port is in clientRegister.
func (p *planner) learn(a affinity, timeout time.Duration, e netip.AddrPort) openflow.Actions {
	return openflow.Learn{
		Table: p.opts.FirstTable + clientTable, Priority: low, Cookie: p.opts.learnedCookies(uint32(a.client >> 32)).Value,
		Limit: p.opts.MaxClients, Idle: timeout, EtherType: etherType(a.family),
		MatchRegister:   clientRegister,
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
		return "" // without actions, a flow drops packets
	}
	return p.forward(netip.AddrPortFrom(a, refusingPort))
}

// affinityOf returns the affinity of a frontend's service port, and adds it to the plan.
func (p *servicePlan) affinityOf(f *nodeview.Frontend) affinity {
	service := p.number(name{service: p.view.Key(), part: wholeService})
	p.groups[service] = &group{}
	a := affinity{f.Family, uint64(service) << 32}
	if f.ServicePort != nil {
		a.client |= uint64(f.ServicePort.Protocol)<<16 | uint64(uint16(f.ServicePort.Port))
	}
	p.affinities[a] = true
	return a
}
