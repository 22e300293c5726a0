// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
)

// setKind is the purpose of a set in the nftables table of the instance. For each kind,
// the table has a set for IPv4 and a set for IPv6.
type setKind uint8

const (
	// frontends are addresses, protocols and ports of virtual servers.
	frontends setKind = iota
	// addresses are the addresses that the instance makes local.
	addresses
	clusterIPs
	// restricted maps a frontend with source ranges to the number of its list of ranges. The
	// set sources has the ranges of all lists, see package sourcelists.
	restricted
	sources
	// The sets drops and rejects have frontends without endpoints. Packets to these
	// frontends are dropped or rejected.
	drops
	rejects
	// masquerades are frontends. All connections to them are masqueraded.
	masquerades
	// healthChecks maps the destination of a load balancer's health checks to an address and
	// port of this node.
	healthChecks
	// hairpins have the source and destination of connections from an endpoint to itself.
	hairpins
	setKinds
)

var setNames = [setKinds]string{
	frontends: "frontends", addresses: "addresses", clusterIPs: "cluster-ips", restricted: "restricted", sources: "sources", // see sourcelists.AddChains
	drops: "drops", rejects: "rejects", masquerades: "masquerades",
	healthChecks: "health-checks", hairpins: "hairpins",
}

// setID identifies a set of the table.
type setID struct {
	kind   setKind
	family api.Family
}

func setOf(kind setKind, addr netip.Addr) setID { return setID{kind, api.FamilyOf(addr)} }

func allSets() (all []setID) {
	for kind := range setKinds {
		for _, family := range nft.Families {
			all = append(all, setID{kind, family})
		}
	}
	return all
}

func (s setID) name() string { return fmt.Sprintf("%s%d", setNames[s.kind], s.family) }

// set returns the definition of the set.
func (s setID) set() nft.Set {
	addr := nft.TypeAddr(s.family)
	key, data := []nft.Type{addr, nft.TypeProtocol, nft.TypePort}, []nft.Type(nil)
	switch s.kind {
	case addresses, clusterIPs:
		key = key[:1]
	case hairpins:
		key = append([]nft.Type{addr}, key...)
	case restricted:
		data = []nft.Type{nft.TypePriority}
	case sources:
		key = []nft.Type{nft.TypePriority, addr}
	case healthChecks:
		data = []nft.Type{addr, nft.TypePort}
	}
	return nft.NewSet(s.name(), 0, key, data)
}

// element is an element of a set. It is comparable.
type element struct {
	set setID
	// key is the key in the kernel's encoding. For a map, value is the data of the element.
	key, value string
}

// describesFrontend reports whether the elements of a set describe frontends.
func (k setKind) describesFrontend() bool {
	switch k {
	case addresses, clusterIPs, healthChecks, hairpins, sources:
		return false
	default:
		return true
	}
}

func (e element) compare(o element) int {
	return cmp.Or(cmp.Compare(e.set.kind, o.set.kind), cmp.Compare(e.set.family, o.set.family),
		cmp.Compare(e.key, o.key), cmp.Compare(e.value, o.value))
}

// writeElements adds messages of type NFT_MSG_NEWSETELEM or NFT_MSG_DELSETELEM about elems,
// one set after the other.
func writeElements(w *nft.Writer, msg int, flags uint16, elems []element) {
	bySet := map[setID][]element{}
	for _, e := range elems {
		bySet[e.set] = append(bySet[e.set], e)
	}
	for _, id := range allSets() {
		list := bySet[id]
		w.Elements(msg, flags, id.name(), len(list), func(i int) {
			w.Value(unix.NFTA_SET_ELEM_KEY, []byte(list[i].key))
			if list[i].value != "" {
				w.Value(unix.NFTA_SET_ELEM_DATA, []byte(list[i].value))
			}
		})
	}
}

func decodeElement(set setID, item []byte) element {
	return element{set, string(nft.Value(item, unix.NFTA_SET_ELEM_KEY)), string(nft.Value(item, unix.NFTA_SET_ELEM_DATA))}
}

// describeElement describes an encoded element for errors, see nft.NewConn.
func describeElement(set string, item []byte) string {
	return fmt.Sprintf("%s %x", set, nft.Value(item, unix.NFTA_SET_ELEM_KEY))
}

// A key consists of parts, such as an address and a port. Zeros pad a part to a multiple
// of four octets.

func addrKey(a netip.Addr) string { return string(a.AsSlice()) }

func portKey(port uint16) string { return string([]byte{byte(port >> 8), byte(port), 0, 0}) }

// addressElement returns the element of an address that the instance makes local.
func addressElement(a netip.Addr) element {
	return element{set: setOf(addresses, a), key: addrKey(a)}
}

func frontendKey(id serverID) string {
	return addrKey(id.Addr()) + string([]byte{id.protocol.Number(), 0, 0, 0}) + portKey(id.Port())
}

// sourceElement returns the element of a source range.
func sourceElement(r sourcelists.Range) element {
	return element{set: setOf(sources, r.Prefix.Addr()), key: string(r.Key())}
}

// sourceElements returns the elements of source ranges.
func sourceElements(ranges []sourcelists.Range) (list []element) {
	for _, r := range ranges {
		list = append(list, sourceElement(r))
	}
	return list
}

// group returns the frontend that e describes, as an element of the set frontends. If e
// does not describe a frontend, group returns e without its value. The elements of a group
// change in one transaction.
func (e element) group() element {
	if !e.set.kind.describesFrontend() {
		return element{set: e.set, key: e.key}
	}
	return element{set: setID{frontends, e.set.family}, key: e.key[:e.addr().BitLen()/8+8]}
}

// addr returns the address at the beginning of the key.
func (e element) addr() netip.Addr {
	a, _ := netip.AddrFromSlice([]byte(e.key[:nft.AddrLen(e.set.family)]))
	return a
}

// server returns the virtual server that e describes.
func (e element) server() serverID {
	rest := e.key[e.addr().BitLen()/8:]
	return serverID{netip.AddrPortFrom(e.addr(), uint16(rest[4])<<8|uint16(rest[5])), kernelnode.ProtocolOf(rest[0])}
}
