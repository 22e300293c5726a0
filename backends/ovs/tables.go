// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
)

// The tables of an instance, relative to Options.FirstTable. docs/operate/ovs.md describes
// the way of a packet through them.
const (
	// entryTable restores the source of answers to masqueraded connections.
	entryTable = iota
	// trackTable tracks connections, and translates packets of known ones.
	trackTable
	// stateTable separates new connections from others.
	stateTable
	// sourceTable finds out where a new connection comes from.
	sourceTable
	// nodeTable marks new connections to addresses that have node ports.
	nodeTable
	// frontendTable has the frontends of services.
	frontendTable
	// masqueradeTable decides whether to masquerade a connection.
	masqueradeTable
	// clientTable has learned flows: the endpoints of clients with session affinity.
	clientTable
	// memberTable has the endpoints of lists with session affinity, and lists of source
	// ranges.
	memberTable
	// sentTable masquerades connections whose destination was translated.
	sentTable
	tables
)

// Bits of register 0. A connection comes from one of four kinds of sources. A frontend
// selects the kinds of sources whose connections are masqueraded: it sets the same bits,
// shifted by selectShift.
const (
	fromOutside = 1 << iota
	fromCluster // a pod of another node
	fromPod     // a pod of this node
	fromNode    // the node itself

	selectShift = 4
	fromAny     = 1<<selectShift - 1

	masqueradeBit = 8
	masquerade    = 1 << masqueradeBit
	toNode        = 1 << 9  // the destination has node ports
	fromHere      = 1 << 10 // the source is the node or a pod of this node
	admitted      = 1 << 11 // the source is in the source ranges of the frontend

	// The upper half of register 0 is the port of the endpoint that a client had before.
	portShift = 16
)

// Other registers. They are for session affinity, and listRegister is also for source
// ranges. The 64-bit register n consists of the 32-bit registers 2n and 2n+1. The 128-bit
// register n consists of the 64-bit registers 2n and 2n+1.
const (
	flagsRegister   = 0
	listRegister    = 1 // the number of a list of endpoints or source ranges
	serviceRegister = 2 // the number of the service
	portRegister    = 3 // the protocol and the port of the service port
	clientRegister  = 1 // 64 bits: the two registers above
	addressRegister = 1 // 128 bits: the address of the endpoint that a client had before
)

func flags(value uint32) (r [8]openflow.Bits) {
	r[0] = openflow.Bits{Value: uint64(value) << 32, Mask: uint64(value) << 32}
	return r
}

// save puts the registers that the backend uses on the stack of a packet, and restore moves
// them back. So registers have the same values when a packet leaves as when it came.
var (
	save    = openflow.Join(openflow.Push(0), openflow.Push(1))
	restore = openflow.Join(openflow.Pop(1), openflow.Pop(0))
)

// entryPriorities is the number of priorities of flows in the first table.
const entryPriorities = 3

// Priorities of flows in the tables after the first.
const (
	low = 10 * (iota + 1)
	middle
	high
	highest
)

func etherType(f api.Family) uint16 {
	if f == api.IPv6 {
		return openflow.IPv6
	}
	return openflow.IPv4
}

var families = []api.Family{api.IPv4, api.IPv6}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// cookie returns the cookie of the flows that the backend writes. Learned flows also have
// the number of the service in the lower 32 bits, so that the switch counts them by service.
func (o *options) cookie() uint64 { return (0x6b706e00 + uint64(o.number)) << 32 }

// learnedCookies are the cookies of the learned flows of a service.
func (o *options) learnedCookies(service uint32) openflow.Cookies {
	return openflow.Cookies{Value: o.cookie() | uint64(service), Mask: 1<<64 - 1}
}

// writtenCookies are the cookies of the flows that the backend writes. allCookies are the
// cookies of all flows of the instance.
func (o *options) writtenCookies() openflow.Cookies {
	return openflow.Cookies{Value: o.cookie(), Mask: 1<<64 - 1}
}

func (o *options) allCookies() openflow.Cookies {
	return openflow.Cookies{Value: o.cookie(), Mask: 0xffffffff << 32}
}

// firstGroup returns the lowest ID of the instance's groups.
func (o *options) firstGroup() uint32 { return 0x60000000 + uint32(o.number)<<24 }

// groupCount limits the groups that an instance has.
const groupCount = 1 << 20

// ownsGroup reports whether an ID is a group ID of the instance.
func (o *options) ownsGroup(id uint32) bool { return id>>24 == o.firstGroup()>>24 }

func (o *options) resubmit(table uint8) openflow.Actions {
	return openflow.Resubmit(o.FirstTable + table)
}

// node has addresses of the node.
type node struct {
	// nodePortAddrs are the addresses with node ports. machineAddrs are all addresses of the
	// machine.
	nodePortAddrs, machineAddrs []netip.Addr
}

func (n *node) equal(o *node) bool {
	return slices.Equal(n.nodePortAddrs, o.nodePortAddrs) && slices.Equal(n.machineAddrs, o.machineAddrs)
}

// flowSet is a set of flows without cookies.
type flowSet map[openflow.FlowKey]openflow.Actions

func (o *options) add(s flowSet, table uint8, priority uint16, m openflow.Match, actions ...openflow.Actions) {
	s[openflow.FlowKey{Table: o.FirstTable + table, Priority: priority, Match: m.Encode()}] = openflow.Join(actions...)
}

// flows returns the flows that do not depend on services.
func (o *options) flows(n *node) flowSet {
	s := flowSet{}
	for _, family := range families {
		ip := openflow.Match{EtherType: etherType(family)}
		out := openflow.Resubmit(o.OutTable)
		// Packets that another instance has translated leave these tables. Packets of
		// connections that an instance has committed also leave.
		m := ip
		m.Zone = openflow.Bits{Value: uint64(o.MasqueradeZone), Mask: 1<<16 - 1}
		o.add(s, entryTable, o.Priority+2, m, out)
		m.Zone.Value = uint64(o.Zone)
		m.State = state(openflow.StateTracked, openflow.StateNew)
		o.add(s, entryTable, o.Priority+2, m, out)
		m.State = state(openflow.StateTracked|openflow.StateNew|openflow.StateDNAT, 0)
		o.add(s, entryTable, o.Priority+2, m, out)
		nodeAddr := addressOf(o.MasqueradeAddresses, family)
		translateBack := openflow.CT{Zone: o.MasqueradeZone, Table: o.FirstTable + trackTable, Actions: openflow.Translate()}.Action()
		unused := networkOf(o.PodMasqueradeNetworks, family)
		for _, to := range []netip.Prefix{single(nodeAddr), single(addressOf(o.HairpinAddresses, family)), unused} {
			if to.IsValid() {
				m := ip
				m.Destination = to
				o.add(s, entryTable, o.Priority+1, m, translateBack)
			}
		}
		o.add(s, entryTable, o.Priority, ip, o.resubmit(trackTable))
		o.add(s, trackTable, low, ip, openflow.CT{Zone: o.Zone, Table: o.FirstTable + stateTable, Actions: openflow.Translate()}.Action())

		// The destination of a packet may be translated although its connection is new, because
		// there was no answer yet.
		m = ip
		m.State = state(openflow.StateTracked|openflow.StateDNAT, openflow.StateReply)
		o.add(s, stateTable, high, m, save, o.resubmit(sentTable))
		m.State = state(openflow.StateTracked|openflow.StateNew, openflow.StateReply)
		o.add(s, stateTable, middle, m, save, o.resubmit(sourceTable))
		m.State = state(openflow.StateTracked|openflow.StateReply, 0)
		o.add(s, stateTable, middle, m, out)
		o.add(s, stateTable, low, ip, out)

		o.addSources(s, family, n)
		for _, a := range n.nodePortAddrs {
			if api.FamilyOf(a) == family {
				m := ip
				m.Destination = single(a)
				o.add(s, nodeTable, middle, m, openflow.SetRegister(flagsRegister, openflow.Bits{Value: toNode, Mask: toNode}), o.resubmit(frontendTable))
			}
		}
		o.add(s, nodeTable, low, ip, o.resubmit(frontendTable))
		leave := openflow.Join(restore, out)
		if !o.Chained {
			// Otherwise a translated connection could get the addresses and ports of this
			// connection.
			leave = openflow.CT{Zone: o.Zone, Table: o.FirstTable + sentTable, Commit: true, Actions: openflow.AvoidClash()}.Action()
		}
		o.add(s, frontendTable, low, ip, leave)

		for kind := uint32(1); kind < fromAny; kind <<= 1 {
			m := ip
			m.Registers = flags(kind | kind<<selectShift)
			o.add(s, masqueradeTable, low, m, openflow.SetRegister(flagsRegister, openflow.Bits{Value: masquerade, Mask: masquerade}))
		}
		if nodeAddr.IsValid() {
			m := ip
			m.Mark = openflow.Bits{Value: 1, Mask: 1}
			o.add(s, sentTable, middle, m, o.translateSource(single(nodeAddr)))
			for _, cidr := range o.PodCIDRs {
				if unused.IsValid() && api.FamilyOf(cidr.Addr()) == family {
					m.Destination = cidr
					o.add(s, sentTable, middle+1, m, o.translateSource(unused))
				}
			}
			o.addNodeConnections(s, family, nodeAddr)
		}
		if a := addressOf(o.HairpinAddresses, family); a.IsValid() {
			for _, to := range n.machineAddrs {
				if api.FamilyOf(to) == family {
					m := ip
					m.InPort, m.Destination = o.LocalPort, single(to)
					o.add(s, sentTable, highest, m, o.translateSource(single(a)))
				}
			}
		}
		o.add(s, sentTable, low, ip, restore, out)
	}
	return s
}

// addNodeConnections adds the flows for the node's own connections from a masquerade
// address, without translation of the source. These connections are committed in the
// masquerade zone, so that masqueraded connections get other ports.
func (o *options) addNodeConnections(s flowSet, family api.Family, a netip.Addr) {
	to, from := openflow.Match{EtherType: etherType(family)}, openflow.Match{EtherType: etherType(family)}
	to.Destination, from.Source = single(a), single(a)
	commit := openflow.CT{Zone: o.MasqueradeZone, Table: o.OutTable, Commit: true}
	o.add(s, sentTable, low+1, to, restore, commit.Action())
	commit.Actions = openflow.AvoidClash()
	o.add(s, sentTable, low+2, from, restore, commit.Action())
	// Further packets of these connections are translated like the first packet.
	o.add(s, stateTable, low+1, from, save, o.resubmit(sentTable))
}

// state matches packets whose connection-tracking state has all bits of "set" and no bit
// of "clear".
func state(set, clear uint64) openflow.Bits { return openflow.Bits{Value: set, Mask: set | clear} }

// addSources adds the flows of sourceTable.
func (o *options) addSources(s flowSet, family api.Family, n *node) {
	ip := openflow.Match{EtherType: etherType(family)}
	add := func(priority uint16, m openflow.Match, value uint32) {
		o.add(s, sourceTable, priority, m, openflow.SetRegister(flagsRegister, openflow.Bits{Value: uint64(value), Mask: 1<<32 - 1}), o.resubmit(nodeTable))
	}
	for _, a := range n.machineAddrs {
		if api.FamilyOf(a) == family {
			m := ip
			m.InPort, m.Source = o.LocalPort, single(a)
			add(highest, m, fromNode|fromHere)
		}
	}
	known := false
	for _, cidrs := range []struct {
		priority uint16
		cidrs    []netip.Prefix
		value    uint32
	}{{high, o.PodCIDRs, fromPod | fromHere}, {middle, o.ClusterCIDRs, fromCluster}} {
		for _, cidr := range cidrs.cidrs {
			if api.FamilyOf(cidr.Addr()) == family {
				m := ip
				m.Source = cidr
				add(cidrs.priority, m, cidrs.value)
				known = true
			}
		}
	}
	if known {
		add(low, ip, fromOutside)
	} else {
		add(low, ip, fromCluster) // it is not known which sources are outside the pod network
	}
}

// maxSources limits the addresses of a network that masqueraded connections get. Each
// address has a range of ports for each endpoint.
const maxSources = 256

// translateSource replaces the source of a packet by an address of a network, and passes
// the packet on.
func (o *options) translateSource(network netip.Prefix) openflow.Actions {
	first := network.Masked().Addr()
	last := first
	for range maxSources - 1 {
		if !network.Contains(last.Next()) {
			break
		}
		last = last.Next()
	}
	return openflow.Join(restore, openflow.CT{
		Zone: o.MasqueradeZone, Table: o.OutTable, Commit: true,
		Actions: openflow.TranslateSource(first, last, firstMasqueradePort, lastMasqueradePort),
	}.Action())
}
