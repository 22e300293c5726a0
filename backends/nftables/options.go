// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"regexp"
	"slices"

	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// Options are a backend's settings. The zero value runs beside kube-proxy, with the
// defaults of kube-proxy.
type Options struct {
	// Instance distinguishes the backends of one node. The backend programs only the table
	// "kpng-<Instance>" of family inet. After an update from a version with another layout,
	// the name is "kpng2-<Instance>". An instance has at most 64 letters, digits, "-", "_"
	// and ".". Default: empty, for the table "kpng" or "kpng2".
	Instance string

	// DNATPriority is the priority of the chains at hooks prerouting and output, which
	// select endpoints. SNATPriority is the priority of the chain at postrouting, which
	// masquerades. Of two chains with the same priority, the older one sees a packet first.
	// Neither may be 0. Default: -100 (dstnat) and 100 (srcnat).
	DNATPriority, SNATPriority int32

	// MasqueradeMark is a bit of the packet mark. It marks a packet whose connection is to
	// be masqueraded, from the selection of the endpoint to the chain at postrouting, which
	// clears it. It must be exactly one bit. It must not be 0x4000, which kube-proxy uses,
	// or a bit that affects routing. Instances may share it. Default: 0x2000.
	MasqueradeMark uint32

	// MasqueradeAll masquerades all connections to cluster IPs.
	MasqueradeAll bool
	// MasqueradeOutsiders masquerades connections to cluster IPs from outside the pod
	// network, which ClusterCIDRs, NodePodCIDRs and PodInterfaces define. It needs at least
	// one of them. In a family that none of them defines, nothing is masqueraded.
	MasqueradeOutsiders bool

	// ClusterCIDRs contain the addresses of all pods of the cluster. The backend treats them
	// as pods of this node. So their traffic to external frontends of services with
	// externalTrafficPolicy Local may reach endpoints on all nodes.
	ClusterCIDRs []netip.Prefix
	// NodePodCIDRs adds the current pod CIDRs of the Node object to ClusterCIDRs. They
	// contain the addresses of this node's pods.
	NodePodCIDRs bool
	// PodInterfaces are the interfaces of this node's pods, such as "cni0". A name that ends
	// in "*" is a prefix of names, such as "veth*". Traffic that arrives there counts as
	// traffic of this node's pods. Without CIDRs and PodInterfaces, only the node's own
	// traffic to external frontends with policy Local may reach endpoints on all nodes.
	PodInterfaces []string

	// ServiceCIDRs are the ranges of cluster IPs. The backend drops new connections to their
	// addresses that no service has, whether the node forwards or starts the connections.
	// Default: none.
	ServiceCIDRs []netip.Prefix

	// NodeAddresses has the addresses of node ports. The backend ignores loopback addresses.
	// Default: the primary addresses of the node, see package nodeaddr.
	NodeAddresses nodeaddr.Source

	// AcceptUnknownPorts makes the backend ignore packets to unknown ports of cluster IPs,
	// so that they follow the routing table. Default: the backend rejects these packets.
	AcceptUnknownPorts bool

	// Conntrack is a sink that receives each change after the kernel has it. It deletes the
	// connection-tracking entries of removed endpoints. The backend starts and stops it. If
	// its Sync fails, a new pass delivers everything again. Default: a reconciler of package
	// conntrack.
	Conntrack sink.Sink

	// Sysctls selects what Start does with wrong kernel settings, see [Backend.Start].
	// Default: log them.
	Sysctls SysctlMode

	// Observer has the functions that receive events for metrics. Default: none.
	Observer Observer

	// NetNS is the file descriptor of the network namespace to program. It must stay open.
	// Default 0: the namespace in which the process started.
	NetNS int
}

// SysctlMode selects what to do with kernel settings that have wrong values.
type SysctlMode uint8

// The modes.
const (
	// ReportSysctls logs settings that have a wrong value.
	ReportSysctls SysctlMode = iota
	// SetSysctls corrects settings, and logs those that it cannot change.
	SetSysctls
	// IgnoreSysctls does not check settings.
	IgnoreSysctls
)

// Observer has functions that a Backend calls. A field may be nil. Calls do not overlap,
// and the functions must not call the Backend.
type Observer struct {
	// Transacted is called after each attempt at a transaction, with the error if the
	// kernel refused it.
	Transacted func(error)
	// Holds is called after each Sync with the number of elements in the maps and sets of
	// the table.
	Holds func(elements int)
	// Drifted is called when a change by another program is found, by a Verify or after the
	// kernel refused a transaction of a Sync. Mended is called when the table is correct
	// again. That is at the end of a pass in which no service failed, or of a Verify that
	// compared everything and found no difference. Drifted is not called again before
	// Mended.
	Drifted, Mended func()
}

const kubeProxyMark = 0x4000

var (
	instanceName  = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`)
	interfaceName = regexp.MustCompile(`^[A-Za-z0-9_.@:-]{1,15}$|^[A-Za-z0-9_.@:-]{1,14}\*$`)
)

// complete checks o and fills in the defaults.
func (o *Options) complete() error {
	o.DNATPriority = cmp.Or(o.DNATPriority, -100)
	o.SNATPriority = cmp.Or(o.SNATPriority, 100)
	o.MasqueradeMark = cmp.Or(o.MasqueradeMark, 0x2000)
	o.Observer.complete()

	var errs []error
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 64 letters, digits, \"_\", \".\" and \"-\"", o.Instance))
	}
	if bits.OnesCount32(o.MasqueradeMark) != 1 {
		errs = append(errs, fmt.Errorf("masquerade mark %#x is not a single bit", o.MasqueradeMark))
	}
	if o.MasqueradeMark == kubeProxyMark {
		errs = append(errs, fmt.Errorf("masquerade mark %#x is kube-proxy's", o.MasqueradeMark))
	}
	for _, name := range o.PodInterfaces {
		if !interfaceName.MatchString(name) {
			errs = append(errs, fmt.Errorf("%q is not an interface name", name))
		}
	}
	for _, cidr := range slices.Concat(o.ClusterCIDRs, o.ServiceCIDRs) {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a cluster CIDR or service CIDR is not valid"))
		}
	}
	if o.MasqueradeOutsiders && len(o.PodInterfaces) == 0 && len(o.ClusterCIDRs) == 0 && !o.NodePodCIDRs {
		errs = append(errs, errors.New("masquerading outsiders needs cluster CIDRs or pod interfaces"))
	}
	// Connection tracking has priority -200 at the hooks for incoming packets. The kernel
	// allows chains of type nat only after it.
	for _, priority := range []int32{o.DNATPriority, o.SNATPriority} {
		if priority <= -200 {
			errs = append(errs, fmt.Errorf("priority %d is not after connection tracking (-200)", priority))
		}
	}
	return errors.Join(errs...)
}

// complete replaces nil functions.
func (o *Observer) complete() {
	if o.Transacted == nil {
		o.Transacted = func(error) {}
	}
	if o.Holds == nil {
		o.Holds = func(int) {}
	}
	for _, f := range []*func(){&o.Drifted, &o.Mended} {
		if *f == nil {
			*f = func() {}
		}
	}
}

// tables returns the two possible names of the instance's table. A new table gets the
// second name if a table with another layout has the first name.
func (o *Options) tables() [2]string {
	if o.Instance == "" {
		return [...]string{"kpng", "kpng2"}
	}
	return [...]string{"kpng-" + o.Instance, "kpng2-" + o.Instance}
}
