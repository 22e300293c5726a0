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

// Service is a Kubernetes Service, reduced to what a proxy needs.
type Service struct {
	Namespace string `json:",omitempty"`
	Name      string `json:",omitempty"`
	// Type is Service.spec.type: ClusterIP, NodePort, LoadBalancer or ExternalName.
	Type ServiceType `json:",omitempty"`
	IPs  ServiceIPs

	// AllPorts makes this an all-ports service: everything sent to its addresses,
	// whatever the protocol and port, goes to an endpoint unchanged. It has no
	// counterpart in the Kubernetes API; a source sets it where its user says so.
	// JSON and the wire call it MapIP.
	AllPorts bool          `json:"MapIP,omitempty"`
	Ports    []PortMapping `json:",omitempty"`

	// ExternalTrafficToLocal is externalTrafficPolicy: Local.
	ExternalTrafficToLocal bool `json:",omitempty"`
	// InternalTrafficToLocal is internalTrafficPolicy: Local.
	InternalTrafficToLocal bool `json:",omitempty"`
	// HealthCheckNodePort is the port, 1 to 65535, on which every node answers
	// a load balancer's health checks. 0 means none.
	HealthCheckNodePort int32 `json:",omitempty"`

	// Labels and Annotations hold those that the source was told to keep.
	Labels      map[string]string `json:",omitempty"`
	Annotations map[string]string `json:",omitempty"`

	// SourceRanges say which clients may use which addresses. An address that
	// none of them names is open to all. JSON and the wire call them IPFilters.
	SourceRanges    []SourceRanges  `json:"IPFilters,omitempty"`
	SessionAffinity SessionAffinity `json:",omitzero"`

	// LoadBalancerClass is spec.loadBalancerClass: who makes the load balancer of a
	// service of type LoadBalancer. Empty means the cluster's default.
	LoadBalancerClass string `json:",omitempty"`

	// UID tells an object from one of the same name that was deleted before.
	UID types.UID `json:",omitempty"`
	// Created is metadata.creationTimestamp. Of two services that claim one
	// address and port by addresses of the same kind the older wins.
	Created time.Time `json:",omitzero"`
	// IPFamilies are the families the service is served in, the preferred one
	// first, as spec.ipFamilies says. Families returns what holds where this is
	// empty.
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

// ServiceIPs are the addresses at which a service is reached.
type ServiceIPs struct {
	ClusterIPs  IPSet
	ExternalIPs IPSet `json:",omitzero"`
	// Headless says that the service asked for no cluster IP (clusterIP: None).
	Headless bool `json:",omitempty"`
	// LoadBalancerIPs are the ingress addresses whose packets arrive with the
	// load balancer's address as destination (ipMode VIP or absent, KEP 1860).
	LoadBalancerIPs IPSet `json:",omitzero"`
	// ProxiedIPs are the ingress addresses with ipMode Proxy. The load balancer
	// delivers to nodes or pods itself, so there is no frontend for them.
	ProxiedIPs IPSet `json:",omitzero"`
}

// Protocol is a transport protocol, numbered as on the wire.
type Protocol int32

// The protocols. UnknownProtocol is what a port with a protocol that this
// version does not know carries; no frontend is made for it.
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

// PortMapping is one port of a service.
type PortMapping struct {
	// Name is unique within the service and empty only if the service has a
	// single port.
	Name     string   `json:",omitempty"`
	Protocol Protocol `json:",omitempty"`
	// Port is the port at the service's addresses, 1 to 65535.
	Port int32 `json:",omitempty"`
	// NodePort is the port at the nodes' addresses; 0 means none.
	NodePort int32 `json:",omitempty"`
	// TargetPort is the port at the endpoints if it is given as a number, else 0.
	TargetPort int32 `json:",omitempty"`
	// TargetPortName names the endpoints' port, whose number may differ from
	// endpoint to endpoint.
	TargetPortName string `json:",omitempty"`
	// AppProtocol is the application protocol, a hint that proxies may ignore.
	AppProtocol string `json:",omitempty"`
}

// SourceRanges limits the clients of some of a service's addresses.
type SourceRanges struct {
	// TargetIPs are the service's addresses that the ranges guard.
	TargetIPs IPSet `json:",omitzero"`
	// Prefixes are the sources that are admitted. If it has none of a family, no
	// source of that family is admitted. JSON and the wire call them SourceRanges.
	Prefixes []netip.Prefix `json:"SourceRanges,omitempty"`
}

// SessionAffinity says whether a client keeps its endpoint. At most one of the
// fields is set; none means no affinity.
type SessionAffinity struct {
	ClientIP *ClientIPAffinity `json:",omitempty"`
}

// ClientIPAffinity keeps the connections from one client address on one endpoint.
type ClientIPAffinity struct {
	// TimeoutSeconds, 1 to 86400, counts from the client's last new connection.
	TimeoutSeconds int32 `json:",omitempty"`
}

// Key returns the service's namespace and name.
func (s *Service) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// Families returns the families the service is served in: those of
// IPFamilies; where that is empty, those of the cluster IPs; for a headless
// service without either, those of the external IPs.
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

// FrontendIPs returns the addresses of a family that have frontends: cluster IPs,
// which a headless service has none of, load-balancer IPs, and external IPs.
func (s *Service) FrontendIPs(f Family) (ips [3][]netip.Addr) {
	if !s.IPs.Headless {
		ips[0] = s.IPs.ClusterIPs.Family(f)
	}
	ips[1], ips[2] = s.IPs.LoadBalancerIPs.Family(f), s.IPs.ExternalIPs.Family(f)
	return ips
}

func (s *IPSet) families() []Family {
	var f []Family
	if len(s.V4) > 0 {
		f = append(f, IPv4)
	}
	if len(s.V6) > 0 {
		f = append(f, IPv6)
	}
	return f
}

// Equal reports whether both services say the same, their identity and age included.
func (s *Service) Equal(o *Service) bool {
	if s == o {
		return true
	}
	return s != nil && o != nil &&
		s.Namespace == o.Namespace && s.Name == o.Name && s.Type == o.Type &&
		s.IPs.Equal(&o.IPs) &&
		s.AllPorts == o.AllPorts &&
		slices.Equal(s.Ports, o.Ports) &&
		s.ExternalTrafficToLocal == o.ExternalTrafficToLocal &&
		s.InternalTrafficToLocal == o.InternalTrafficToLocal &&
		maps.Equal(s.Labels, o.Labels) && maps.Equal(s.Annotations, o.Annotations) &&
		slices.EqualFunc(s.SourceRanges, o.SourceRanges, SourceRanges.equal) &&
		s.SessionAffinity.equal(o.SessionAffinity) &&
		s.LoadBalancerClass == o.LoadBalancerClass &&
		s.HealthCheckNodePort == o.HealthCheckNodePort &&
		s.UID == o.UID && s.Created.Equal(o.Created) &&
		slices.Equal(s.IPFamilies, o.IPFamilies)
}

// Equal reports whether both name the same addresses in the same order.
func (s *ServiceIPs) Equal(o *ServiceIPs) bool {
	return s.Headless == o.Headless && s.ClusterIPs.Equal(&o.ClusterIPs) && s.ExternalIPs.Equal(&o.ExternalIPs) &&
		s.LoadBalancerIPs.Equal(&o.LoadBalancerIPs) && s.ProxiedIPs.Equal(&o.ProxiedIPs)
}

func (r SourceRanges) equal(o SourceRanges) bool {
	return r.TargetIPs.Equal(&o.TargetIPs) && slices.Equal(r.Prefixes, o.Prefixes)
}

func (a SessionAffinity) equal(o SessionAffinity) bool {
	if a.ClientIP == nil || o.ClientIP == nil {
		return a.ClientIP == o.ClientIP
	}
	return *a.ClientIP == *o.ClientIP
}
