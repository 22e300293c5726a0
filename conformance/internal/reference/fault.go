// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

// Fault is a deliberate fault of a Proxy.
type Fault string

// The faults.
const (
	// OneEndpoint makes all connections reach the first endpoint.
	OneEndpoint Fault = "one endpoint"
	// Uneven gives the first endpoint three times the connections of any other endpoint.
	Uneven Fault = "uneven"
	// DrainingToo sends new connections to draining endpoints too.
	DrainingToo Fault = "draining too"
	// OneFamily ignores IPv6.
	OneFamily Fault = "one family"

	// KeepPort does not translate the destination port.
	KeepPort Fault = "keep port"
	// AnyPort makes the rules of a port match all ports.
	AnyPort Fault = "any port"
	// AnyProtocol makes the rules of a port match TCP and UDP.
	AnyProtocol Fault = "any protocol"
	// LosesRenamed removes a service when names of its ports change.
	LosesRenamed Fault = "loses renamed"
	// RefusesSCTP makes each Sync fail if any service has an SCTP port.
	RefusesSCTP Fault = "refuses SCTP"
	// NoAllPorts makes all-ports services accept only TCP.
	NoAllPorts Fault = "no all ports"

	// DropsAll drops the connections that the proxy must reject.
	DropsAll Fault = "drops all"
	// NoVerdicts neither rejects nor drops connections to frontends without endpoints.
	NoVerdicts Fault = "no verdicts"
	// UnknownPorts does not handle connections to unknown ports of cluster IPs.
	UnknownPorts Fault = "unknown ports"

	// AnyNodePort serves node ports at all addresses of the node.
	AnyNodePort Fault = "any node port"
	// FirstNodePort serves node ports only at the node's first address.
	FirstNodePort Fault = "first node port"
	// LocalhostTCP serves only TCP node ports on localhost.
	LocalhostTCP Fault = "localhost TCP"
	// LocalhostFrozen keeps the endpoints that a node port on localhost had first.
	LocalhostFrozen Fault = "localhost frozen"
	// LocalhostStays does not close node ports on localhost.
	LocalhostStays Fault = "localhost stays"
	// LocalhostOnce does not retry a node port on localhost that cannot be opened.
	LocalhostOnce Fault = "localhost once"
	// LocalhostRoutes sets the kernel setting route_localnet.
	LocalhostRoutes Fault = "localhost routes"
	// LocalhostPodsOnly ignores endpoints with node addresses for connections to localhost.
	LocalhostPodsOnly Fault = "localhost pods only"
	// ServesProxied also serves load-balancer IPs with ipMode Proxy.
	ServesProxied Fault = "serves proxied"
	// IgnoresClaims gives the traffic to the newer of two services with the same address and
	// port.
	IgnoresClaims Fault = "ignores claims"

	// AnySource ignores source ranges.
	AnySource Fault = "any source"
	// GuardsAll applies source ranges to all frontends.
	GuardsAll Fault = "guards all"
	// GuardsLate rejects connections to services without endpoints before it applies source
	// ranges.
	GuardsLate Fault = "guards late"
	// NoOwnAddress applies source ranges also to packets whose source is an address of the
	// service.
	NoOwnAddress Fault = "no own address"

	// NoShortCircuit gives traffic of this node the same endpoints as traffic from outside.
	NoShortCircuit Fault = "no short circuit"
	// NoHairpin does not masquerade hairpin traffic.
	NoHairpin Fault = "no hairpin"
	// NoMasquerade masquerades only hairpin traffic.
	NoMasquerade Fault = "no masquerade"
	// MasqueradesAll masquerades all connections.
	MasqueradesAll Fault = "masquerades all"

	// NoAffinity ignores session affinity.
	NoAffinity Fault = "no affinity"
	// EternalAffinity never lets affinity expire.
	EternalAffinity Fault = "eternal affinity"
	// FixedAffinity stores the index of a client's endpoint instead of the endpoint's
	// address. So a client may get another endpoint when endpoints are added or removed.
	FixedAffinity Fault = "fixed affinity"
	// SharedAffinity sends a client to the same endpoint at all ports of a service.
	SharedAffinity Fault = "shared affinity"
	// LooseAffinity lets affinity select endpoints that the frontend must not use.
	LooseAffinity Fault = "loose affinity"

	// HashModulo chooses an endpoint by the remainder of the hash instead of a Maglev table.
	HashModulo Fault = "hash modulo"
	// HashSeed makes each process use another hash function.
	HashSeed Fault = "hash seed"
	// ResetsActive resets a connection to a lost endpoint only when the client sends data.
	ResetsActive Fault = "resets active"

	// KeepsFlows does not delete entries of connection tracking.
	KeepsFlows Fault = "keeps flows"
	// ForgetsFlows deletes the connection-tracking entries of all services at each change.
	ForgetsFlows Fault = "forgets flows"

	// HealthLies makes health checks always succeed.
	HealthLies Fault = "health lies"
	// HealthStays does not close health-check ports.
	HealthStays Fault = "health stays"
	// HealthFirst programs nothing while a health-check port cannot be opened.
	HealthFirst Fault = "health first"

	// CountsNothing does not count connections.
	CountsNothing Fault = "counts nothing"
	// CountsServices adds up the connections of all service ports.
	CountsServices Fault = "counts services"
	// CountsPositions counts connections by the position of endpoints in their list.
	CountsPositions Fault = "counts positions"
	// CountsAgain sets all counters to zero at each change.
	CountsAgain Fault = "counts again"
	// CountsPackets counts the packets of clients as connections, too.
	CountsPackets Fault = "counts packets"
	// CountsFirstPackets counts only the bytes of the first packets of connections.
	CountsFirstPackets Fault = "counts first packets"
	// NeverInactive counts ended connections as active.
	NeverInactive Fault = "never inactive"

	// KeepsRules keeps old rules, which take precedence over new rules.
	KeepsRules Fault = "keeps rules"
	// The fault Flushes deletes the table and creates it again in a second transaction.
	Flushes Fault = "flushes"
	// FlushesOthers flushes all tables, including those of other owners, at the first
	// change.
	FlushesOthers Fault = "flushes others"
	// LeavesTable makes Cleanup do nothing.
	LeavesTable Fault = "leaves table"
)

// apply returns the view that a proxy with the fault f uses instead of view.
func (f Fault) apply(view *api.View) *api.View {
	misread, service := *view, *view.Service
	misread.Service = &service
	switch f {
	case ServesProxied:
		for ip := range service.IPs.ProxiedIPs.All() {
			service.IPs.LoadBalancerIPs.Add(ip)
		}
	case IgnoresClaims:
		misread.Lost = nil
	case OneFamily:
		service.IPFamilies = []api.Family{api.IPv4}
	}
	return &misread
}

// portsRenamed reports whether the names of a service's ports changed.
func portsRenamed(c sink.Change) bool {
	return c.Old != nil && c.New != nil && !slices.EqualFunc(c.Old.Service.Ports, c.New.Service.Ports,
		func(a, b api.PortMapping) bool { return a.Name == b.Name })
}

func hasSCTP(view *api.View) bool {
	return slices.ContainsFunc(view.Service.Ports, func(p api.PortMapping) bool { return p.Protocol == api.SCTP })
}
