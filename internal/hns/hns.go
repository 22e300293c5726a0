// SPDX-License-Identifier: Apache-2.0

// Package hns is the part of the Host Networking Service (HNS) of Windows that
// backends/windows/kernelspace uses. On Windows, [Open] connects to the real service with
// hcsshim. Package hns/fakehns implements a service in memory for tests.
package hns

import (
	"errors"
	"net/netip"
)

// Open returns the HNS of this machine, even if HNS does not run. On other systems than
// Windows, it returns an error. Tests replace it with [fakehns.Use].
var Open = open

// HNS is the Host Networking Service. The backend makes one call at a time.
//
// All IDs are GUIDs. The IDs of endpoints and load balancers are in lower case. If the
// cause of a method's error is ErrNotFound, ErrExists, ErrNotRunning or ErrNotSupported,
// the error wraps this cause.
type HNS interface {
	// Features returns the features of this version of Windows.
	Features() (Features, error)
	// Network returns the network with this name, or ErrNotFound.
	Network(name string) (*Network, error)
	// Endpoints returns the endpoints of the network with this ID.
	Endpoints(network string) ([]Endpoint, error)
	// LoadBalancers returns all load balancers of this machine.
	LoadBalancers() ([]LoadBalancer, error)

	// CreateEndpoint creates an endpoint and returns its ID. The argument's ID is empty.
	CreateEndpoint(Endpoint) (id string, err error)
	// DeleteEndpoint returns ErrNotFound if there is no such endpoint.
	DeleteEndpoint(id string) error
	// CreateLoadBalancer creates a load balancer and returns HNS' description of it. The
	// argument's ID is empty. The description lacks the settings that HNS does not report.
	// If another load balancer already has one of the argument's frontends, the error is
	// ErrExists.
	CreateLoadBalancer(LoadBalancer) (LoadBalancer, error)
	// UpdateLoadBalancer replaces the settings of the load balancer with this ID.
	UpdateLoadBalancer(LoadBalancer) error
	// DeleteLoadBalancer returns ErrNotFound if there is no such load balancer.
	DeleteLoadBalancer(id string) error
}

// The errors of HNS that the backend handles.
var (
	// ErrNotFound means that the object, or an object that it refers to, does not exist.
	ErrNotFound = errors.New("not found")
	// ErrExists means that another object already has the requested address or frontend.
	ErrExists = errors.New("exists already")
	// ErrNotRunning means that HNS does not run, for example during a restart.
	ErrNotRunning = errors.New("HNS does not run")
	// ErrNotSupported means that this version of Windows does not support the call.
	ErrNotSupported = errors.New("not supported by this version of Windows")
)

// Features are the optional features of a version of HNS.
type Features struct {
	// DSR is direct server return: replies bypass the load balancer.
	DSR bool
	// DualStack is support for IPv6.
	DualStack bool
	// RemoteSubnet is support for remote subnets. Overlay networks require it.
	RemoteSubnet bool
	// SessionAffinity means that a load balancer can send all connections of a client to
	// the same endpoint.
	SessionAffinity bool
	// ModifyLoadBalancer allows changing a load balancer in place.
	ModifyLoadBalancer bool
}

// Network is the network of the pods.
type Network struct {
	ID   string
	Name string
	// Overlay is true if tunnels connect this node with pods on other nodes.
	Overlay bool
	// RemoteSubnets are the pod networks of other nodes. Only overlay networks have them.
	RemoteSubnets []RemoteSubnet
}

// RemoteSubnet is the pod network of another node.
type RemoteSubnet struct {
	Prefix netip.Prefix
	// Provider is the address of the other node, where the tunnel ends.
	Provider netip.Addr
}

// Endpoint is a destination of packets: a pod's network interface, or HNS' record of a
// remote address.
type Endpoint struct {
	ID      string
	Name    string
	Network string // the network's ID
	// Addrs are the endpoint's addresses. A pod has one address per family.
	Addrs []netip.Addr
	MAC   string
	// Remote is true if the endpoint is not on this machine.
	Remote bool
	// Provider is the address of the node of a remote endpoint. It is set only on overlay
	// networks.
	Provider netip.Addr
}

// LoadBalancer is a policy of HNS. It forwards packets from frontends to endpoints.
type LoadBalancer struct {
	ID string
	// Endpoints are the IDs of the endpoints behind the frontends.
	Endpoints []string
	// SourceVIP replaces the source address of a packet if the reply must return through
	// HNS. If it is the zero Addr, HNS chooses an address.
	SourceVIP netip.Addr
	// VIPs are the addresses of the frontends. If VIPs is empty, the frontends are node
	// ports: IPv6 node ports if the flag IPv6 is set, otherwise IPv4 node ports.
	VIPs  []netip.Addr
	Ports []PortMapping
	Flags LoadBalancerFlags
}

// PortMapping is a port of a load balancer.
type PortMapping struct {
	// Protocol is the IP protocol number.
	Protocol uint32
	// External is the frontend's port. Internal is the endpoints' port.
	External, Internal uint16
	Distribution       Distribution
	Flags              PortFlags
}

// The protocols that HNS balances, by IP protocol number.
const (
	ProtocolTCP uint32 = 6
	ProtocolUDP uint32 = 17
)

// LoadBalancerFlags are settings of a load balancer.
type LoadBalancerFlags uint32

// The settings of a load balancer.
const (
	// DSR enables direct server return.
	DSR LoadBalancerFlags = 1
	// IPv6 is set for IPv6 frontends.
	IPv6 LoadBalancerFlags = 2
)

// PortFlags are settings of a load balancer's port.
type PortFlags uint32

// The settings of a load balancer's port.
const (
	// LocalRoutedVIP lets this node itself connect to the frontend.
	LocalRoutedVIP PortFlags = 2
	// UseMux marks a port that gets packets from a load balancer in front of the node.
	UseMux PortFlags = 4
	// PreserveDIP delivers packets with their original destination address.
	PreserveDIP PortFlags = 8
	// VIPExternalIP marks a frontend that clients outside the cluster use.
	VIPExternalIP PortFlags = 16
)

// Distribution is how a load balancer selects an endpoint.
type Distribution uint32

// The values of Distribution that the backend uses.
const (
	// PerConnection selects an endpoint for each connection.
	PerConnection Distribution = 0
	// PerClient selects an endpoint by the client's address. This is session affinity. HNS
	// has no configurable timeout for it.
	PerClient Distribution = 2
)
