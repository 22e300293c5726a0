// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
)

// The tables of an instance, relative to Options.FirstTable. docs/ovs.md describes the way
// of a packet through them.
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
	// memberTable has the endpoints of lists with session affinity.
	memberTable
	// sentTable masquerades connections whose destination was translated.
	sentTable
	tables
)

// Bits of register 0. A connection comes from one of four kinds of sources. A frontend
// selects the kinds of sources whose connections to masquerade: it sets the same bits,
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
	done          = 1 << 11 // an instance has translated the packet, so others must not
)

// Other registers. The 64-bit register n consists of the 32-bit registers 2n and 2n+1.
const (
	flagsRegister    = 0
	listRegister     = 1 // the group of a list of endpoints
	endpointRegister = 1 // of 64 bits: the endpoint that a client had before
	affinityRegister = 4 // the service port, for session affinity
)

func flags(value uint32) (r [8]openflow.Bits) {
	r[0] = openflow.Bits{Value: uint64(value) << 32, Mask: uint64(value) << 32}
	return r
}

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

// cookie returns the cookies of the instance. The flows that the backend writes have the
// cookie with only the bits of the instance. Learned flows have learnedCookie.
func (o *Options) cookie() uint64 { return (0x6b706e00 + uint64(o.Instance)) << 32 }

const learnedCookie = 1

// written are the cookies of flows that the backend writes, and all are those of all flows
// of the instance.
func (o *Options) writtenCookies() openflow.Cookies {
	return openflow.Cookies{Value: o.cookie(), Mask: 1<<64 - 1}
}

func (o *Options) allCookies() openflow.Cookies {
	return openflow.Cookies{Value: o.cookie(), Mask: 0xffffffff << 32}
}

// firstGroup returns the lowest ID of the instance's groups.
func (o *Options) firstGroup() uint32 { return 0x60000000 + uint32(o.Instance)<<24 }

const groupCount = 1 << 24

func (o *Options) ownsGroup(id uint32) bool {
	return id >= o.firstGroup() && id-o.firstGroup() < groupCount
}

func (o *Options) resubmit(table uint8) openflow.Actions {
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

func (o *Options) add(s flowSet, table uint8, priority uint16, m openflow.Match, actions ...openflow.Actions) {
	s[openflow.FlowKey{Table: o.FirstTable + table, Priority: priority, Match: m.Encode()}] = openflow.Join(actions...)
}

// flows returns the flows that do not depend on services.
func (o *Options) flows(n *node) flowSet {
	s := flowSet{}
	for _, family := range families {
		ip := openflow.Match{EtherType: etherType(family)}
		out := openflow.Resubmit(o.OutTable)
		m := ip
		m.Registers = flags(done)
		o.add(s, entryTable, o.Priority+2, m, out)
		restore := openflow.CT{Zone: o.MasqueradeZone, Table: o.FirstTable + trackTable, Actions: openflow.Translate()}.Action()
		for _, a := range []netip.Addr{addressOf(o.MasqueradeAddresses, family), addressOf(o.HairpinAddresses, family)} {
			if a.IsValid() {
				m := ip
				m.Destination = single(a)
				o.add(s, entryTable, o.Priority+1, m, restore)
			}
		}
		o.add(s, entryTable, o.Priority, ip, o.resubmit(trackTable))
		o.add(s, trackTable, low, ip, openflow.CT{Zone: o.Zone, Table: o.FirstTable + stateTable, Actions: openflow.Translate()}.Action())

		// The destination of a packet may be translated although its connection is new, because
		// there was no answer yet.
		m = ip
		m.State = openflow.Bits{Value: openflow.StateTracked | openflow.StateDNAT, Mask: openflow.StateTracked | openflow.StateDNAT | openflow.StateReply}
		o.add(s, stateTable, high, m, o.resubmit(sentTable))
		m.State = openflow.Bits{Value: openflow.StateTracked | openflow.StateNew, Mask: openflow.StateTracked | openflow.StateNew | openflow.StateReply}
		o.add(s, stateTable, middle, m, o.resubmit(sourceTable))
		m.State = openflow.Bits{Value: openflow.StateTracked | openflow.StateReply, Mask: openflow.StateTracked | openflow.StateReply}
		o.add(s, stateTable, middle, m, setDone, out)
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
		o.add(s, frontendTable, low, ip, out)

		for kind := uint32(1); kind < fromAny; kind <<= 1 {
			m := ip
			m.Registers = flags(kind | kind<<selectShift)
			o.add(s, masqueradeTable, low, m, openflow.SetRegister(flagsRegister, openflow.Bits{Value: masquerade, Mask: masquerade}))
		}
		if a := addressOf(o.MasqueradeAddresses, family); a.IsValid() {
			m := ip
			m.Mark = openflow.Bits{Value: 1, Mask: 1}
			o.add(s, sentTable, middle, m, o.translateSource(a))
		}
		if a := addressOf(o.HairpinAddresses, family); a.IsValid() {
			for _, to := range n.machineAddrs {
				if api.FamilyOf(to) == family {
					m := ip
					m.InPort, m.Destination = o.LocalPort, single(to)
					o.add(s, sentTable, highest, m, o.translateSource(a))
				}
			}
		}
		o.add(s, sentTable, low, ip, setDone, out)
	}
	return s
}

// addSources adds the flows of sourceTable.
func (o *Options) addSources(s flowSet, family api.Family, n *node) {
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
		add(low, ip, fromCluster) // it is not known who is outside
	}
}

// setDone marks a packet that needs no other instance.
var setDone = openflow.SetRegister(flagsRegister, openflow.Bits{Value: done, Mask: done})

// translateSource replaces the source of a packet, and passes the packet on.
func (o *Options) translateSource(a netip.Addr) openflow.Actions {
	return openflow.Join(setDone, openflow.CT{
		Zone: o.MasqueradeZone, Table: o.OutTable, Commit: true,
		Actions: openflow.TranslateSource(a, firstMasqueradePort, lastMasqueradePort),
	}.Action())
}
