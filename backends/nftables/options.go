// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"regexp"
	"slices"

	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// Options are a backend's settings. The zero value runs beside kube-proxy and
// does what kube-proxy does by default.
type Options struct {
	// Instance names this backend among others on the node: it programs the table
	// "kpng-<Instance>" of family inet, and nothing else. The table is "kpng2-<Instance>" after
	// an update from a version with another layout. Letters, digits, "-", "_" and
	// ".", at most 64. Default: empty, and the table is "kpng", or "kpng2".
	Instance string

	// DNATPriority is the priority of the chains at hooks prerouting and output, which
	// choose endpoints; SNATPriority that of the chain at postrouting, which
	// masquerades. Of chains with the same priority that was made first sees a
	// packet first. Both may not be 0. Default: -100 (dstnat) and 100 (srcnat).
	DNATPriority, SNATPriority int32

	// MasqueradeMark is the bit of the packet mark that connections to be masqueraded
	// carry, from the hook where their endpoint is chosen to postrouting; it is
	// taken off again there. Exactly one bit, and not 0x4000, which is
	// kube-proxy's, nor that of a program that routes by mark. Instances may share it.
	// Default 0x2000.
	MasqueradeMark uint32

	// MasqueradeAll masquerades all connections to cluster IPs.
	MasqueradeAll bool
	// MasqueradeOutsiders masquerades connections to cluster IPs that come from
	// outside the pod network, as ClusterCIDRs and PodInterfaces tell it. It takes at
	// least one of them. A family of which neither tells anything is left alone.
	MasqueradeOutsiders bool

	// ClusterCIDRs are the pod addresses of the whole cluster. Sources in them count
	// as pods of this node: their traffic to external frontends of services
	// with externalTrafficPolicy Local is short-circuited.
	ClusterCIDRs []netip.Prefix
	// NodePodCIDRs adds the pod CIDRs of the Node object, as they are at any time, to
	// ClusterCIDRs. They are those of the pods of this node.
	NodePodCIDRs bool
	// PodInterfaces are the interfaces behind which this node's pods are, as in
	// "cni0"; one that ends in "*" stands for all that begin so, as in "veth*". What
	// comes in through them counts as traffic of this node's pods. With neither
	// CIDRs nor PodInterfaces, only the node's own traffic is short-circuited.
	PodInterfaces []string

	// ServiceCIDRs are the ranges of cluster IPs. New connections that this node forwards or
	// begins to an address in them that no service has are dropped. Default: none are.
	ServiceCIDRs []netip.Prefix

	// NodeAddresses has the addresses at which node ports are served. Loopback addresses
	// among them are passed over. Default: the primary addresses of the node (see package
	// nodeaddr).
	NodeAddresses nodeaddr.Source

	// AcceptUnknownPorts leaves packets to ports of a cluster IP that no service has
	// to the routing table. By default they are rejected.
	AcceptUnknownPorts bool

	// Conntrack is told all changes after they have been programmed, so that it may
	// end connections to endpoints that went. It is started and stopped with the
	// backend. If it fails, everything is delivered again in a new pass. Default: a
	// reconciler of package conntrack.
	Conntrack sink.Sink

	// Sysctls says what to do about kernel settings without which services do not
	// work, at Start: see [Backend.Start]. Default: report them.
	Sysctls SysctlMode

	// Observer is told what the backend does. Default: nobody is told.
	Observer Observer

	// NetNS is the file descriptor of the network namespace to program, which has to
	// stay open. Default 0: the one the process was started in.
	NetNS int
}

// SysctlMode says what to do about kernel settings.
type SysctlMode uint8

// The modes.
const (
	// ReportSysctls logs those that are not as they should be.
	ReportSysctls SysctlMode = iota
	// SetSysctls sets them, and logs those that cannot be set.
	SetSysctls
	// IgnoreSysctls does not look at them.
	IgnoreSysctls
)

const kubeProxyMark = 0x4000

var (
	instanceName  = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`)
	interfaceName = regexp.MustCompile(`^[A-Za-z0-9_.@:-]{1,15}$|^[A-Za-z0-9_.@:-]{1,14}\*$`)
)

// complete checks o and fills in the defaults.
func (o *Options) complete() error {
	o.DNATPriority = orDefault(o.DNATPriority, -100)
	o.SNATPriority = orDefault(o.SNATPriority, 100)
	o.MasqueradeMark = orDefault(o.MasqueradeMark, 0x2000)
	o.Observer.complete()

	var errs []error
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q is not made of at most 64 letters, digits and \"_.-\"", o.Instance))
	}
	if bits.OnesCount32(o.MasqueradeMark) != 1 {
		errs = append(errs, fmt.Errorf("masquerade mark %#x is not a single bit", o.MasqueradeMark))
	}
	if o.MasqueradeMark == kubeProxyMark {
		errs = append(errs, fmt.Errorf("masquerade mark %#x is kube-proxy's", o.MasqueradeMark))
	}
	for _, name := range o.PodInterfaces {
		if !interfaceName.MatchString(name) {
			errs = append(errs, fmt.Errorf("%q is no interface name", name))
		}
	}
	for _, cidr := range slices.Concat(o.ClusterCIDRs, o.ServiceCIDRs) {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a cluster CIDR or service CIDR is not valid"))
		}
	}
	if o.MasqueradeOutsiders && len(o.PodInterfaces) == 0 && len(o.ClusterCIDRs) == 0 && !o.NodePodCIDRs {
		errs = append(errs, errors.New("masquerading outsiders takes cluster CIDRs or pod interfaces"))
	}
	// nf_nat does its part of the work at priority -200, which is conntrack's, in hooks
	// where packets come in, and chains of type nat have to come after it.
	if o.DNATPriority <= -200 {
		errs = append(errs, fmt.Errorf("priority %d is not after connection tracking (-200)", o.DNATPriority))
	}
	if o.SNATPriority <= -200 {
		errs = append(errs, fmt.Errorf("priority %d is not after connection tracking (-200)", o.SNATPriority))
	}
	return errors.Join(errs...)
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// tables are the names that the instance's table may have. The second is used if a table with
// another layout has the first.
func (o *Options) tables() [2]string {
	if o.Instance == "" {
		return [...]string{"kpng", "kpng2"}
	}
	return [...]string{"kpng-" + o.Instance, "kpng2-" + o.Instance}
}
