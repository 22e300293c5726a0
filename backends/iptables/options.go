// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"time"

	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// Options are a backend's settings. With the zero value, the backend has the defaults of
// kube-proxy, and can run beside kube-proxy.
type Options struct {
	// Instance distinguishes the backends of one node. The names of all chains and sets
	// begin with "KPNG-<Instance>-". The value of Instance has at most 6 letters and digits,
	// because the kernel limits the length of names. Default: empty, for names that begin
	// with "KPNG-".
	Instance string

	// Flavour selects the programs of iptables. Default: the flavour that other programs
	// of the node use, see [Flavour].
	Flavour Flavour

	// WithoutIPSet makes the backend use rules in place of sets, even if the program ipset
	// is installed.
	WithoutIPSet bool

	// LockWait is how long a change waits for the lock that all iptables programs of flavour
	// legacy share. It is rounded down to full seconds. Default: 5 s.
	LockWait time.Duration

	// MasqueradeMark is a bit of the packet mark. The backend sets it in packets whose
	// connections are to be masqueraded, and clears it in the hook postrouting. It must be
	// exactly one bit. It must not be 0x4000, which kube-proxy uses, or a bit that affects
	// routing. Instances may share it. Default: 0x2000.
	MasqueradeMark uint32

	// MasqueradeAll masquerades all connections to cluster IPs.
	MasqueradeAll bool
	// MasqueradeOutsiders masquerades connections to cluster IPs from outside the pod
	// network. It requires at least one of ClusterCIDRs, NodePodCIDRs and PodInterfaces,
	// which define the pod network. If these options define no pods of an IP family, nothing
	// is masqueraded in that family.
	MasqueradeOutsiders bool

	// ClusterCIDRs contain the addresses of all pods of the cluster. The backend treats
	// these pods as pods of this node. Therefore their traffic to external frontends of
	// services with externalTrafficPolicy Local may reach endpoints on all nodes.
	ClusterCIDRs []netip.Prefix
	// NodePodCIDRs adds the current pod CIDRs of the Node object to ClusterCIDRs. These pod
	// CIDRs contain the addresses of this node's pods.
	NodePodCIDRs bool
	// PodInterfaces are the interfaces of this node's pods, such as "cni0". A name that ends
	// in "*" is a prefix of names, such as "veth*". Traffic from these interfaces counts as
	// traffic of this node's pods. If ClusterCIDRs, NodePodCIDRs and PodInterfaces define no
	// pods, only the node's own traffic to external frontends with policy Local may reach
	// endpoints on all nodes.
	PodInterfaces []string

	// NodeAddresses is the source of the addresses on which node ports are open. The backend
	// ignores loopback addresses. Default: the primary addresses of the node, see package
	// nodeaddr.
	NodeAddresses nodeaddr.Source

	// AcceptUnknownPorts makes the backend ignore packets to unknown ports of cluster IPs,
	// so that they follow the routing table. Default: the backend rejects these packets.
	AcceptUnknownPorts bool

	// AcceptInvalid makes the backend accept forwarded packets that connection tracking
	// cannot assign to a connection. Set it if replies to clients may take another path than
	// their requests. Default: drop these packets, as kube-proxy does in mode iptables.
	// Otherwise such a packet of an endpoint may reach a client with the address of the
	// endpoint in place of that of the service. The client then resets the connection.
	AcceptInvalid bool

	// Conntrack is a sink that deletes the connection-tracking entries of removed endpoints.
	// It receives each change after the kernel has the new rules. The backend starts and
	// stops this sink. If a Sync of this sink fails, a new pass delivers everything again.
	// Default: a reconciler of package conntrack.
	Conntrack sink.Sink

	// Observer has the functions that receive events for metrics. Default: none.
	Observer Observer

	// NetNS is the file descriptor of the network namespace to program. It must stay open.
	// Default 0: the namespace in which the process started.
	NetNS int
}

// Flavour is a variant of the iptables programs. Both variants have the same syntax, but
// their rules are in different parts of the kernel. All programs of a node should use the
// same flavour, because it is not obvious in which order the kernel evaluates rules of
// different flavours.
type Flavour uint8

// The flavours.
const (
	// DetectFlavour selects the flavour in which kubelet made its chain KUBE-IPTABLES-HINT
	// or KUBE-KUBELET-CANARY. If neither flavour has such a chain, it selects the flavour
	// with more rules. If both flavours have the same number of rules, it selects the
	// flavour of the program iptables. The image of kube-proxy detects the flavour in the
	// same way.
	DetectFlavour Flavour = iota
	// NFT are the programs that write to nf_tables, such as iptables-nft-restore.
	NFT
	// Legacy are the programs that write to ip_tables, such as iptables-legacy-restore.
	Legacy
)

var flavourNames = [...]string{DetectFlavour: "detect", NFT: "nft", Legacy: "legacy"}

// String returns "detect", "nft" or "legacy".
func (f Flavour) String() string { return flavourNames[f] }

// ParseFlavour returns the flavour with the name "detect", "nft" or "legacy".
func ParseFlavour(s string) (Flavour, error) {
	for f, name := range flavourNames {
		if s == name {
			return Flavour(f), nil
		}
	}
	return 0, fmt.Errorf("flavour %q is not detect, nft or legacy", s)
}

// Observer has functions that a Backend calls. A field may be nil. Calls do not overlap,
// and the functions must not call the Backend.
type Observer struct {
	// Restored is called after each run of iptables-restore. The argument lines is the
	// number of input lines, and err is the error of the run or nil.
	Restored func(lines int, err error)
	// Holds is called after each Sync with the number of the backend's chains.
	Holds func(chains int)
	// Drifted is called when a Verify finds a change by another program.
	Drifted func()
}

var instanceName = regexp.MustCompile(`^[A-Za-z0-9]{0,6}$`)

// complete checks o and fills in the defaults.
func (o *Options) complete() error {
	o.MasqueradeMark = cmp.Or(o.MasqueradeMark, kernelnode.DefaultMark)
	o.LockWait = cmp.Or(o.LockWait, 5*time.Second)
	o.Observer.complete()

	var errs []error
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 6 letters and digits", o.Instance))
	}
	if o.Flavour > Legacy {
		errs = append(errs, fmt.Errorf("flavour %d is unknown", o.Flavour))
	}
	if o.LockWait < time.Second {
		errs = append(errs, fmt.Errorf("lock wait %s is less than a second", o.LockWait))
	}
	errs = append(errs, kernelnode.CheckMasquerading(o.MasqueradeMark, o.PodInterfaces, o.MasqueradeOutsiders, len(o.PodInterfaces)+len(o.ClusterCIDRs) > 0 || o.NodePodCIDRs))
	for _, cidr := range o.ClusterCIDRs {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a cluster CIDR is not valid"))
		}
	}
	return errors.Join(errs...)
}

// complete replaces nil functions.
func (o *Observer) complete() {
	if o.Restored == nil {
		o.Restored = func(int, error) {}
	}
	if o.Holds == nil {
		o.Holds = func(int) {}
	}
	if o.Drifted == nil {
		o.Drifted = func() {}
	}
}

// prefix is the beginning of the names of all chains and sets of the instance.
func (o *Options) prefix() string {
	if o.Instance == "" {
		return "KPNG-"
	}
	return "KPNG-" + o.Instance + "-"
}
