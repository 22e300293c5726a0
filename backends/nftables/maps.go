// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
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
	// kindSources is the set of the ranges of all lists of ranges, see package sourcelists. The
	// elements belong to no service.
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
	// kindNumbers maps the number of an endpoint and a protocol to the endpoint. Lists of
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

// allMaps returns every map and set of the table except the maps of clients, whose elements
// packets add and remove. A pass removes stale elements in the order of the result, so it
// removes frontends before their lists, and lists before their endpoints.
func allMaps() []mapID {
	var all []mapID
	for kind := range kindClasses + 1 {
		matches := []match{0}
		switch kind {
		case kindFrontends:
			matches = allMatches
		case kindRestricted, kindEndpoints, kindNumbers, kindHairpins:
			matches = []match{matchService, matchAddress}
		}
		for _, s := range matches {
			for _, family := range families {
				all = append(all, mapID{kind, s, family})
			}
		}
	}
	return all
}

// clientsMap returns the layout of the map of clients with session affinity. It maps a list
// and a group of client addresses to the number of an endpoint.
func clientsMap(family api.Family) layout {
	l := layout{name: fmt.Sprintf("clients%d", family), flags: unix.NFT_SET_MAP | unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, size: maxClients}
	key := []datatype{typePriority, typeInteger}
	l.keyType, l.keyLen = concatenation(key)
	l.dataType, l.dataLen = typePriority.number, typePriority.length
	l.typeof = typeof(key, []datatype{typePriority})
	return l
}

// allLayouts returns the layouts of all maps and sets of the table.
func allLayouts() []layout {
	all := []layout{clientsMap(api.IPv4), clientsMap(api.IPv6)}
	for _, m := range allMaps() {
		all = append(all, m.layout())
	}
	return all
}

func (m mapID) compare(o mapID) int {
	return cmp.Or(cmp.Compare(m.kind, o.kind), cmp.Compare(m.match, o.match), cmp.Compare(m.family, o.family))
}

func addrLen(family api.Family) int { return int(addrType(family).length) }

// layout describes a map or set in the kernel.
type layout struct {
	name                                      string
	flags, keyType, keyLen, dataType, dataLen uint32
	// size is the maximum number of elements, or 0 for no limit.
	size uint32
	// elements is the number of elements, or -1 if the kernel does not report it.
	elements int
	// typeof describes the types of key and data for nft, see the function typeof.
	typeof []byte
}

// sameAs reports whether two maps have the same layout.
func (s *layout) sameAs(o *layout) bool {
	return s.flags == o.flags && s.keyType == o.keyType && s.keyLen == o.keyLen && s.dataType == o.dataType &&
		(s.dataLen == o.dataLen || s.dataType == unix.NFT_DATA_VERDICT)
}

// description has the layout of a map and the types of the parts of a key and of the data.
type description struct {
	layout    layout
	key, data []datatype
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

func (m mapID) layout() layout { return m.description().layout }

func (m mapID) name() string { return m.description().layout.name }

// keyLen returns the length of a key in the kernel, where the length of each part is
// rounded up to a multiple of four octets.
func (m mapID) keyLen() int { return int(m.description().layout.keyLen) }

// dataLen returns the length of an element's data. It is 0 for sets and for maps with
// verdicts.
func (m mapID) dataLen() int { return int(m.description().layout.dataLen) }

func (m mapID) hasVerdicts() bool { return m.description().layout.dataType == typeVerdict.number }

// hasText reports whether the values in the map contain text: a comment or the name of a
// chain.
func (m mapID) hasText() bool { return m.kind == kindFrontends || m.kind == kindClasses }

// belongsToList reports whether each element of the map belongs to one list of endpoints.
func (m mapID) belongsToList() bool { return kindLists <= m.kind && m.kind <= kindNumbers }

// shared reports whether several services may need the same element of the map.
func (m mapID) shared() bool { return m.kind == kindClusterIPs || m.kind == kindHairpins }

// datatype is a data type of nft. It determines how nft prints a value of that type.
type datatype struct {
	number, length uint32
	isInteger      bool
}

// These are the types of the keys and data in maps. The number of a list, class or endpoint
// has the type of the packet priority, which is a 32-bit integer. typeInteger is the type of
// slots and groups. In the kernel it has the same number, see the function typeof.
var (
	typeVerdict  = datatype{number: unix.NFT_DATA_VERDICT}
	typeIPv4     = datatype{number: 7, length: 4}
	typeIPv6     = datatype{number: 8, length: 16}
	typeProtocol = datatype{number: 12, length: 1}
	typePort     = datatype{number: 13, length: 2}
	typePriority = datatype{number: 23, length: 4}
	typeInteger  = datatype{number: 23, length: 4, isInteger: true}
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
	case kindFrontends:
		name, data = matchPlurals[m.match], []datatype{typePriority}
	case kindRestricted:
		name, data = "restricted-"+matchPlurals[m.match], []datatype{typePriority}
	case kindSources:
		name, key = "sources", []datatype{typePriority, addr}
	case kindLists:
		name, key, data = "lists", []datatype{typePriority}, []datatype{typePriority}
	case kindShortcuts:
		name, key, data = "shortcuts", []datatype{typePriority}, []datatype{typePriority}
	case kindEndpoints:
		name, key, data = "endpoints", []datatype{typePriority, typeProtocol, typeInteger}, []datatype{addr, typePort}
	case kindSlots:
		name, key, data = "slots", []datatype{typePriority, typeInteger}, []datatype{typePriority}
	case kindNumbers:
		name, key, data = "numbers", []datatype{typePriority, typeProtocol}, []datatype{addr, typePort}
	case kindHairpins:
		name, key = name+"-hairpins", append([]datatype{addr}, key...)
	case kindClusterIPs:
		name, key = "cluster-ips", []datatype{addr}
	case kindNodePortAddresses:
		name, key = "nodeport-addresses", []datatype{addr}
	case kindClasses:
		name, key, data = "classes", []datatype{typePriority}, []datatype{typeVerdict}
	}
	if m.match == matchAddress && (m.kind == kindEndpoints || m.kind == kindNumbers) {
		name, key, data = "address-"+name, slices.DeleteFunc(key, func(d datatype) bool { return d == typeProtocol }), data[:1]
	}
	l.typeof = typeof(key, data)
	l.name = fmt.Sprintf("%s%d", name, m.family)
	l.keyType, l.keyLen = concatenation(key)
	if len(data) > 0 {
		l.flags = unix.NFT_SET_MAP
		l.dataType, l.dataLen = concatenation(data)
	}
	return description{l, key, data}
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

// typeof returns the description of the types of a map whose key has a part of typeInteger,
// and otherwise nil. Such a map has the type "typeof meta priority . meta length : …",
// because nft has no name for the type of a number: meta length stands for it. nft stores the
// description with the map. It needs the description to load rules with these maps, and nft
// 0.9.8, which ignores it, needs the numbers of the types in the kernel.
func typeof(key, data []datatype) []byte {
	if !slices.Contains(key, typeInteger) {
		return nil
	}
	return append(userdata(3, typeofExpression(key)), userdata(4, typeofExpression(data))...)
}

// The numbers of nft for expressions, and for the headers and their fields.
const (
	nftPayload, nftMeta, nftConcat     = 7, 9, 13
	nftTransport, nftIPv4, nftIPv6     = 11, 12, 13
	nftDestinationPort                 = 2
	nftDestinationIPv4, nftDestination = 12, 9
)

// typeofExpression encodes an expression that has these types, as nft stores it.
func typeofExpression(types []datatype) []byte {
	number := func(attr byte, v uint32) []byte { return userdata(attr, binary.NativeEndian.AppendUint32(nil, v)) }
	meta := func(key uint32) []byte { return append(number(0, nftMeta), userdata(1, number(0, key))...) }
	payload := func(header, field uint32) []byte {
		return append(number(0, nftPayload), userdata(1, append(number(0, header), number(1, field)...))...)
	}
	var all [][]byte
	for _, t := range types {
		switch t {
		case typePriority:
			all = append(all, meta(unix.NFT_META_PRIORITY))
		case typeInteger:
			all = append(all, meta(unix.NFT_META_LEN))
		case typeProtocol:
			all = append(all, meta(unix.NFT_META_L4PROTO))
		case typePort:
			all = append(all, payload(nftTransport, nftDestinationPort))
		case typeIPv4:
			all = append(all, payload(nftIPv4, nftDestinationIPv4))
		case typeIPv6:
			all = append(all, payload(nftIPv6, nftDestination))
		}
	}
	if len(all) == 1 {
		return all[0]
	}
	var parts []byte
	for i, e := range all {
		parts = append(parts, userdata(byte(i), e)...)
	}
	return append(number(0, nftConcat), userdata(1, parts)...)
}

// userdata encodes an attribute of the data that nft stores with a set.
func userdata(attr byte, v []byte) []byte { return append([]byte{attr, byte(len(v))}, v...) }
