// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/sourcelists"
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
	// nodeMasquerades are frontends. Connections from the node itself to them are masqueraded.
	nodeMasquerades
	// redirects maps a frontend to the cluster IP and port to which this node's own traffic
	// to the frontend is translated.
	redirects
	// healthChecks maps the destination of a load balancer's health checks to an address and
	// port of this node.
	healthChecks
	// hairpins have the source and destination of connections from an endpoint to itself.
	hairpins
	setKinds
)

var setNames = [setKinds]string{
	frontends: "frontends", addresses: "addresses", clusterIPs: "cluster-ips", restricted: "restricted", sources: "", // see sourcelists.SetName
	drops: "drops", rejects: "rejects", masquerades: "masquerades", nodeMasquerades: "node-masquerades",
	redirects: "redirects", healthChecks: "health-checks", hairpins: "hairpins",
}

// setID identifies a set of the table.
type setID struct {
	kind   setKind
	family api.Family
}

func setOf(kind setKind, addr netip.Addr) setID { return setID{kind, api.FamilyOf(addr)} }

var families = []api.Family{api.IPv4, api.IPv6}

func allSets() (all []setID) {
	for kind := range setKinds {
		for _, family := range families {
			all = append(all, setID{kind, family})
		}
	}
	return all
}

func (s setID) name() string {
	if s.kind == sources {
		return sourcelists.SetName(s.family)
	}
	return fmt.Sprintf("%s%d", setNames[s.kind], s.family)
}

// set returns the definition of the set with the ID s in the table t.
func (s setID) set(t *nftables.Table) *nftables.Set {
	addr := nftables.TypeIPAddr
	if s.family == api.IPv6 {
		addr = nftables.TypeIP6Addr
	}
	frontend := []nftables.SetDatatype{addr, nftables.TypeInetProto, nftables.TypeInetService}
	set := &nftables.Set{Table: t, Name: s.name(), KeyType: nftables.MustConcatSetType(frontend...)}
	switch s.kind {
	case addresses, clusterIPs:
		set.KeyType = addr
	case hairpins:
		set.KeyType = nftables.MustConcatSetType(addr, addr, nftables.TypeInetProto, nftables.TypeInetService)
	case restricted:
		set.IsMap, set.DataType = true, nftables.TypeClassID
	case sources:
		set.KeyType = nftables.MustConcatSetType(nftables.TypeClassID, addr)
	case redirects, healthChecks:
		set.IsMap, set.DataType = true, nftables.MustConcatSetType(addr, nftables.TypeInetService)
	}
	return set
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

func (e element) encode() nftables.SetElement {
	s := nftables.SetElement{Key: []byte(e.key)}
	if e.value != "" {
		s.Val = []byte(e.value)
	}
	return s
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
	n := 4
	if e.set.family == api.IPv6 {
		n = 16
	}
	a, _ := netip.AddrFromSlice([]byte(e.key[:n]))
	return a
}

// server returns the virtual server that e describes.
func (e element) server() serverID {
	rest := e.key[e.addr().BitLen()/8:]
	return serverID{netip.AddrPortFrom(e.addr(), uint16(rest[4])<<8|uint16(rest[5])), kernelnode.ProtocolOf(rest[0])}
}

// target returns the virtual server that an element of the map redirects leads to.
func (e element) target() serverID {
	n := len(e.value) - 4
	a, _ := netip.AddrFromSlice([]byte(e.value[:n]))
	return serverID{netip.AddrPortFrom(a, uint16(e.value[n])<<8|uint16(e.value[n+1])), e.server().protocol}
}
