// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// Options are the settings of a backend. With the zero value, a backend works like
// kube-proxy with default settings, and can run beside kube-proxy.
type Options struct {
	// Instance distinguishes the backends of one node. The backend programs only one table
	// of family inet, called "kpng-<Instance>" or "kpng2-<Instance>". An update to a version
	// with another table layout replaces the table by a table with the other name. Instance
	// has at most 64 letters, digits, "-", "_" and ".". It must be neither "ipvs" nor begin
	// with "ipvs-", because such names belong to tables of the backend ipvs. Default: empty,
	// for the table "kpng" or "kpng2".
	Instance string

	// DNATPriority is the priority of the chains at hooks prerouting and output, which
	// select endpoints. SNATPriority is the priority of the chain at hook postrouting, which
	// masquerades. They determine the order among the chains of type nat of all programs. If
	// one of these chains translates a packet, the kernel skips the later ones. Of two chains
	// with the same priority, the newer one sees a packet first. Zero selects the default.
	// Default: -100 (dstnat) and 100 (srcnat).
	DNATPriority, SNATPriority int32

	// MasqueradeMark is exactly one bit of the packet mark. The backend sets it in the first
	// packet of a connection to be masqueraded, and clears it at hook postrouting. It must
	// be neither 0x4000, which kube-proxy uses, nor a bit that affects routing. Several
	// instances may use the same bit. Default: 0x2000.
	MasqueradeMark uint32

	// MasqueradeAll masquerades all connections to cluster IPs.
	MasqueradeAll bool
	// MasqueradeOutsiders masquerades connections to cluster IPs from outside the pod
	// network. ClusterCIDRs, NodePodCIDRs and PodInterfaces define the pod network, and at
	// least one of them is required. If they define no pod network for an IP family, the
	// backend masquerades nothing in that family.
	MasqueradeOutsiders bool

	// ClusterCIDRs contain the addresses of all pods of the cluster. The backend treats
	// these pods as pods of this node. So their traffic to external frontends of services
	// with externalTrafficPolicy Local can reach endpoints on all nodes.
	ClusterCIDRs []netip.Prefix
	// NodePodCIDRs adds the pod CIDRs of the Node object to ClusterCIDRs. These pod CIDRs
	// contain the addresses of this node's pods.
	NodePodCIDRs bool
	// PodInterfaces are the interfaces of this node's pods, such as "cni0". The name "veth*"
	// stands for all names with the prefix "veth". If the options define neither interfaces
	// nor CIDRs of pods, the backend does not know which traffic comes from pods. In that
	// case, at external frontends with policy Local, only the node's own traffic can reach
	// endpoints on other nodes.
	PodInterfaces []string

	// ServiceCIDRs are the ranges of cluster IPs. The backend drops new connections to an
	// address in these ranges if no service has the address. This applies to connections
	// from this node and to forwarded connections. Default: none.
	ServiceCIDRs []netip.Prefix

	// DropInvalid makes the backend drop forwarded packets that connection tracking cannot
	// assign to a connection. Otherwise such a packet of an endpoint may reach a client with
	// the address of the endpoint in place of that of the service. The client then resets
	// the connection. Do not set it if replies to clients may take another path than their
	// requests. Default: accept them, as kube-proxy does in mode nftables.
	DropInvalid bool

	// NodeAddresses provides the addresses at which node ports are reachable. The backend
	// ignores loopback addresses. Default: the primary addresses of the node.
	NodeAddresses nodeaddr.Source

	// AcceptUnknownPorts makes the backend ignore packets to a cluster IP if its service
	// does not have the destination port. These packets then follow the routing table.
	// Default: the backend rejects them.
	AcceptUnknownPorts bool

	// Conntrack is a sink that receives each change after the kernel has applied it. Its
	// task is to delete the connection-tracking entries of removed endpoints. The backend
	// starts and stops this sink. If a Sync of Conntrack fails, a new pass delivers
	// everything again. Default: a reconciler of package conntrack.
	Conntrack sink.Sink

	// Sysctls selects what Start does with wrong kernel settings, see [Backend.Start].
	// Default: log them.
	Sysctls SysctlMode

	// Observer has functions that receive events for metrics. Default: none.
	Observer Observer

	// NetNS is a file descriptor of the network namespace to program. It must stay open.
	// Default 0: the network namespace in which the process started.
	NetNS int
}

// SysctlMode selects what Start does with kernel settings that have wrong values.
type SysctlMode uint8

// Modes for kernel settings.
const (
	// ReportSysctls logs settings with wrong values.
	ReportSysctls SysctlMode = iota
	// SetSysctls corrects wrong values, and logs settings that it cannot change.
	SetSysctls
	// IgnoreSysctls does not check the settings.
	IgnoreSysctls
)

// Observer has functions that a Backend calls. A field may be nil. Calls do not overlap,
// and the functions must not call the Backend.
type Observer struct {
	// Transacted is called after each attempt at a transaction. Its argument is the error,
	// or nil.
	Transacted func(error)
	// Holds is called after each Sync. Its argument is the number of elements in the maps
	// and sets of the table.
	Holds func(elements int)
	// Drifted is called when the backend finds a change by another program. Such a change is
	// found by a Verify, or by a Sync whose transaction the kernel refused. Repaired is called
	// when the table is correct again: after a pass in which no service failed, or after a
	// Verify that compared everything and found no difference. Between two calls of Drifted
	// there is a call of Repaired.
	Drifted, Repaired func()
}

var instanceName = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`)

// complete checks o and sets the defaults.
func (o *Options) complete() error {
	o.DNATPriority = cmp.Or(o.DNATPriority, -100)
	o.SNATPriority = cmp.Or(o.SNATPriority, 100)
	o.MasqueradeMark = cmp.Or(o.MasqueradeMark, kernelnode.DefaultMark)
	o.Observer.complete()

	var errs []error
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 64 letters, digits, \"_\", \".\" and \"-\"", o.Instance))
	}
	if o.Instance == "ipvs" || strings.HasPrefix(o.Instance, "ipvs-") {
		errs = append(errs, fmt.Errorf("instance %q has a table name of the backend ipvs", o.Instance))
	}
	errs = append(errs, kernelnode.CheckMasquerading(o.MasqueradeMark, o.PodInterfaces, o.MasqueradeOutsiders, len(o.PodInterfaces)+len(o.ClusterCIDRs) > 0 || o.NodePodCIDRs))
	for _, cidr := range slices.Concat(o.ClusterCIDRs, o.ServiceCIDRs) {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a cluster CIDR or service CIDR is not valid"))
		}
	}
	// Connection tracking has priority -200 at the hooks prerouting and output. The kernel
	// requires that chains of type nat come after connection tracking.
	for _, priority := range []int32{o.DNATPriority, o.SNATPriority} {
		if priority <= -200 {
			errs = append(errs, fmt.Errorf("priority %d is not after connection tracking (-200)", priority))
		}
		if priority == latePriority {
			errs = append(errs, fmt.Errorf("priority %d is that of the chains that refuse connections", priority))
		}
	}
	return errors.Join(errs...)
}

func (o *Observer) complete() {
	if o.Transacted == nil {
		o.Transacted = func(error) {}
	}
	if o.Holds == nil {
		o.Holds = func(int) {}
	}
	for _, f := range []*func(){&o.Drifted, &o.Repaired} {
		if *f == nil {
			*f = func() {}
		}
	}
}

// object names the objects that only one process may program.
func (o *Options) object() string { return "nftables table " + o.tables()[0] }

// tables returns the two possible names of the instance's table. There are two, because a
// new table can exist beside an old table with another layout.
func (o *Options) tables() [2]string {
	if o.Instance == "" {
		return [...]string{"kpng", "kpng2"}
	}
	return [...]string{"kpng-" + o.Instance, "kpng2-" + o.Instance}
}
