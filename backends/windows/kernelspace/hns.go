// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"errors"
	"net/netip"
)

// HNS is what the backend needs of the Host Networking Service. Package winhns has the
// real one, fakehns one to test with. One goroutine uses it at a time.
//
// Identifiers are GUIDs; those of endpoints and load balancers are in lower case. Errors
// wrap those of this package where they mean the same.
type HNS interface {
	// Features returns what this version of Windows can do.
	Features() (Features, error)
	// Network returns the network of a name, ErrNotFound if there is none.
	Network(name string) (*Network, error)
	// Endpoints returns the endpoints of a network, by its ID.
	Endpoints(network string) ([]Endpoint, error)
	// LoadBalancers returns all of this machine's.
	LoadBalancers() ([]LoadBalancer, error)

	// CreateEndpoint creates an endpoint, whose ID is empty, and returns its ID.
	CreateEndpoint(Endpoint) (id string, err error)
	// DeleteEndpoint returns ErrNotFound if there is no such endpoint.
	DeleteEndpoint(id string) error
	// CreateLoadBalancer creates a load balancer, whose ID is empty, and returns it as
	// HNS describes it: with its ID, and perhaps without settings that HNS keeps to
	// itself. It returns ErrExists if another one has one of its frontends.
	CreateLoadBalancer(LoadBalancer) (LoadBalancer, error)
	// UpdateLoadBalancer replaces the settings of the load balancer of this ID.
	UpdateLoadBalancer(LoadBalancer) error
	// DeleteLoadBalancer returns ErrNotFound if there is no such load balancer.
	DeleteLoadBalancer(id string) error
}

// The errors of an HNS that the backend does something about.
var (
	// ErrNotFound: the object, or one that it refers to, does not exist.
	ErrNotFound = errors.New("not found")
	// ErrExists: another object has the address or the frontend.
	ErrExists = errors.New("exists already")
	// ErrNotRunning: the service does not run, as when it is being restarted.
	ErrNotRunning = errors.New("HNS does not run")
	// ErrNotSupported: this version of Windows does not do that.
	ErrNotSupported = errors.New("not supported by this version of Windows")
)

// Features says what HNS can do, which depends on its version.
type Features struct {
	// DSR is direct server return: replies do not pass the load balancer.
	DSR bool
	// DualStack is IPv6.
	DualStack bool
	// RemoteSubnet is what overlay networks need.
	RemoteSubnet bool
	// SessionAffinity lets a client keep its endpoint.
	SessionAffinity bool
	// ModifyLoadBalancer lets a load balancer be changed in place.
	ModifyLoadBalancer bool
}

// Network is the network that pods are on.
type Network struct {
	ID   string
	Name string
	// Overlay says that pods of other nodes are reached through a tunnel.
	Overlay bool
	// RemoteSubnets are the pod networks of other nodes, on an overlay network.
	RemoteSubnets []RemoteSubnet
}

// RemoteSubnet is the pod network of another node.
type RemoteSubnet struct {
	Prefix netip.Prefix
	// Provider is the address of that node, where the tunnel ends.
	Provider netip.Addr
}

// Provider returns the node through which an address is reached: that of the
// remote subnet that it is in, or itself if it is such a node. It is the zero
// Addr for an address that no tunnel leads to.
func (n *Network) Provider(a netip.Addr) netip.Addr {
	for _, s := range n.RemoteSubnets {
		if s.Prefix.Contains(a) || s.Provider == a {
			return s.Provider
		}
	}
	return netip.Addr{}
}

// Endpoint is something that packets can be sent to: a pod's network card, or
// the idea that HNS has of an address elsewhere.
type Endpoint struct {
	ID      string
	Name    string
	Network string // its ID
	// Addrs are the endpoint's addresses, of a pod one a family.
	Addrs []netip.Addr
	MAC   string
	// Remote says that the endpoint is not on this machine.
	Remote bool
	// Provider is the node that a remote endpoint of an overlay network is on.
	Provider netip.Addr
}

// LoadBalancer is a policy of HNS: what comes for its frontends goes to one of
// its endpoints.
type LoadBalancer struct {
	ID string
	// Endpoints are the IDs of endpoints.
	Endpoints []string
	// SourceVIP is what becomes the packets' source address where one is needed.
	// The zero Addr leaves that to HNS.
	SourceVIP netip.Addr
	// VIPs are the addresses that it takes packets for; none means the node's
	// own, of IPv6 if Flags say so.
	VIPs  []netip.Addr
	Ports []PortMapping
	Flags LoadBalancerFlags
}

// PortMapping is a port of a load balancer.
type PortMapping struct {
	// Protocol is numbered as on the wire of IP.
	Protocol uint32
	// External is the port at the frontend, Internal that at the endpoints.
	External, Internal uint16
	Distribution       Distribution
	Flags              PortFlags
}

// The protocols that HNS balances, numbered as on the wire of IP.
const (
	ProtocolTCP uint32 = 6
	ProtocolUDP uint32 = 17
)

// LoadBalancerFlags are settings of a load balancer.
type LoadBalancerFlags uint32

// The settings of a load balancer.
const (
	// DSR is direct server return.
	DSR LoadBalancerFlags = 1
	// IPv6 is the family of the frontends.
	IPv6 LoadBalancerFlags = 2
)

// PortFlags are settings of a load balancer's port.
type PortFlags uint32

// The settings of a load balancer's port.
const (
	// LocalRoutedVIP lets the node itself use the frontend.
	LocalRoutedVIP PortFlags = 2
	// UseMux is for packets that a load balancer in front of the node delivers.
	UseMux PortFlags = 4
	// PreserveDIP leaves packets their destination address.
	PreserveDIP PortFlags = 8
	// VIPExternalIP marks a frontend that is reached from outside the cluster.
	VIPExternalIP PortFlags = 16
)

// Distribution says how a load balancer chooses an endpoint.
type Distribution uint32

// The distributions that are used.
const (
	// PerConnection chooses anew for each connection.
	PerConnection Distribution = 0
	// PerClient chooses by the client's address: session affinity. HNS knows no
	// time-out for it.
	PerClient Distribution = 2
)
