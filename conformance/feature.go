// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

// Feature is a feature that a proxy may lack. The kit requires all other behavior of
// every proxy.
type Feature string

// The features.
const (
	IPv4 Feature = "IPv4"
	IPv6 Feature = "IPv6"
	UDP  Feature = "UDP"
	SCTP Feature = "SCTP"

	// NodePorts means that node ports are served.
	NodePorts Feature = "node ports"
	// NodePortCIDRs means that node ports exist only at the addresses in Site.NodePortCIDRs.
	NodePortCIDRs Feature = "node-port addresses"
	// LocalhostNodePorts means that node ports are served at loopback addresses if
	// Site.NodePortCIDRs contains them.
	LocalhostNodePorts Feature = "node ports on localhost"
	// ClusterIPsFromOutside means that clients outside the cluster can connect to cluster
	// IPs, if they have a route.
	ClusterIPsFromOutside Feature = "cluster IPs from outside"
	// SourceRanges means that Service.spec.loadBalancerSourceRanges is applied.
	SourceRanges Feature = "source ranges"
	// FamilyOnlyRanges means that, if all source ranges of a service are of one family, the
	// proxy admits no sources of the other family. kube-proxy lacks this feature.
	FamilyOnlyRanges Feature = "source ranges of the other family only"
	// RangeOptions means that source ranges may be denied, and may apply to all addresses of a
	// service (docs/reference/semantics.md, "Traffic parameters").
	RangeOptions Feature = "options of source ranges"
	// NodePortRanges means that source ranges that apply to all frontends apply to node ports,
	// too.
	NodePortRanges Feature = "source ranges of node ports"
	// ShortCircuitPods means that the proxy does not apply externalTrafficPolicy Local to
	// connections from this node's pods to external addresses.
	ShortCircuitPods Feature = "short circuit for pods"
	// Reject means that the proxy refuses connections to services without endpoints. Without
	// this feature, these connections time out.
	Reject Feature = "reject"
	// RangesBeforeReject means that, if a service has source ranges and no endpoints, the
	// proxy refuses connections of admitted clients and drops those of other clients.
	RangesBeforeReject Feature = "source ranges before reject"
	// EndpointRefusals means that the client sees a refusal if the endpoint refuses the
	// connection. Proxies that forward packets do this automatically.
	EndpointRefusals Feature = "refusals of endpoints"
	// RejectUnknownPorts means that the proxy refuses connections to a cluster IP if the
	// service does not have the port.
	RejectUnknownPorts Feature = "reject unknown ports"
	// SourceAddress means that endpoints see the client's address where docs/reference/semantics.md
	// requires it.
	SourceAddress Feature = "source address"
	// Masquerade means that the proxy masquerades traffic to cluster IPs according to
	// Site.Masquerade.
	Masquerade Feature = "masquerade option"
	// Affinity means that sessionAffinity ClientIP is applied.
	Affinity Feature = "session affinity"
	// AffinityAcrossFrontends means that a client reaches the same endpoint through all
	// frontends of a service port.
	AffinityAcrossFrontends Feature = "affinity across frontends"
	// Weights means that endpoints have weights.
	Weights Feature = "weights"
	// StableHashing means that the hash of a client's address, or of its address and port,
	// can choose the endpoint.
	StableHashing Feature = "stable hashing"
	// Resets means that TCP connections to lost endpoints are reset if the service requests
	// it.
	Resets Feature = "resets"
	// counters means that the sink is a backends.Counter. It is not exported, because Run
	// declares it and RunSubject cannot read counters.
	counters Feature = "counters"
	// FlowCleanup means that the proxy moves UDP flows away from removed endpoints.
	FlowCleanup Feature = "UDP flow clean-up"
	// EstablishedStay means that established TCP connections and UDP flows keep their
	// endpoint while this endpoint drains, and when other objects change.
	EstablishedStay Feature = "established connections stay"
	// AllPorts means that all-ports services are served (api.Service.AllPorts).
	AllPorts Feature = "all-ports services"
	// Claims means that, if two services have the same address and port, the older service
	// gets the traffic.
	Claims Feature = "contested addresses"
	// HealthChecks means that the proxy answers on health-check node ports.
	HealthChecks Feature = "health-check node ports"
	// Restart means that services work while no process of the proxy runs.
	Restart Feature = "restart"
	// Instances means that two instances can run on a node, with different Site.Instance and
	// Site.ServiceProxyName.
	Instances Feature = "two instances"
	// Cleanup means that the proxy can remove all objects that it created.
	Cleanup Feature = "clean-up"
)
