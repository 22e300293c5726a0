// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

// mapKind is the purpose of a map or set. Most kinds have one map for each IP family, and
// some have one for each value of the type match.
type mapKind uint8

const (
	// kindFrontends maps the destination of a packet to the number of a list. The last
	// digit of the value is a handling.
	kindFrontends mapKind = iota
	// kindRestricted maps a frontend with source ranges to the number of its list of ranges.
	kindRestricted
	// kindSources is the set that has the ranges of all source lists, see package sourcelists.
	// The elements belong to no service.
	kindSources
	// kindLists maps the number of a list to the number of a class.
	kindLists
	// kindShortcuts maps the number of a list to the number of the list for packets from this
	// node, for external frontends with policy Local.
	kindShortcuts
	// kindEndpoints maps a list, a protocol and a slot to an endpoint. Lists of all-ports
	// services have no protocol.
	kindEndpoints
	// kindSlots maps a list with session affinity and a slot to the number of an endpoint.
	kindSlots
	// kindNumbers maps a protocol, with the number of an endpoint, to the endpoint. Lists of
	// all-ports services have no protocol.
	kindNumbers
	// kindHairpins is the set of connections from endpoints of this node to themselves. A
	// key has the address of the endpoint twice. Protocol and port follow, except for
	// all-ports services.
	kindHairpins
	// kindClusterIPs is the set of cluster IPs. Packets to a cluster IP are rejected if its
	// service does not have the destination port.
	kindClusterIPs
	// kindNodePortAddresses is the set of node addresses that have node ports.
	kindNodePortAddresses
	// kindClasses maps the number of a class to its chain.
	kindClasses
)

// match says which fields of a packet select a frontend. These fields are the key of the
// frontend.
type match uint8

const (
	// matchService means address, protocol and port.
	matchService match = iota
	// matchNodePort means protocol and port, at addresses in the set kindNodePortAddresses.
	matchNodePort
	// matchAddress means an address with all its ports (api.Service.AllPorts).
	matchAddress
)

var (
	allMatches   = []match{matchService, matchNodePort, matchAddress}
	matchNames   = [...]string{matchService: "service", matchNodePort: "nodeport", matchAddress: "address"}
	matchPlurals = [...]string{matchService: "services", matchNodePort: "nodeports", matchAddress: "addresses"}
)

// mapID identifies one of the table's maps and sets.
type mapID struct {
	kind   mapKind
	match  match
	family api.Family
}

// allMaps returns every map and set of the table, except the maps of clients, which
// packets change. A pass removes stale elements in the order of the result, so it removes
// frontends before their lists, and lists before their endpoints.
func allMaps() []mapID {
	var all []mapID
	for kind := range kindClasses + 1 {
		matches := []match{0}
		switch kind {
		case kindFrontends, kindRestricted:
			matches = allMatches
		case kindEndpoints, kindNumbers, kindHairpins:
			matches = []match{matchService, matchAddress}
		}
		for _, s := range matches {
			for _, family := range nft.Families {
				all = append(all, mapID{kind, s, family})
			}
		}
	}
	return all
}

// clientsMap returns the map of clients with session affinity. It maps a list and a group
// of client addresses to the number of an endpoint.
func clientsMap(family api.Family) nft.Set {
	s := nft.NewSet(fmt.Sprintf("clients%d", family), unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT,
		[]nft.Type{nft.TypePriority, nft.TypeInteger}, []nft.Type{nft.TypePriority})
	s.Size = maxClients
	return s
}

// allLayouts returns all maps and sets of the table.
func allLayouts() []nft.Set {
	all := []nft.Set{clientsMap(api.IPv4), clientsMap(api.IPv6)}
	for _, m := range allMaps() {
		all = append(all, m.layout())
	}
	return all
}

func (m mapID) compare(o mapID) int {
	return cmp.Or(cmp.Compare(m.kind, o.kind), cmp.Compare(m.match, o.match), cmp.Compare(m.family, o.family))
}

// description has the layout of a map and the types of the parts of a key and of the data.
type description struct {
	layout    nft.Set
	key, data []nft.Type
}

var mapDescriptions = func() (all [kindClasses + 1][matchAddress + 1][2]description) {
	for _, m := range allMaps() {
		all[m.kind][m.match][m.family/api.IPv6] = m.newDescription()
	}
	return all
}()

func (m mapID) description() *description {
	return &mapDescriptions[m.kind][m.match][m.family/api.IPv6] // the index of the family is 0 or 1
}

func (m mapID) layout() nft.Set { return m.description().layout }

func (m mapID) name() string { return m.description().layout.Name }

// keyLen returns the length of a key in the kernel, where the length of each part is
// rounded up to a multiple of four octets.
func (m mapID) keyLen() int { return m.description().layout.KeyLen }

// dataLen returns the length of an element's data. It is 0 for sets and for maps with
// verdicts.
func (m mapID) dataLen() int { return m.description().layout.DataLen }

func (m mapID) hasVerdicts() bool { return m.description().layout.HasVerdicts() }

// hasText reports whether the values in the map contain text: a comment or the name of a
// chain.
func (m mapID) hasText() bool { return m.kind == kindFrontends || m.kind == kindClasses }

// belongsToList reports whether each element of the map belongs to one list of endpoints.
func (m mapID) belongsToList() bool { return kindLists <= m.kind && m.kind <= kindNumbers }

// readOnDemand reports whether a pass of a large table reads the elements of the map only
// when it needs them. These maps lead to endpoints. They follow kindLists in allMaps.
func (m mapID) readOnDemand() bool { return kindEndpoints <= m.kind && m.kind <= kindNumbers }

// canCount reports whether elements of the map have counters with Options.Stats. Each
// connection to a service finds exactly one such element.
func (m mapID) canCount() bool { return m.kind == kindEndpoints || m.kind == kindNumbers }

// shared reports whether several services may need the same element of the map.
func (m mapID) shared() bool { return m.kind == kindClusterIPs || m.kind == kindHairpins }

func (m mapID) newDescription() description {
	addr, name := nft.TypeAddr(m.family), matchNames[m.match]
	key := [...][]nft.Type{matchService: {addr, nft.TypeProtocol, nft.TypePort}, matchNodePort: {nft.TypeProtocol, nft.TypePort}, matchAddress: {addr}}[m.match]
	var data []nft.Type
	switch m.kind {
	case kindFrontends:
		name, data = matchPlurals[m.match], []nft.Type{nft.TypePriority}
	case kindRestricted:
		name, data = "restricted-"+matchPlurals[m.match], []nft.Type{nft.TypePriority}
	case kindSources:
		name, key = "sources", []nft.Type{nft.TypePriority, addr}
	case kindLists:
		name, key, data = "lists", []nft.Type{nft.TypePriority}, []nft.Type{nft.TypePriority}
	case kindShortcuts:
		name, key, data = "shortcuts", []nft.Type{nft.TypePriority}, []nft.Type{nft.TypePriority}
	case kindEndpoints:
		name, key, data = "endpoints", []nft.Type{nft.TypePriority, nft.TypeProtocol, nft.TypeInteger}, []nft.Type{addr, nft.TypePort}
	case kindSlots:
		name, key, data = "slots", []nft.Type{nft.TypePriority, nft.TypeInteger}, []nft.Type{nft.TypePriority}
	case kindNumbers:
		name, key, data = "numbers", []nft.Type{nft.TypePriority, nft.TypeProtocol}, []nft.Type{addr, nft.TypePort}
	case kindHairpins:
		name, key = name+"-hairpins", append([]nft.Type{addr}, key...)
	case kindClusterIPs:
		name, key = "cluster-ips", []nft.Type{addr}
	case kindNodePortAddresses:
		name, key = "nodeport-addresses", []nft.Type{addr}
	case kindClasses:
		name, key, data = "classes", []nft.Type{nft.TypePriority}, []nft.Type{nft.TypeVerdict}
	}
	if m.match == matchAddress && (m.kind == kindEndpoints || m.kind == kindNumbers) {
		name, key, data = "address-"+name, slices.DeleteFunc(key, func(d nft.Type) bool { return d == nft.TypeProtocol }), data[:1]
	}
	return description{nft.NewSet(fmt.Sprintf("%s%d", name, m.family), 0, key, data), key, data}
}

// sharedID identifies an element of a shared map. It is smaller than an elementID,
// because there may be hundreds of thousands of IDs: one for each endpoint of this node.
type sharedID struct {
	m   mapID
	key [sharedKey]byte
}

// sharedKey is the maximum key length of a shared map, in bytes. A key of kindHairpins
// contains the same address twice, but a sharedID contains it once.
const sharedKey = 24

// sharedID returns the ID of an element of a shared map.
func (id *elementID) sharedID() sharedID {
	s, key := sharedID{m: id.m}, id.key[:]
	if id.m.kind == kindHairpins {
		key = key[nft.AddrLen(id.m.family):]
	}
	copy(s.key[:], key)
	return s
}
