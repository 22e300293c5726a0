// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

// Feature is something that a proxy may not support. What is not among these
// every proxy does.
type Feature string

// The features.
const (
	IPv4 Feature = "IPv4"
	IPv6 Feature = "IPv6"
	UDP  Feature = "UDP"
	SCTP Feature = "SCTP"

	// NodePorts are node ports at all.
	NodePorts Feature = "node ports"
	// NodePortCIDRs is keeping node ports to the addresses that Site.NodePortCIDRs
	// names.
	NodePortCIDRs Feature = "node-port addresses"
	// ClusterIPsFromOutside is serving cluster IPs for clients outside the cluster
	// that have a route to them.
	ClusterIPsFromOutside Feature = "cluster IPs from outside"
	// SourceRanges is Service.spec.loadBalancerSourceRanges.
	SourceRanges Feature = "source ranges"
	// FamilyOnlyRanges is letting nobody of a family in if all source ranges are of
	// the other one, which kube-proxy does not do.
	FamilyOnlyRanges Feature = "source ranges of the other family only"
	// ShortCircuitPods is telling this node's pods from others, so that their
	// traffic to external addresses ignores externalTrafficPolicy Local.
	ShortCircuitPods Feature = "short circuit for pods"
	// Reject is refusing connections to services without endpoints, rather than
	// letting them time out.
	Reject Feature = "reject"
	// RangesBeforeReject is dropping what source ranges keep out even where the
	// service has no endpoints, and those who get in are refused.
	RangesBeforeReject Feature = "source ranges before reject"
	// EndpointRefusals is handing on that an endpoint refuses, as happens by itself
	// where packets are forwarded.
	EndpointRefusals Feature = "refusals of endpoints"
	// RejectUnknownPorts is refusing connections to a cluster IP's ports that are no
	// ports of the service.
	RejectUnknownPorts Feature = "reject unknown ports"
	// SourceAddress is keeping the client's address where semantics.md says so.
	SourceAddress Feature = "source address"
	// Masquerade is masquerading traffic to cluster IPs as Site.Masquerade asks.
	Masquerade Feature = "masquerade option"
	// Affinity is sessionAffinity ClientIP.
	Affinity Feature = "session affinity"
	// AffinityAcrossFrontends is one affinity for a service port, whatever frontend
	// the client uses.
	AffinityAcrossFrontends Feature = "affinity across frontends"
	// FlowCleanup is moving UDP flows away from endpoints that have gone.
	FlowCleanup Feature = "UDP flow clean-up"
	// EstablishedStay is leaving established TCP connections and UDP flows alone when
	// their endpoint drains, or what else changes.
	EstablishedStay Feature = "established connections stay"
	// AllPorts is all-ports services (api.Service.AllPorts).
	AllPorts Feature = "all-ports services"
	// Claims is giving an address and port that two services claim to the older one.
	Claims Feature = "contested addresses"
	// HealthChecks is health-check node ports.
	HealthChecks Feature = "health-check node ports"
	// Restart is keeping traffic flowing while no process of the proxy runs.
	Restart Feature = "restart"
	// Instances is running twice on a node, by Site.Instance and
	// Site.ServiceProxyName.
	Instances Feature = "two instances"
	// Cleanup is removing everything when asked to.
	Cleanup Feature = "clean-up"
)
