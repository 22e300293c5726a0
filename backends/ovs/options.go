// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/sink"
)

// Options are the settings of the dataplane. Bridge is required. The dataplane does not
// support MasqueradeMark, NodePodCIDRs, PodInterfaces, AcceptUnknownPorts and NetNS of
// [backends.Options].
//
// Instance distinguishes the dataplanes of one bridge. It is a decimal number from "0" to
// "15"; empty means "0". The cookies of the instance's flows are 0x6b706e00 plus this number
// in the upper 32 bits. The IDs of its groups are 0x60000000 plus Instance<<24 to 0x60ffffff
// plus Instance<<24. No other program may use these cookies and IDs.
//
// ClusterCIDRs define the pod network only for MasqueradeOutsiders: only the pods in PodCIDRs
// count as pods of this node. By default, the dataplane itself deletes the UDP connections to
// removed endpoints from the switch, and resets TCP connections where a service requests it.
// Then there is no sink Conntrack.
//
// The Observer's method Wrote is called after each bundle, with the number of its messages.
// Its method Holds gets the numbers of "flows" and "groups".
type Options struct {
	backends.Options

	// Bridge is the name of the bridge.
	Bridge string
	// RunDir is the directory of the bridge's management socket. Default:
	// /var/run/openvswitch.
	RunDir string

	// Chained declares that OutTable is the FirstTable of another instance. Only the last
	// instance commits the connections that no instance translates.
	Chained bool
	// FirstTable is the first of the instance's ten tables. The bridge's program sends IP
	// packets to this table. Default: 100.
	FirstTable uint8
	// OutTable is the table that gets the packets afterwards. It belongs to the bridge's
	// program. Default: FirstTable plus 10.
	OutTable uint8
	// Priority is the lowest of three priorities that the flows in FirstTable have. The
	// bridge's program may add flows to this table. Default: 100.
	Priority uint16
	// Zone is the connection-tracking zone of all connections that pass the tables.
	// MasqueradeZone is the zone of masqueraded connections, and of connections from and to
	// MasqueradeAddresses. Only the instances of a bridge may use these zones. An instance
	// also translates the packets of connections that other instances have accepted, so all
	// instances need the same zones, MasqueradeAddresses and HairpinAddresses. Default:
	// 27392 and 27648.
	Zone, MasqueradeZone uint16

	// LocalPort is the OpenFlow port of the node itself. Default: the bridge's local port.
	LocalPort uint32
	// MasqueradeAddresses are addresses of the node, at most one of each family. Packets to
	// them must pass FirstTable, and OutTable must send them to LocalPort. Masqueraded
	// connections get such an address as their source. Connections to services without
	// endpoints get it as their destination, so that the node refuses them. If a family has
	// no address, its connections are not masqueraded, and are dropped instead of refused.
	MasqueradeAddresses []netip.Addr
	// HairpinAddresses are addresses that no machine has, at most one of each family.
	// Connections of the node to itself through a service get such an address as their
	// source. The node must have a route for them through LocalPort. If a family has no
	// address, these connections fail.
	HairpinAddresses []netip.Addr

	// PodMasqueradeNetworks are networks with addresses that no machine has, at most one of
	// each family. Packets to them must pass FirstTable. Masqueraded connections to pods in
	// PodCIDRs get their source from the first 256 addresses, so that they do not run out of
	// ports. If a family has no network, they get the address in MasqueradeAddresses.
	PodMasqueradeNetworks []netip.Prefix

	// PodCIDRs contain the addresses of this node's pods. They belong to the pod network, too.
	// Default: none.
	PodCIDRs []netip.Prefix

	// MaxClients is the largest number of clients of a service with session affinity whose
	// endpoints the switch remembers. Connections of further clients are balanced without
	// affinity. A client takes about 3 KB of the switch's memory. Default: 10,000.
	MaxClients uint32
}

type public = Options

// options are the public options, what they mean, and what only tests replace.
type options struct {
	public
	number uint8 // the number of the instance
	// forgets reports that the dataplane deletes stale connections from the switch. Then the
	// sink Conntrack does nothing.
	forgets bool
	// verifyInterval is an option of package reconcile. Default: minPause.
	verifyInterval time.Duration
	// maxListed is the largest number of connections of a listing, or negative for no
	// listings. Default: the constant of this name.
	maxListed int
	// groupCount limits the groups of the instance, and maxGroups those of a service.
	// Default: the constants of these names.
	groupCount uint32
	maxGroups  int
}

const (
	localPort = 0xfffffffe
	// Masqueraded connections can get all ports except the ports of well-known services.
	firstMasqueradePort, lastMasqueradePort = 1024, 65535
	// refusingPort is a port of the node at which no program listens.
	refusingPort = 1
)

// complete checks o and fills in the defaults.
func (o *options) complete() error {
	o.RunDir = cmp.Or(o.RunDir, "/var/run/openvswitch")
	o.FirstTable = cmp.Or(o.FirstTable, 100)
	o.verifyInterval = cmp.Or(o.verifyInterval, minPause)
	o.maxListed = cmp.Or(o.maxListed, maxListed)
	o.groupCount = cmp.Or(o.groupCount, groupCount)
	o.maxGroups = cmp.Or(o.maxGroups, maxGroups)
	errs := []error{backendoptions.Complete(&o.Options, len(o.PodCIDRs) > 0,
		"Instance", "MasqueradeAll", "MasqueradeOutsiders", "ClusterCIDRs", "NodeAddresses", "Conntrack", "Sysctls", "Stats", "Observer")}
	if o.Bridge == "" || o.Bridge != filepath.Base(o.Bridge) {
		errs = append(errs, fmt.Errorf("%q is not the name of a bridge", o.Bridge))
	}
	if number, err := strconv.ParseUint(cmp.Or(o.Instance, "0"), 10, 8); err != nil || number > 15 {
		errs = append(errs, fmt.Errorf("instance %q is not a number from 0 to 15", o.Instance))
	} else {
		o.number = uint8(number)
	}
	const lastTable = 253 // the highest table that controllers may use
	if o.FirstTable > lastTable-tables+1 {
		errs = append(errs, fmt.Errorf("tables %d to %d do not exist: the last table is %d", o.FirstTable, int(o.FirstTable)+tables-1, lastTable))
	} else if o.OutTable = cmp.Or(o.OutTable, o.FirstTable+tables); o.OutTable >= o.FirstTable && o.OutTable < o.FirstTable+tables || o.OutTable > lastTable {
		errs = append(errs, fmt.Errorf("table %d cannot be the table after tables %d to %d", o.OutTable, o.FirstTable, o.FirstTable+tables-1))
	}
	o.Priority = cmp.Or(o.Priority, 100)
	if maxPriority := uint16(math.MaxUint16 - entryPriorities + 1); o.Priority > maxPriority {
		errs = append(errs, fmt.Errorf("priority %d is not 1 to %d", o.Priority, maxPriority))
	}
	o.MaxClients = cmp.Or(o.MaxClients, 10_000)
	if o.forgets = o.Conntrack == nil; o.forgets {
		o.Conntrack = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	}
	o.Zone = cmp.Or(o.Zone, 0x6b00)
	o.MasqueradeZone = cmp.Or(o.MasqueradeZone, 0x6c00)
	if o.Zone == o.MasqueradeZone {
		errs = append(errs, fmt.Errorf("zone %d cannot be the zone of masqueraded connections too", o.Zone))
	}
	o.LocalPort = cmp.Or(o.LocalPort, localPort)
	for name, addrs := range map[string][]netip.Addr{"masquerade": o.MasqueradeAddresses, "hairpin": o.HairpinAddresses} {
		for i, a := range addrs {
			if !a.IsValid() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() {
				errs = append(errs, fmt.Errorf("%q is not a %s address", a, name))
			} else if slices.ContainsFunc(addrs[:i], func(b netip.Addr) bool { return api.FamilyOf(a) == api.FamilyOf(b) }) {
				errs = append(errs, fmt.Errorf("there are two %s addresses of %s", name, api.FamilyOf(a)))
			}
		}
	}
	for _, a := range o.HairpinAddresses {
		if slices.Contains(o.MasqueradeAddresses, a) {
			errs = append(errs, fmt.Errorf("masquerade address %s cannot be a hairpin address too: no machine has such an address", a))
		}
	}
	for i, network := range o.PodMasqueradeNetworks {
		if !network.IsValid() {
			errs = append(errs, errors.New("a network for masqueraded connections to pods is not valid"))
		} else if networkOf(o.PodMasqueradeNetworks[:i], api.FamilyOf(network.Addr())).IsValid() {
			errs = append(errs, fmt.Errorf("there are two networks of %s for masqueraded connections to pods", api.FamilyOf(network.Addr())))
		}
	}
	for _, cidr := range o.PodCIDRs {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a CIDR of pods is not valid"))
		}
	}
	return errors.Join(errs...)
}

// addressOf returns the address of a family, or the zero Addr if there is none.
func addressOf(addrs []netip.Addr, f api.Family) netip.Addr {
	for _, a := range addrs {
		if api.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// networkOf returns the network of a family, or the zero Prefix if there is none.
func networkOf(networks []netip.Prefix, f api.Family) netip.Prefix {
	for _, n := range networks {
		if api.FamilyOf(n.Addr()) == f {
			return n
		}
	}
	return netip.Prefix{}
}

// socket returns the path of the bridge's management socket.
func (o *options) socket() string { return filepath.Join(o.RunDir, o.Bridge+".mgmt") }
