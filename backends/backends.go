// SPDX-License-Identifier: Apache-2.0

// Package backends has the types that the packages of the backends share. [Options] is a
// part of their own Options, and an [Observer] receives events of their work. Their
// functions New return a [Dataplane].
package backends

import (
	"context"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Dataplane is a sink that programs the dataplane of a node.
//
// Start fails with an error that wraps [sink.ErrOwned] if another process programs the
// objects of the same instance. Stop leaves them in place, so that traffic flows while the
// program is replaced. Verify finds and repairs changes by other programs. Cleanup removes
// all objects of the instance, and nothing else. It does not need a started dataplane.
type Dataplane interface {
	sink.Sink
	sink.Starter
	sink.Stopper
	sink.Verifier
	sink.Cleaner
}

// Capable is an optional interface of a [Dataplane] that honours traffic parameters of
// services. A dataplane without this interface ignores all of these parameters.
type Capable interface {
	// Honours returns the traffic parameters that the dataplane honours.
	Honours() nodeview.Parameters
}

// Inspector is a [Dataplane] that can describe its entries for one frontend. [sink.As] finds
// an Inspector in a wrapped sink, too.
type Inspector interface {
	// Inspect describes, in several lines, the dataplane's entries for one frontend. If
	// view is not nil, Inspect compares these entries with the requirements of the view.
	// Then a line with a superfluous part begins with "+", and a line with a missing part
	// begins with "-".
	//
	// The arguments addr, protocol and port identify the frontend. For a node port, addr is
	// an address of the node. For an all-ports service, protocol and port are 0. Inspect may
	// be called at any time. If the dataplane was not started, Inspect describes the
	// entries of another process.
	Inspect(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, view *api.View) (string, error)
}

// Counter is an optional interface of a [Dataplane] that counts traffic. [sink.As] also
// searches wrapped sinks, and returns the outermost Counter. So a Counter that wraps
// another Counter must yield the numbers of both.
type Counter interface {
	// Stats calls yield for each endpoint of each service port of the dataplane, in any
	// order. It stops when yield returns false. It may call yield more than once for an
	// endpoint; the caller adds the numbers. It returns an error if [Options.Stats] is
	// not set, or if the dataplane cannot be read. Stats may be called at any time after
	// Start. It must not delay a Sync by more than a few milliseconds.
	Stats(ctx context.Context, yield func(Stats) bool) error
}

// Stats are the numbers of one service port at one endpoint. A number is -1 if the
// dataplane does not count it. Numbers begin at 0 when the dataplane adds the endpoint, and
// may begin again at 0 when the service changes or the program starts. At other times, only
// Active can decrease.
type Stats struct {
	Service types.NamespacedName
	// Port is the name of the service port. An all-ports service has no name and protocol 0.
	Port     string
	Protocol api.Protocol
	// Endpoint is the endpoint's address and port. The port is 0 for an all-ports service.
	Endpoint netip.AddrPort

	// Connections counts new connections; for UDP, flows of connection tracking or sockets.
	Connections int64
	// Active is the number of present connections.
	Active int64
	// FromClients and ToClients count bytes. Some dataplanes count headers, and others only
	// data.
	FromClients, ToClients int64
}

// Options are the settings that dataplanes share. The zero value has the defaults of
// kube-proxy, and can run beside kube-proxy. If a backend does not support an option, its
// function New returns an error if the option is set. The Options of a backend say which
// options it does not support.
type Options struct {
	// Instance distinguishes the dataplanes of one kind on one node. It is a part of the
	// names of all objects that the dataplane creates. The Options of a backend say how long
	// it may be, and which characters it may contain. Default: empty.
	Instance string

	// MasqueradeMark is exactly one bit of the packet mark. The dataplane sets this bit in
	// the first packet of each connection that it masquerades, and clears it at hook
	// postrouting. MasqueradeMark must be neither 0x4000, which kube-proxy uses, nor a bit
	// that affects routing. Several instances may use the same bit. Default: 0x2000.
	MasqueradeMark uint32
	// MasqueradeAll masquerades all connections to cluster IPs. Default: false.
	MasqueradeAll bool
	// MasqueradeOutsiders masquerades connections to cluster IPs from outside the pod
	// network. ClusterCIDRs, NodePodCIDRs and PodInterfaces define the pod network, and at
	// least one of them is required. If they define no pod network for an IP family, the
	// dataplane masquerades nothing in that family. Default: false.
	MasqueradeOutsiders bool

	// ClusterCIDRs contain the addresses of all pods of the cluster. The dataplane treats
	// these pods as pods of this node. So their traffic to external frontends of services
	// with externalTrafficPolicy Local can reach endpoints on all nodes. Default: none.
	ClusterCIDRs []netip.Prefix
	// NodePodCIDRs adds the present pod CIDRs of the Node object to ClusterCIDRs. These pod
	// CIDRs contain the addresses of this node's pods. Default: false.
	NodePodCIDRs bool
	// PodInterfaces are the interfaces of this node's pods, such as "cni0". A name that ends
	// in "*" stands for all names with this prefix, such as "veth*". If the options define
	// neither interfaces nor CIDRs of pods, the dataplane does not know which traffic comes
	// from pods. In that case, at external frontends with policy Local, only the node's own
	// traffic can reach endpoints on other nodes. Default: none.
	PodInterfaces []string

	// AcceptUnknownPorts makes the dataplane ignore packets to a cluster IP if its service
	// does not have the destination port. These packets then follow the routing table.
	// Default: false, which rejects them.
	AcceptUnknownPorts bool

	// NodeAddresses provides the addresses at which node ports are reachable. The dataplane
	// ignores loopback addresses; package node serves them by sockets. Default: the primary
	// addresses of the node, which the dataplane watches itself.
	NodeAddresses nodeaddr.Source

	// Conntrack is a sink that receives each change after the dataplane has applied it. Its
	// task is to delete the connection-tracking entries of removed endpoints. The dataplane
	// starts and stops this sink. If a Sync of Conntrack fails, a new pass delivers
	// everything again. Default: a sink that deletes these entries.
	Conntrack sink.Sink

	// Sysctls selects what Start does with kernel settings that have wrong values. All
	// backends check net.ipv4.ip_forward and net.ipv6.conf.all.forwarding. Both must be 1
	// if the node forwards traffic of pods or other hosts. Default: ReportSysctls.
	Sysctls SysctlMode

	// Stats makes the dataplane count traffic, if it is a [Counter]. Default: false, since
	// counters cost time for each connection.
	Stats bool

	// Observer receives events, for metrics. Default: none.
	Observer Observer

	// NetNS is a file descriptor of the network namespace to program. It must stay open.
	// Default: 0, for the network namespace in which the process started.
	NetNS int
}

// SysctlMode selects what a dataplane does with kernel settings that have wrong values.
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

// Observer receives the events of a dataplane. Calls do not overlap. The methods must not
// call the dataplane, and should return soon, because the dataplane waits for them.
type Observer interface {
	// Wrote is called after each attempt to write to the dataplane. The argument size is
	// the size of the write, in a unit that the Options of the backend define. The argument
	// err is the error of the attempt, or nil.
	Wrote(size int, err error)
	// Holds is called after each Sync, with the number of objects of one kind that the
	// dataplane has. The Options of a backend list its kinds.
	Holds(kind string, n int)
	// Drifted is called with true when the dataplane finds a change by another program, and
	// then with false when the dataplane is correct again.
	Drifted(now bool)
}
