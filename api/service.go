// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Service is a Kubernetes Service, reduced to the needs of a proxy.
type Service struct {
	Namespace string `json:",omitempty"`
	Name      string `json:",omitempty"`
	// Type is Service.spec.type: ClusterIP, NodePort, LoadBalancer or ExternalName.
	Type ServiceType `json:",omitempty"`
	IPs  ServiceIPs

	// AllPorts makes this an all-ports service. All traffic to the service's addresses goes
	// to an endpoint, with unchanged protocol and port. The Kubernetes API has no such
	// field; a source sets it at the user's request. JSON and the wire call the field MapIP.
	AllPorts bool          `json:"MapIP,omitempty"`
	Ports    []PortMapping `json:",omitempty"`

	// ExternalTrafficToLocal reports whether externalTrafficPolicy is Local.
	ExternalTrafficToLocal bool `json:",omitempty"`
	// InternalTrafficToLocal reports whether internalTrafficPolicy is Local.
	InternalTrafficToLocal bool `json:",omitempty"`
	// ResetConnections reports whether the established TCP connections to an endpoint are
	// reset when the endpoint is removed or no longer ready. Otherwise they continue.
	ResetConnections bool `json:",omitempty"`
	// HealthCheckNodePort is the port, 1 to 65535, on which every node answers a load
	// balancer's health checks. 0 means none.
	HealthCheckNodePort int32 `json:",omitempty"`

	// Labels and Annotations have only the names that the source is configured to keep.
	Labels      map[string]string `json:",omitempty"`
	Annotations map[string]string `json:",omitempty"`

	// SourceRanges limit which clients may use an address of the service. An address
	// without an entry is open to all clients. JSON and the wire call the field
	// IPFilters.
	SourceRanges []SourceRanges `json:"IPFilters,omitempty"`
	// AffinitySeconds, 1 to 86400, is how long a client address keeps its endpoint after the
	// client's last new connection. 0 means no session affinity.
	AffinitySeconds int32 `json:",omitempty"`
	// Algorithm chooses the endpoint of a new connection.
	Algorithm Algorithm `json:",omitempty"`

	// LoadBalancerClass is spec.loadBalancerClass. It names the implementation of the load
	// balancer for a service of type LoadBalancer. Empty means the cluster's default.
	LoadBalancerClass string `json:",omitempty"`

	// UID distinguishes a service from a deleted service with the same name.
	UID types.UID `json:",omitempty"`
	// Created is metadata.creationTimestamp. If two services claim the same port of an
	// address, and both claim it as the same kind of address (for example, external IP),
	// the older service wins.
	Created time.Time `json:",omitzero"`
	// IPFamilies is spec.ipFamilies: the service's IP families, the preferred family first.
	// If it is empty, the method Families uses the families of the service's IPs.
	IPFamilies []Family `json:",omitempty"`
}

// ServiceType is the type of a service, as in Service.spec.type.
type ServiceType string

// The service types.
const (
	ClusterIP    ServiceType = "ClusterIP"
	NodePort     ServiceType = "NodePort"
	LoadBalancer ServiceType = "LoadBalancer"
	ExternalName ServiceType = "ExternalName"
)

// ServiceIPs are the addresses of a service.
type ServiceIPs struct {
	ClusterIPs  IPSet
	ExternalIPs IPSet `json:",omitzero"`
	// Headless reports whether clusterIP is None. A headless service has no cluster IP.
	Headless bool `json:",omitempty"`
	// LoadBalancerIPs are the ingress addresses whose ipMode is VIP or unset (KEP 1860). The
	// load balancer does not change the destination of packets to these addresses.
	LoadBalancerIPs IPSet `json:",omitzero"`
	// ProxiedIPs are the ingress addresses whose ipMode is Proxy. They have no frontend,
	// because the load balancer replaces the destination of the packets that it forwards.
	ProxiedIPs IPSet `json:",omitzero"`
}

// Algorithm is a way to choose the endpoint of a new connection. Session affinity takes
// precedence over all algorithms. All algorithms respect the weights of endpoints. The
// constants have the same numbers as in kpng's messages.
type Algorithm int32

// The algorithms. HashClient and HashConnection are stable hashing (see package
// maglev): HashClient hashes the client's address, and HashConnection hashes the client's
// address and port. All nodes with the same list of endpoints choose the same endpoint.
// When an endpoint is added or removed, few clients of the remaining endpoints get
// another endpoint.
const (
	Random         Algorithm = 0
	HashClient     Algorithm = 1
	HashConnection Algorithm = 2
)

var algorithmNames = [...]string{Random: "Random", HashClient: "HashClient", HashConnection: "HashConnection"}

// String returns the name of the constant, or "Algorithm(n)".
func (a Algorithm) String() string {
	if a < 0 || int(a) >= len(algorithmNames) {
		return fmt.Sprintf("Algorithm(%d)", int32(a))
	}
	return algorithmNames[a]
}

// MarshalText returns the same name as String.
func (a Algorithm) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText accepts the names of the constants.
func (a *Algorithm) UnmarshalText(text []byte) error {
	i := slices.Index(algorithmNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("unknown algorithm %q", text)
	}
	*a = Algorithm(i)
	return nil
}

// Protocol is a transport protocol. The constants have the same numbers as in kpng's
// messages. The method Number returns IANA's numbers.
type Protocol int32

// The protocols. UnknownProtocol stands for protocols that this version of kpng does not
// know. A port with UnknownProtocol has no frontend.
const (
	UnknownProtocol Protocol = 0
	TCP             Protocol = 1
	UDP             Protocol = 2
	SCTP            Protocol = 3
)

// String returns "TCP", "UDP", "SCTP", or "Protocol(n)".
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	default:
		return fmt.Sprintf("Protocol(%d)", int32(p))
	}
}

// Number returns IANA's number of the protocol, as in IP headers. It returns 0 if p is not
// TCP, UDP or SCTP.
func (p Protocol) Number() uint8 {
	switch p {
	case TCP:
		return 6
	case UDP:
		return 17
	case SCTP:
		return 132
	default:
		return 0
	}
}

// PortMapping is one port of a service.
type PortMapping struct {
	// Name is unique within the service. It is empty only if the service has a single port.
	Name     string   `json:",omitempty"`
	Protocol Protocol `json:",omitempty"`
	// Port is the port on the service's addresses, 1 to 65535.
	Port int32 `json:",omitempty"`
	// NodePort is the port on the nodes' addresses, or 0 if there is none.
	NodePort int32 `json:",omitempty"`
	// TargetPort is the port number on the endpoints, or 0 if TargetPortName is set.
	TargetPort int32 `json:",omitempty"`
	// TargetPortName is the name of the endpoints' port. The number of that port may differ
	// between endpoints.
	TargetPortName string `json:",omitempty"`
	// AppProtocol is the application protocol, a hint that proxies may ignore.
	AppProtocol string `json:",omitempty"`
}

// SourceRanges limits which clients may use some of a service's addresses.
type SourceRanges struct {
	// TargetIPs are the service's addresses that the ranges protect.
	TargetIPs IPSet `json:",omitzero"`
	// NodePorts reports whether the ranges protect the service's node ports, too.
	NodePorts bool `json:",omitempty"`
	// Prefixes are the admitted sources. If a family has no prefix, no source of that
	// family is admitted. JSON and the wire call the field SourceRanges.
	Prefixes []netip.Prefix `json:"SourceRanges,omitempty"`
}

// Key returns the service's namespace and name.
func (s *Service) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// Families returns the service's IP families: IPFamilies or, if IPFamilies is empty, the
// families of the cluster IPs. For a headless service without IPFamilies, it returns the
// families of the external IPs.
func (s *Service) Families() []Family {
	switch {
	case len(s.IPFamilies) > 0:
		return s.IPFamilies
	case !s.IPs.ClusterIPs.IsZero():
		return s.IPs.ClusterIPs.families()
	case s.IPs.Headless:
		return s.IPs.ExternalIPs.families()
	default:
		return nil
	}
}

func (s IPSet) families() (list []Family) {
	for a := range s.All() {
		if f := FamilyOf(a); !slices.Contains(list, f) {
			list = append(list, f)
		}
	}
	return list
}

// Equal reports whether both services are equal, including UID and Created.
func (s *Service) Equal(o *Service) bool {
	if s == o {
		return true
	}
	return s != nil && o != nil &&
		s.Namespace == o.Namespace && s.Name == o.Name && s.Type == o.Type &&
		s.IPs == o.IPs &&
		s.AllPorts == o.AllPorts &&
		slices.Equal(s.Ports, o.Ports) &&
		s.ExternalTrafficToLocal == o.ExternalTrafficToLocal &&
		s.InternalTrafficToLocal == o.InternalTrafficToLocal &&
		maps.Equal(s.Labels, o.Labels) && maps.Equal(s.Annotations, o.Annotations) &&
		slices.EqualFunc(s.SourceRanges, o.SourceRanges, SourceRanges.equal) &&
		s.AffinitySeconds == o.AffinitySeconds &&
		s.Algorithm == o.Algorithm && s.ResetConnections == o.ResetConnections &&
		s.LoadBalancerClass == o.LoadBalancerClass &&
		s.HealthCheckNodePort == o.HealthCheckNodePort &&
		s.UID == o.UID && s.Created.Equal(o.Created) &&
		slices.Equal(s.IPFamilies, o.IPFamilies)
}

func (r SourceRanges) equal(o SourceRanges) bool {
	return r.NodePorts == o.NodePorts && r.TargetIPs == o.TargetIPs && slices.Equal(r.Prefixes, o.Prefixes)
}
