// SPDX-License-Identifier: Apache-2.0

package program

import (
	"errors"
	"net/netip"
	"strconv"

	"github.com/kpng-project/kpng/backends/ovs"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// OVS returns the backend that programs services into a bridge of Open vSwitch.
func OVS() sink.Sink {
	f := &ovsFlags{}
	return withReports(&command.Backend{
		Name:  "ovs",
		Short: "Program services into a bridge of Open vSwitch whose program sends packets there",
		Long: "Programs services as flows and groups into tables of a bridge of Open vSwitch. The program that owns the bridge must send IP packets through these tables. " +
			"What is programmed stays when kpng ends: see kpng cleanup ovs. It needs access to the bridge's management socket, and OpenFlow 1.5.",
		Flags: f.register,
		Make:  f.parts,
	}, nil)
}

// ovsFlags has the values of the backend's flags.
type ovsFlags struct {
	options           ovs.Options
	number            uint8
	keepConnections   bool
	nodePorts         nodeaddr.Selection
	masqueradeOutside bool
	checks            healthChecks
}

func (f *ovsFlags) register(fs *pflag.FlagSet) {
	o := &f.options
	fs.StringVar(&o.Bridge, "bridge", "", "the `name` of the bridge (required)")
	fs.StringVar(&o.RunDir, "ovs-rundir", "/var/run/openvswitch", "the `directory` of the sockets of Open vSwitch")
	fs.Uint8Var(&f.number, "instance-number", 0, "the `number` of this instance among several on a bridge, 0 to 15: it is part of the cookies and group IDs")
	fs.Uint8Var(&o.FirstTable, "first-table", 100, "the first of ten `tables` for this instance, to which the bridge must send IP packets")
	fs.Uint8Var(&o.OutTable, "out-table", 0, "the `table` that gets the packets afterwards (default: the table after the ten tables)")
	fs.BoolVar(&o.Chained, "chained", false, "the table after the ten tables is the first table of another instance")
	fs.Uint16Var(&o.Priority, "flow-priority", 100, "the `priority` of the flows in the first table, at most 65533")
	fs.Uint16Var(&o.Zone, "ct-zone", 0, "the connection-tracking `zone` of all connections that pass the tables (default 27392)")
	fs.Uint16Var(&o.MasqueradeZone, "masquerade-ct-zone", 0, "the connection-tracking `zone` of masqueraded connections (default 27648)")
	fs.Uint32Var(&o.LocalPort, "local-port", 0, "the number of the OpenFlow `port` of the node itself (default: the local port of the bridge)")
	listFlag(fs, &o.MasqueradeAddresses, netip.ParseAddr, "masquerade-addresses", "the `addresses` of the node that masqueraded connections get, and that refuses connections to services without endpoints: one of each family")
	listFlag(fs, &o.HairpinAddresses, netip.ParseAddr, "hairpin-addresses", "unused `addresses` that connections of the node to itself get: one of each family")
	listFlag(fs, &o.PodMasqueradeNetworks, parseCIDR, "pod-masquerade-cidr", "unused `networks` from which masqueraded connections to pods of this node get their addresses: one of each family")
	listFlag(fs, &o.ClusterCIDRs, parseCIDR, "cluster-cidr", "the `CIDRs` of pods")
	listFlag(fs, &o.PodCIDRs, parseCIDR, "pod-cidr", "the `CIDRs` of this node's pods, whose traffic counts as starting on this node")
	fs.BoolVar(&o.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	fs.BoolVar(&f.masqueradeOutside, "masquerade-outside", true, "masquerade connections to cluster IPs from outside the pod network, if --cluster-cidr or --pod-cidr defines it")
	fs.Uint32Var(&o.MaxClients, "max-clients", 10_000, "remember the endpoints of at most this `number` of clients of each service with session affinity")
	fs.BoolVar(&f.keepConnections, "keep-udp-connections", false, "keep UDP connections to removed endpoints")
	statsFlags(fs, &o.Stats)
	nodePortsFlag(fs, &f.nodePorts)
	f.checks.register(fs)
}

func (f *ovsFlags) parts(run command.Run) (command.Parts, error) {
	opts := f.options
	if opts.Bridge == "" {
		return command.Parts{}, errors.New("name the bridge with --bridge")
	}
	opts.MasqueradeOutsiders = f.masqueradeOutside && len(opts.ClusterCIDRs)+len(opts.PodCIDRs) > 0
	opts.Instance = strconv.Itoa(int(f.number))
	if f.keepConnections { // by default, the backend deletes connections in its own zones
		opts.Conntrack = nodesinks.KeepConnections
	}
	dataplane, err := ovs.New(opts)
	if err != nil {
		return command.Parts{}, err
	}
	node, err := nodesinks.New(nodesinks.Options{NodePorts: f.nodePorts, Stats: opts.Stats, Healthy: run.Healthy, Metrics: run.Metrics})
	if err != nil {
		return command.Parts{}, err
	}
	completed, _ := node.Dataplane(dataplane)
	parts := f.checks.parts(node, completed)
	err = addLocalhost(&parts, node)
	return parts, err
}
