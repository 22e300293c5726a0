// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

// Feature is a feature that a proxy may lack. All other behavior is required from every
// proxy.
type Feature string

// The features.
const (
	IPv4 Feature = "IPv4"
	IPv6 Feature = "IPv6"
	UDP  Feature = "UDP"
	SCTP Feature = "SCTP"

	// NodePorts are node ports.
	NodePorts Feature = "node ports"
	// NodePortCIDRs limits node ports to the addresses in Site.NodePortCIDRs.
	NodePortCIDRs Feature = "node-port addresses"
	// ClusterIPsFromOutside serves cluster IPs to clients outside the cluster that have a
	// route to them.
	ClusterIPsFromOutside Feature = "cluster IPs from outside"
	// SourceRanges is Service.spec.loadBalancerSourceRanges.
	SourceRanges Feature = "source ranges"
	// FamilyOnlyRanges admits no source of a family if all source ranges are of the other
	// family. kube-proxy lacks it.
	FamilyOnlyRanges Feature = "source ranges of the other family only"
	// ShortCircuitPods detects traffic from this node's pods, so that it ignores
	// externalTrafficPolicy Local at external addresses.
	ShortCircuitPods Feature = "short circuit for pods"
	// Reject refuses connections to services without endpoints instead of letting them time
	// out.
	Reject Feature = "reject"
	// RangesBeforeReject drops traffic outside the source ranges even if the service has no
	// endpoints and admitted clients are refused.
	RangesBeforeReject Feature = "source ranges before reject"
	// EndpointRefusals passes on that an endpoint refuses a connection. Proxies that forward
	// packets do so automatically.
	EndpointRefusals Feature = "refusals of endpoints"
	// RejectUnknownPorts refuses connections to ports of a cluster IP that the service does
	// not have.
	RejectUnknownPorts Feature = "reject unknown ports"
	// SourceAddress keeps the client's address where docs/semantics.md requires it.
	SourceAddress Feature = "source address"
	// Masquerade masquerades traffic to cluster IPs according to Site.Masquerade.
	Masquerade Feature = "masquerade option"
	// Affinity is sessionAffinity ClientIP.
	Affinity Feature = "session affinity"
	// AffinityAcrossFrontends keeps one affinity per service port, whichever frontend the
	// client uses.
	AffinityAcrossFrontends Feature = "affinity across frontends"
	// FlowCleanup moves UDP flows away from removed endpoints.
	FlowCleanup Feature = "UDP flow clean-up"
	// EstablishedStay keeps established TCP connections and UDP flows when their endpoint
	// drains or other objects change.
	EstablishedStay Feature = "established connections stay"
	// AllPorts is all-ports services (api.Service.AllPorts).
	AllPorts Feature = "all-ports services"
	// Claims gives an address and port that two services claim to the older one.
	Claims Feature = "contested addresses"
	// HealthChecks is health-check node ports.
	HealthChecks Feature = "health-check node ports"
	// Restart keeps traffic flowing while no process of the proxy runs.
	Restart Feature = "restart"
	// Instances allows two instances on a node, with different Site.Instance and
	// Site.ServiceProxyName.
	Instances Feature = "two instances"
	// Cleanup removes everything on request.
	Cleanup Feature = "clean-up"
)
