// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"golang.org/x/sys/unix"
)

// role is what a map or set is for.
type role uint8

const (
	// frontends lead from where a packet goes to a chain.
	frontends role = iota
	// hereFrontends do so for packets that start on this node, where that
	// makes a difference.
	hereFrontends
	// endpoints lead from a frontend and a slot to an endpoint.
	endpoints
	hereEndpoints
	// sources are (frontend, source range): who gets in.
	sources
	// clusterIPs are the addresses of which unknown ports are rejected.
	clusterIPs
	// hairpins are (address, same address) of the endpoints on this node.
	hairpins
	// nodePortAddresses are the node addresses that have the node ports.
	nodePortAddresses
)

// scope is what a frontend takes, and so what its key consists of.
type scope uint8

const (
	// service: address, protocol and port.
	service scope = iota
	// nodePort: protocol and port, at every admitted node address.
	nodePort
	// address: all of an address (api.Service.AllPorts).
	address
)

var scopeNames = [...]string{service: "service", nodePort: "nodeport", address: "address"}

// mapID says which of the table's maps and sets is meant.
type mapID struct {
	role   role
	scope  scope
	family api.Family
}

// allMaps returns every map and set of the table. The order is the one in which
// stale elements may go without a hole: frontends before what they lead to.
func allMaps() []mapID {
	var all []mapID
	for _, r := range []role{frontends, hereFrontends, endpoints, hereEndpoints} {
		for _, s := range []scope{service, nodePort, address} {
			all = append(all, mapID{r, s, api.IPv4}, mapID{r, s, api.IPv6})
		}
	}
	for _, m := range []mapID{{role: sources}, {role: sources, scope: address}, {role: clusterIPs}, {role: hairpins}, {role: nodePortAddresses}} {
		for _, m.family = range []api.Family{api.IPv4, api.IPv6} {
			all = append(all, m)
		}
	}
	return all
}

// name is the map's name in the kernel.
func (m mapID) name() string {
	var name string
	switch m.role {
	case frontends:
		name = [...]string{service: "services", nodePort: "nodeports", address: "addresses"}[m.scope]
	case hereFrontends:
		name = [...]string{service: "here-services", nodePort: "here-nodeports", address: "here-addresses"}[m.scope]
	case endpoints:
		name = scopeNames[m.scope] + "-endpoints"
	case hereEndpoints:
		name = "here-" + scopeNames[m.scope] + "-endpoints"
	case sources:
		name = scopeNames[m.scope] + "-sources"
	case clusterIPs:
		name = "cluster-ips"
	case hairpins:
		name = "hairpins"
	case nodePortAddresses:
		name = "nodeport-addresses"
	}
	return fmt.Sprintf("%s%d", name, m.family)
}

func (m mapID) compare(o mapID) int {
	return cmp.Or(cmp.Compare(m.role, o.role), cmp.Compare(m.scope, o.scope), cmp.Compare(m.family, o.family))
}

func (m mapID) addrLen() int {
	if m.family == api.IPv6 {
		return 16
	}
	return 4
}

// keyLen is the length of the map's keys in the kernel: each part takes a
// multiple of four octets.
func (m mapID) keyLen() int {
	frontend := [...]int{service: m.addrLen() + 8, nodePort: 8, address: m.addrLen()}[m.scope]
	switch m.role {
	case frontends, hereFrontends:
		return frontend
	case endpoints, hereEndpoints:
		return frontend + 4
	case sources:
		return frontend + m.addrLen()
	case hairpins:
		return 2 * m.addrLen()
	default:
		return m.addrLen()
	}
}

// dataLen is the length of what the map leads to, 0 if it is a set or leads to
// verdicts.
func (m mapID) dataLen() int {
	switch {
	case m.role != endpoints && m.role != hereEndpoints:
		return 0
	case m.scope == address:
		return m.addrLen()
	default:
		return m.addrLen() + 4
	}
}

func (m mapID) hasVerdicts() bool { return m.role == frontends || m.role == hereFrontends }

// shared reports whether several services may want the same element.
func (m mapID) shared() bool { return m.role == clusterIPs || m.role == hairpins }

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
	f := elementID{m: mapID{frontends, id.m.scope, id.m.family}}
	copy(f.key[:f.m.keyLen()], id.key[:])
	return f
}

// value is what an element leads to: data, or the chain that is gone to ("drop" stands
// for that verdict). The elements of a set have the zero value.
type value struct {
	data  [20]byte
	chain string
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

func (w *keyWriter) slot(i int) {
	binary.NativeEndian.PutUint32(w.id.key[w.at:], uint32(i))
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

// String returns the element as nft prints it, behind the name of its map.
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
	next := func(n int) (part []byte) {
		part, rest = rest[:n], rest[n:]
		return part
	}
	s := id.m.name() + " "
	if id.m.scope != nodePort {
		s += addrOf(next(id.m.addrLen())).String()
	}
	if id.m.scope != address && id.m.role <= sources {
		if id.m.scope == service {
			s += " . "
		}
		s += protocolName(next(4)[0]) + " . "
		s += fmt.Sprint(binary.BigEndian.Uint16(next(4)))
	}
	switch id.m.role {
	case endpoints, hereEndpoints:
		s += fmt.Sprintf(" . %d", binary.NativeEndian.Uint32(next(4)))
	case sources:
		s += fmt.Sprintf(" . %s/%d", addrOf(next(id.m.addrLen())), id.key[maxKey-1])
	case hairpins:
		s += " . " + addrOf(next(id.m.addrLen())).String()
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
