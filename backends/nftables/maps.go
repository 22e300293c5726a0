// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// role is what a map or set is for.
type mapKind uint8

const (
	// frontends map the destination of a packet to the number of its class.
	frontends mapKind = iota
	// nodeFrontends do so for packets that start on this node, where that
	// makes a difference.
	nodeFrontends
	// lists map the frontends of services with session affinity to a chain of theirs.
	affinityChains
	nodeAffinityChains
	// endpoints map a frontend and a slot to an endpoint.
	endpoints
	nodeEndpoints
	// sources are (frontend, source range): who gets in.
	sources
	// hairpins are the connections of endpoints on this node to themselves: (address,
	// same address), followed by protocol and port unless the service has all ports.
	hairpins
	// clusterIPs are the addresses of which unknown ports are rejected.
	clusterIPs
	// nodePortAddresses are the node addresses that have the node ports.
	nodePortAddresses
	// classes map the number of a class to its chain.
	sharedChains
	nodeSharedChains
)

// scope is what a frontend takes, and so what its key consists of.
type match uint8

const (
	// service: address, protocol and port.
	matchService match = iota
	// nodePort: protocol and port, at every admitted node address.
	matchNodePort
	// address: all of an address (api.Service.AllPorts).
	matchAddress
)

var (
	matchNames   = [...]string{matchService: "service", matchNodePort: "nodeport", matchAddress: "address"}
	matchPlurals = [...]string{matchService: "services", matchNodePort: "nodeports", matchAddress: "addresses"}
)

// mapID says which of the table's maps and sets is meant.
type mapID struct {
	kind   mapKind
	match  match
	family api.Family
}

// allMaps returns every map and set of the table. The order is the one in which
// stale elements may go without a hole: frontends before what they lead to.
func allMaps() []mapID {
	var all []mapID
	add := func(r mapKind, matches ...match) {
		for _, s := range matches {
			all = append(all, mapID{r, s, api.IPv4}, mapID{r, s, api.IPv6})
		}
	}
	for r := frontends; r <= nodeEndpoints; r++ {
		add(r, matchService, matchNodePort, matchAddress)
	}
	add(sources, matchService, matchAddress)
	add(hairpins, matchService, matchAddress)
	add(clusterIPs, 0)
	add(nodePortAddresses, 0)
	add(sharedChains, matchService, matchNodePort, matchAddress)
	add(nodeSharedChains, matchService, matchNodePort, matchAddress)
	return all
}

func (m mapID) compare(o mapID) int {
	return cmp.Or(cmp.Compare(m.kind, o.kind), cmp.Compare(m.match, o.match), cmp.Compare(m.family, o.family))
}

func (m mapID) addrLen() int {
	if m.family == api.IPv6 {
		return 16
	}
	return 4
}

// description says what a map has in the kernel, and the parts of its keys.
type description struct {
	layout layout
	key    []datatype
}

// descriptions are those of all maps.
var descriptions = func() (all [nodeSharedChains + 1][matchAddress + 1][2]description) {
	for _, m := range allMaps() {
		all[m.kind][m.match][m.family/api.IPv6] = m.describe()
	}
	return all
}()

func (m mapID) description() *description {
	return &descriptions[m.kind][m.match][m.family/api.IPv6] // 0 or 1
}

// name is the map's name in the kernel.
func (m mapID) name() string { return m.description().layout.name }

func (m mapID) layout() layout { return m.description().layout }

// keyLen is the length of the map's keys in the kernel: each part takes a
// multiple of four octets.
func (m mapID) keyLen() int { return int(m.description().layout.keyLen) }

// dataLen is the length of what the map leads to, 0 if it is a set or leads to
// verdicts.
func (m mapID) dataLen() int { return int(m.description().layout.dataLen) }

func (m mapID) hasVerdicts() bool { return m.description().layout.dataType == typeVerdict.number }

// leadsToChains reports whether the values of its elements are chains, or classes.
func (m mapID) leadsToChains() bool {
	return m.hasVerdicts() || m.kind == frontends || m.kind == nodeFrontends
}

// shared reports whether several services may want the same element.
func (m mapID) shared() bool { return m.kind == clusterIPs || m.kind == hairpins }

// datatype is one of nft's, by which it prints an element or a part of one.
type datatype struct{ number, length uint32 }

// The datatypes. Classes and slots are loaded from the packet's priority.
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

func (m mapID) describe() description {
	addr, name := addrType(m.family), matchNames[m.match]
	key := [...][]datatype{matchService: {addr, typeProtocol, typePort}, matchNodePort: {typeProtocol, typePort}, matchAddress: {addr}}[m.match]
	var data []datatype
	var l layout
	switch m.kind {
	case frontends, nodeFrontends:
		name, data = matchPlurals[m.match], []datatype{typePriority}
	case affinityChains, nodeAffinityChains:
		name, data = name+"-lists", []datatype{typeVerdict}
	case endpoints, nodeEndpoints:
		name, key, data = name+"-endpoints", append(key, typePriority), []datatype{addr, typePort}
		if m.match == matchAddress {
			data = data[:1]
		}
	case sources:
		name, key = name+"-sources", append(key, addr)
		l.flags = unix.NFT_SET_INTERVAL | nftSetConcat
		for _, part := range key {
			l.fields = append(l.fields, part.length)
		}
	case hairpins:
		name, key = name+"-hairpins", append([]datatype{addr}, key...)
	case clusterIPs:
		name, key = "cluster-ips", []datatype{addr}
	case nodePortAddresses:
		name, key = "nodeport-addresses", []datatype{addr}
	case sharedChains, nodeSharedChains:
		name, key, data = name+"-classes", []datatype{typePriority}, []datatype{typeVerdict}
	}
	switch m.kind {
	case nodeFrontends, nodeAffinityChains, nodeEndpoints, nodeSharedChains:
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

// concatenation returns the number and the length of a type that has these parts.
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

// maxKey is the longest key, that of a source of a service, and one octet for the
// length of the source's prefix.
const maxKey = 40 + 1

// elementID says which element of which map is meant. The key is padded with
// zeros; its last octet is the prefix length of a source.
type elementID struct {
	m   mapID
	key [maxKey]byte
}

// frontend returns the element of a frontend that id, whose key begins with it, is
// about.
func (id *elementID) frontend() elementID {
	f := elementID{m: mapID{frontends, id.m.match, id.m.family}}
	copy(f.key[:f.m.keyLen()], id.key[:])
	return f
}

// value is what an element has besides its key. The elements of a set have the zero value.
type value struct {
	data [20]byte
	// chain is the chain that a packet goes to, "drop" stands for that verdict. In the maps
	// of frontends it is the chain of the class that data has the number of.
	chain string
	// comment names the service port of a frontend, for readers of the table.
	comment string
}

// drop is the verdict of that name, in place of a chain.
const drop = "drop"

// element is an element of one of the table's maps or sets.
type element struct {
	elementID
	value
}

// keyWriter puts together a key.
type keyWriter struct {
	id *elementID
	at int
}

func (w *keyWriter) addr(a netip.Addr) { w.at += copy(w.id.key[w.at:], a.AsSlice()) }

func (w *keyWriter) protocol(p api.Protocol) {
	w.id.key[w.at] = protocolNumbers[p]
	w.at += 4
}

func (w *keyWriter) port(p int32) {
	binary.BigEndian.PutUint16(w.id.key[w.at:], uint16(p))
	w.at += 4
}

func (w *keyWriter) slot(i int) { w.priority(firstSlot + uint32(i)) }

func (w *keyWriter) priority(number uint32) {
	binary.NativeEndian.PutUint32(w.id.key[w.at:], number)
	w.at += 4
}

var protocolNumbers = map[api.Protocol]byte{api.TCP: unix.IPPROTO_TCP, api.UDP: unix.IPPROTO_UDP, api.SCTP: unix.IPPROTO_SCTP}

// target returns the value that leads to an endpoint.
func target(a netip.Addr, port int32) value {
	var v value
	n := copy(v.data[:], a.AsSlice())
	binary.BigEndian.PutUint16(v.data[n:], uint16(port))
	return v
}

// String returns the element much as nft prints it, behind the name of its map. Instead of
// the number of a class it has the class's chain.
func (e element) String() string {
	s := e.elementID.String()
	addrLen := e.m.addrLen()
	switch {
	case e.chain == drop:
		s += " : drop"
	case e.chain != "":
		s += " : goto " + e.chain
	case e.m.dataLen() == addrLen:
		s += " : " + addrOf(e.data[:addrLen]).String()
	case e.m.dataLen() > 0:
		s += fmt.Sprintf(" : %s . %d", addrOf(e.data[:addrLen]), binary.BigEndian.Uint16(e.data[addrLen:]))
	}
	return s
}

// String returns the element's key as nft prints it, behind the name of its map.
func (id elementID) String() string {
	rest := id.key[:id.m.keyLen()]
	var parts []string
	for _, part := range id.m.description().key {
		n := (part.length + 3) &^ 3
		v := rest[:n]
		rest = rest[n:]
		switch part {
		case typeProtocol:
			parts = append(parts, protocolName(v[0]))
		case typePort:
			parts = append(parts, fmt.Sprint(binary.BigEndian.Uint16(v)))
		case typePriority:
			number := binary.NativeEndian.Uint32(v)
			parts = append(parts, fmt.Sprintf("%x:%x", number>>16, number&0xffff))
		default:
			parts = append(parts, addrOf(v).String())
		}
	}
	s := id.m.name() + " " + strings.Join(parts, " . ")
	if id.m.kind == sources {
		s += fmt.Sprint("/", id.key[maxKey-1])
	}
	return s
}

func addrOf(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

func protocolName(number byte) string {
	switch number {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	default:
		return fmt.Sprint(number)
	}
}
