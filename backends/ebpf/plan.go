// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/nodeview"
)

// The following types are keys and values of maps. They have the same layout as in
// connect.c, and all their fields are exported, because package cilium/ebpf requires
// exported fields.

// address is an address and a port in network byte order. An IPv4 address is stored as an
// IPv4-mapped IPv6 address. Other is 0, except in slots of lists with weights.
type address struct {
	IP    [16]byte
	Port  [2]byte
	Other uint16
}

func toAddress(addr netip.Addr, port int32) address {
	a := address{IP: addr.As16()}
	binary.BigEndian.PutUint16(a.Port[:], uint16(port))
	return a
}

func (a address) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(a.IP).Unmap(), binary.BigEndian.Uint16(a.Port[:]))
}

func (a address) String() string { return a.addrPort().String() }

// frontendKey is an address and a port. A node port has no address, and NodePort is its
// family, 4 or 6. A node port applies to all addresses of its family in the map node_ips.
type frontendKey struct {
	IP       [16]byte
	Port     [2]byte
	Protocol uint8
	NodePort uint8
}

// isClusterIP reports whether k has only an address. It is then a key of the map
// client_counts.
func (k frontendKey) isClusterIP() bool { return k.Protocol == 0 }

func (k frontendKey) String() string {
	if k.NodePort != 0 {
		return fmt.Sprintf("node port IPv%d:%d/%s", k.NodePort, binary.BigEndian.Uint16(k.Port[:]), kernelnode.ProtocolOf(k.Protocol))
	}
	return fmt.Sprintf("%s/%s", address{IP: k.IP, Port: k.Port}, kernelnode.ProtocolOf(k.Protocol))
}

func toFrontend(addr netip.Addr, protocol api.Protocol, port int32) frontendKey {
	a := toAddress(addr, port)
	return frontendKey{IP: a.IP, Port: a.Port, Protocol: protocol.Number()}
}

// toNodePort returns the key of a node port.
func toNodePort(family api.Family, protocol api.Protocol, port int32) frontendKey {
	k := toFrontend(netip.IPv6Unspecified(), protocol, port)
	if k.NodePort = 6; family == api.IPv4 {
		k.NodePort = 4
	}
	return k
}

func keyOf(f *nodeview.Frontend) frontendKey {
	if f.Kind == nodeview.NodePort {
		return toNodePort(f.Family, f.Protocol, f.Port)
	}
	return toFrontend(f.Addr, f.Protocol, f.Port)
}

// list is a value in the map frontends: it describes the list of endpoints of a frontend.
// Affinity is in seconds.
type list struct {
	ID              uint64
	Count, Affinity uint32
}

type slotKey struct {
	List       uint64
	Index, Pad uint32
}

type memberKey struct {
	List     uint64
	Endpoint address
	Pad      [4]byte
}

// clientKey is a client of a frontend with session affinity.
type clientKey struct {
	NetNS    uint64
	Frontend frontendKey
	Pad      uint32
}

// choice is the endpoint of a client. Time is in nanoseconds since the boot.
type choice struct {
	Time     uint64
	Endpoint address
	Pad      uint32
}

// peer has the addresses of a connected socket: the service that it requested, and the
// endpoint that it uses instead.
type peer struct{ Service, Endpoint address }

// size is a number of elements of each map.
type size struct{ frontends, endpoints, members int }

// fits reports whether no number of s is larger than the same number of o.
func (s size) fits(o size) bool {
	return s.frontends <= o.frontends && s.endpoints <= o.endpoints && s.members <= o.members
}

func (s *size) add(o size) {
	s.frontends += o.frontends
	s.endpoints += o.endpoints
	s.members += o.members
}

func (s *size) subtract(o size) { s.add(size{-o.frontends, -o.endpoints, -o.members}) }

// wanted is a frontend that a service needs. Frontends of a service share lists.
type wanted struct {
	frontend frontendKey
	port     *api.PortMapping
	*endpointList
}

// endpointList is a list that a service needs.
type endpointList struct {
	// slots has the endpoints for new clients. members has the endpoints that existing
	// clients may keep. Either may be empty.
	slots
	members  []address
	affinity uint32 // in seconds
	digest   uint64
	view     *api.View
}

func (l *endpointList) size() size {
	return size{endpoints: len(l.endpoints) + len(l.others), members: len(l.members)}
}

// slotDigest returns the digest of a slot. The digest of a list is the sum of the digests of
// its slots, members and session affinity, so the order in which a map is read does not
// matter.
func slotDigest(seed maphash.Seed, index uint32, a address) uint64 {
	return maphash.Comparable(seed, slotKeyDigest{index, a})
}

func memberDigest(seed maphash.Seed, a address) uint64 { return maphash.Comparable(seed, a) }

// affinityDigest returns the digest of the session affinity of a list, in seconds.
func affinityDigest(seed maphash.Seed, affinity uint32) uint64 {
	if affinity == 0 {
		return 0
	}
	return maphash.Comparable(seed, affinity)
}

type slotKeyDigest struct {
	index uint32
	a     address
}

// planner makes plans.
type planner struct {
	annotation string
	tcpOnly    bool
	// nodePorts is true if the addresses of node ports are known.
	nodePorts bool
	// below has the traffic parameters that the other sink honours.
	below nodeview.Parameters
	seed  maphash.Seed
	// share is the maximum size of a service.
	share size
}

// plan returns the frontends that the programs handle for a view. If the service needs
// more than its share of a map, plan returns no frontends, and the result tooLarge says
// why.
func (p *planner) plan(view *api.View) (all []wanted, tooLarge string) {
	s := servicePlan{planner: p, view: view, lists: map[listKey]*endpointList{}}
	var rest []*nodeview.Frontend
	for f := range nodeview.Frontends(view) {
		// UDP sockets may keep a draining endpoint even if new sockets have no endpoint.
		if reason := p.unsuitable(view, &f); reason != "" && !(reason == noEndpoint && f.Protocol == api.UDP) {
			continue
		}
		if f.Protocol != api.UDP && f.Affinity == 0 {
			kept := f // f itself does not escape, because most frontends may be external
			rest = append(rest, &kept)
		} else if s.add(&f); !s.needed.fits(p.share) {
			return nil, p.excess(s.needed)
		}
	}
	// These frontends have no members, so they use any list with their endpoints.
	for _, f := range rest {
		if s.add(f); !s.needed.fits(p.share) {
			return nil, p.excess(s.needed)
		}
	}
	return s.all, ""
}

// excess returns the reason why a service of a size is too large.
func (p *planner) excess(needed size) string {
	name, limit := "frontends", p.share.frontends
	switch {
	case needed.endpoints > p.share.endpoints:
		name, limit = "slots", p.share.endpoints
	case needed.members > p.share.members:
		name, limit = "members", p.share.members
	}
	return fmt.Sprintf("it needs more than %d elements of map %s, the share of a service", limit, name)
}

// servicePlan is the plan of a service while it is made.
type servicePlan struct {
	*planner
	view   *api.View
	all    []wanted
	needed size
	// The keys of lists have the ID and the members of a list. The first list of each ID
	// also has a key without members.
	lists map[listKey]*endpointList
	// own has the members of lists with session affinity. existing has the members of UDP
	// ports.
	own      map[nodeview.ListID]memberSet
	existing map[nodeview.Existing]memberSet
}

// listKey identifies a list of a service by its endpoints and the digest of its members.
type listKey struct {
	id      nodeview.ListID
	members uint64
}

type memberSet struct {
	addresses []address
	digest    uint64
}

// add adds a frontend if clients may use or keep one of its endpoints.
func (s *servicePlan) add(f *nodeview.Frontend) {
	var members memberSet
	switch {
	case f.Protocol == api.UDP:
		members = s.existingMembers(f)
	case f.Affinity != 0:
		members = s.ownMembers(f)
	}
	if len(f.Node.Endpoints)+len(members.addresses) == 0 {
		return
	}
	s.needed.frontends++
	l := s.lists[listKey{f.Node.List, members.digest}]
	if l == nil {
		l = s.addList(f, members)
	}
	s.all = append(s.all, wanted{keyOf(f), f.ServicePort, l})
}

func (s *servicePlan) addList(f *nodeview.Frontend, members memberSet) *endpointList {
	affinity := uint32(f.Affinity / time.Second)
	l := &endpointList{slots: slotsOf(f.Node.Endpoints), members: members.addresses, affinity: affinity, view: s.view}
	l.digest = members.digest + affinityDigest(s.seed, affinity)
	for i, a := range l.all() {
		l.digest += slotDigest(s.seed, i, a)
	}
	s.lists[listKey{f.Node.List, members.digest}] = l
	if without := (listKey{id: f.Node.List}); s.lists[without] == nil {
		s.lists[without] = l
	}
	s.needed.add(l.size())
	return l
}

func toAddresses(targets []nodeview.Target) []address {
	all := make([]address, len(targets))
	for i, t := range targets {
		all[i] = toAddress(t.Addr, t.Port)
	}
	return all
}

func (s *servicePlan) members(addresses []address) memberSet {
	m := memberSet{addresses: addresses}
	for _, a := range addresses {
		m.digest += memberDigest(s.seed, a)
	}
	return m
}

// ownMembers returns the endpoints of a frontend. Clients with session affinity keep
// these endpoints.
func (s *servicePlan) ownMembers(f *nodeview.Frontend) memberSet {
	m, ok := s.own[f.Node.List]
	if !ok {
		if s.own == nil {
			s.own = map[nodeview.ListID]memberSet{}
		}
		m = s.members(toAddresses(f.Node.Endpoints))
		s.own[f.Node.List] = m
	}
	return m
}

// existingMembers returns the endpoints that UDP sockets may keep: all endpoints of the
// frontend's port and family, including draining endpoints.
func (s *servicePlan) existingMembers(f *nodeview.Frontend) memberSet {
	m, ok := s.existing[f.Existing]
	if !ok {
		if s.existing == nil {
			s.existing = map[nodeview.Existing]memberSet{}
		}
		var all []address
		for t := range f.Existing.All() {
			all = append(all, toAddress(t.Addr, t.Port))
		}
		m = s.members(all)
		s.existing[f.Existing] = m
	}
	return m
}

const noEndpoint = "it has no usable endpoint"

// unsuitable returns the reason why the programs cannot handle a frontend, or the empty
// string if they can. A traffic parameter that the programs do not honour is a reason only if
// the other sink honours it.
func (p *planner) unsuitable(view *api.View, f *nodeview.Frontend) string {
	switch {
	case f.Kind == nodeview.NodePort && !p.nodePorts:
		return "the addresses of the node are not known"
	case f.Protocol != api.TCP && f.Protocol != api.UDP:
		return "the protocol is not TCP or UDP"
	case f.Protocol != api.TCP && p.tcpOnly:
		return "the protocol is not TCP"
	case f.Sources.Restricted:
		return "it has source ranges"
	case f.Protocol == api.UDP && f.Affinity != 0:
		return "it is a UDP port with session affinity"
	case f.Kind != nodeview.ClusterIP && f.Affinity != 0:
		return "with session affinity, a client has one endpoint at all external addresses"
	case view.Service.Annotations[p.annotation] == "false":
		return "the annotation " + p.annotation + " of the service excludes it"
	case f.Algorithm != api.Random && p.below.Algorithm:
		return "stable hashing needs the source address, which a socket gets after the program has run"
	case view.Service.ResetConnections && p.below.Resets && f.Protocol == api.TCP:
		return "connections to its lost endpoints are reset by connection tracking"
	case f.Node.Verdict != nodeview.Forward:
		return noEndpoint
	default:
		return ""
	}
}
