// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// mapKind is the purpose of a map or set. Most kinds have one map for each value of the
// type match and each IP family.
type mapKind uint8

// kindNodeFrontends, kindNodeSlots, kindNodeEndpoints and kindNodeSharedChains
// are for packets from this node to external frontends with policy Local. Each of these
// kinds has a counterpart for all other packets, which is declared directly before it.
const (
	// kindFrontends maps the destination of a packet to the number of a shared chain.
	kindFrontends mapKind = iota
	kindNodeFrontends
	// kindSlots maps a frontend with session affinity and a slot to the number of an
	// endpoint.
	kindSlots
	kindNodeSlots
	// kindEndpoints maps a frontend and a slot to an endpoint. If the frontend has session
	// affinity, the key has the number of the endpoint instead of a slot.
	kindEndpoints
	kindNodeEndpoints
	// kindRestricted maps a frontend with source ranges to the number of its list of ranges.
	kindRestricted
	// kindSources is the set of the ranges of all lists, see package sourcelists. The elements
	// belong to no service.
	kindSources
	// kindHairpins is the set of connections from endpoints of this node to themselves. A
	// key has the address of the endpoint twice. Protocol and port follow, except for
	// all-ports services.
	kindHairpins
	// kindClusterIPs is the set of cluster IPs. Packets to a cluster IP are rejected if its
	// service does not have the destination port.
	kindClusterIPs
	// kindNodePortAddresses is the set of node addresses that have node ports.
	kindNodePortAddresses
	// kindSharedChains maps the number of a shared chain to that chain.
	kindSharedChains
	kindNodeSharedChains
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
	families     = []api.Family{api.IPv4, api.IPv6}
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

// allMaps returns every map and set of the table except the sets of clients, whose elements
// the kernel adds and removes. A pass removes stale elements in the order of the result, so
// it removes frontends before their endpoints and chains.
func allMaps() []mapID {
	var all []mapID
	for kind := range kindNodeSharedChains + 1 {
		matches := allMatches
		switch kind {
		case kindRestricted, kindHairpins:
			matches = []match{matchService, matchAddress}
		case kindSources, kindClusterIPs, kindNodePortAddresses:
			matches = []match{0}
		}
		for _, s := range matches {
			for _, family := range families {
				all = append(all, mapID{kind, s, family})
			}
		}
	}
	return all
}

// clientsSet returns the layout of the set of clients with session affinity.
func clientsSet(family api.Family) layout {
	l := layout{name: fmt.Sprintf("clients%d", family), flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, size: maxClients}
	l.keyType, l.keyLen = concatenation([]datatype{typePriority, addrType(family)})
	return l
}

// allLayouts returns the layouts of all maps and sets of the table.
func allLayouts() []layout {
	all := []layout{clientsSet(api.IPv4), clientsSet(api.IPv6)}
	for _, m := range allMaps() {
		all = append(all, m.layout())
	}
	return all
}

func (m mapID) compare(o mapID) int {
	return cmp.Or(cmp.Compare(m.kind, o.kind), cmp.Compare(m.match, o.match), cmp.Compare(m.family, o.family))
}

func (m mapID) addrLen() int { return int(addrType(m.family).length) }

// layout describes a map or set in the kernel.
type layout struct {
	name                                      string
	flags, keyType, keyLen, dataType, dataLen uint32
	// size is the maximum number of elements, or 0 for no limit.
	size uint32
	// elements is the number of elements, or -1 if the kernel does not report it.
	elements int
}

// sameAs reports whether two maps have the same layout.
func (s *layout) sameAs(o *layout) bool {
	return s.flags == o.flags && s.keyType == o.keyType && s.keyLen == o.keyLen && s.dataType == o.dataType &&
		(s.dataLen == o.dataLen || s.dataType == unix.NFT_DATA_VERDICT)
}

// description has the layout of a map and the types of the parts of a key.
type description struct {
	layout layout
	key    []datatype
}

var mapDescriptions = func() (all [kindNodeSharedChains + 1][matchAddress + 1][2]description) {
	for _, m := range allMaps() {
		all[m.kind][m.match][m.family/api.IPv6] = m.newDescription()
	}
	return all
}()

func (m mapID) description() *description {
	return &mapDescriptions[m.kind][m.match][m.family/api.IPv6] // the index of the family is 0 or 1
}

func (m mapID) layout() layout { return m.description().layout }

func (m mapID) name() string { return m.description().layout.name }

// keyLen returns the length of a key in the kernel, where the length of each part is
// rounded up to a multiple of four octets.
func (m mapID) keyLen() int { return int(m.description().layout.keyLen) }

// dataLen returns the length of an element's data. It is 0 for sets and for maps with
// verdicts.
func (m mapID) dataLen() int { return int(m.description().layout.dataLen) }

func (m mapID) hasVerdicts() bool { return m.description().layout.dataType == typeVerdict.number }

// leadsToChains reports whether the values in the map are chains or numbers of chains.
func (m mapID) leadsToChains() bool { return m.hasVerdicts() || m.kind <= kindNodeFrontends }

// shared reports whether several services may need the same element of the map.
func (m mapID) shared() bool { return m.kind == kindClusterIPs || m.kind == kindHairpins }

// datatype is a data type of nft. It determines how nft prints a value of that type.
type datatype struct{ number, length uint32 }

// These are the types of the keys and data in maps. The number of a chain, slot or endpoint
// has the type of the packet priority, which is a 32-bit integer.
var (
	typeVerdict  = datatype{unix.NFT_DATA_VERDICT, 0}
	typeIPv4     = datatype{7, 4}
	typeIPv6     = datatype{8, 16}
	typeProtocol = datatype{12, 1}
	typePort     = datatype{13, 2}
	typePriority = datatype{23, 4}
)

func addrType(family api.Family) datatype {
	if family == api.IPv6 {
		return typeIPv6
	}
	return typeIPv4
}

func (m mapID) newDescription() description {
	addr, name := addrType(m.family), matchNames[m.match]
	key := [...][]datatype{matchService: {addr, typeProtocol, typePort}, matchNodePort: {typeProtocol, typePort}, matchAddress: {addr}}[m.match]
	var data []datatype
	var l layout
	switch m.kind {
	case kindFrontends, kindNodeFrontends:
		name, data = matchPlurals[m.match], []datatype{typePriority}
	case kindSlots, kindNodeSlots:
		name, key, data = name+"-slots", append(key, typePriority), []datatype{typePriority}
	case kindEndpoints, kindNodeEndpoints:
		name, key, data = name+"-endpoints", append(key, typePriority), []datatype{addr, typePort}
		if m.match == matchAddress {
			data = data[:1]
		}
	case kindRestricted:
		name, data = "restricted-"+matchPlurals[m.match], []datatype{typePriority}
	case kindSources:
		name, key = "sources", []datatype{typePriority, addr}
	case kindHairpins:
		name, key = name+"-hairpins", append([]datatype{addr}, key...)
	case kindClusterIPs:
		name, key = "cluster-ips", []datatype{addr}
	case kindNodePortAddresses:
		name, key = "nodeport-addresses", []datatype{addr}
	case kindSharedChains, kindNodeSharedChains:
		name, key, data = name+"-classes", []datatype{typePriority}, []datatype{typeVerdict}
	}
	switch m.kind {
	case kindNodeFrontends, kindNodeSlots, kindNodeEndpoints, kindNodeSharedChains:
		name = "node-" + name
	}
	l.name = fmt.Sprintf("%s%d", name, m.family)
	l.keyType, l.keyLen = concatenation(key)
	if len(data) > 0 {
		l.flags = unix.NFT_SET_MAP
		l.dataType, l.dataLen = concatenation(data)
	}
	return description{l, key}
}

// concatenation returns the number by which nft identifies the data type that consists of
// parts, and the length of a value of that type.
func concatenation(parts []datatype) (number, length uint32) {
	if len(parts) == 1 {
		return parts[0].number, parts[0].length
	}
	for _, part := range parts {
		number = number<<6 | part.number
		length += (part.length + 3) &^ 3
	}
	return number, length
}
