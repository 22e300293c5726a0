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
	// OneEndpoint: all connections go to the first endpoint.
	OneEndpoint Fault = "one endpoint"
	// Uneven: the first endpoint gets three shares.
	Uneven Fault = "uneven"
	// DrainingToo: draining endpoints get new connections.
	DrainingToo Fault = "draining too"
	// OneFamily: IPv6 is ignored.
	OneFamily Fault = "one family"

	// KeepPort: connections keep their port.
	KeepPort Fault = "keep port"
	// AnyPort: a port's rules match all ports.
	AnyPort Fault = "any port"
	// AnyProtocol: a port's rules match TCP and UDP.
	AnyProtocol Fault = "any protocol"
	// LosesRenamed: a service is lost when names of its ports change.
	LosesRenamed Fault = "loses renamed"
	// RefusesSCTP: the presence of an SCTP port blocks all programming.
	RefusesSCTP Fault = "refuses SCTP"
	// NoAllPorts: all-ports services accept only TCP.
	NoAllPorts Fault = "no all ports"

	// DropsAll: connections are dropped instead of rejected.
	DropsAll Fault = "drops all"
	// NoVerdicts: connections are neither rejected nor dropped.
	NoVerdicts Fault = "no verdicts"
	// UnknownPorts: unknown ports of cluster IPs are not handled.
	UnknownPorts Fault = "unknown ports"

	// AnyNodePort: all addresses have node ports.
	AnyNodePort Fault = "any node port"
	// FirstNodePort: only the first address has node ports.
	FirstNodePort Fault = "first node port"
	// ServesProxied: load-balancer IPs of mode Proxy are served.
	ServesProxied Fault = "serves proxied"
	// IgnoresClaims: addresses of older services are also served, with precedence.
	IgnoresClaims Fault = "ignores claims"

	// AnySource: source ranges are ignored.
	AnySource Fault = "any source"
	// GuardsAll: source ranges apply to all frontends.
	GuardsAll Fault = "guards all"
	// GuardsLate: source ranges apply after verdicts.
	GuardsLate Fault = "guards late"
	// NoOwnAddress: source ranges do not admit the service's own addresses.
	NoOwnAddress Fault = "no own address"

	// NoShortCircuit: traffic of this node uses the list for traffic from elsewhere.
	NoShortCircuit Fault = "no short circuit"
	// NoHairpin: hairpin is not masqueraded.
	NoHairpin Fault = "no hairpin"
	// NoMasquerade: only hairpin is masqueraded.
	NoMasquerade Fault = "no masquerade"
	// MasqueradesAll: all connections are masqueraded.
	MasqueradesAll Fault = "masquerades all"

	// NoAffinity: affinity is ignored.
	NoAffinity Fault = "no affinity"
	// EternalAffinity: affinity does not expire.
	EternalAffinity Fault = "eternal affinity"
	// FixedAffinity: affinity depends on the position of an endpoint in the list, so that
	// changes of other endpoints move clients.
	FixedAffinity Fault = "fixed affinity"
	// SharedAffinity: the ports of a service share affinity.
	SharedAffinity Fault = "shared affinity"
	// LooseAffinity: affinity may select any endpoint of the service.
	LooseAffinity Fault = "loose affinity"

	// KeepsFlows: connection tracking is not cleaned up.
	KeepsFlows Fault = "keeps flows"
	// ForgetsFlows: each change deletes all connections through services.
	ForgetsFlows Fault = "forgets flows"

	// HealthLies: health checks always succeed.
	HealthLies Fault = "health lies"
	// HealthStays: health-check ports are not closed.
	HealthStays Fault = "health stays"
	// HealthFirst: while a health-check port cannot be opened, nothing else is done.
	HealthFirst Fault = "health first"

	// KeepsRules: earlier rules stay and take precedence.
	KeepsRules Fault = "keeps rules"
	// Flushes: the table is deleted and created again in two steps.
	Flushes Fault = "flushes"
	// FlushesOthers: the first change flushes all tables.
	FlushesOthers Fault = "flushes others"
	// LeavesTable: Cleanup does nothing.
	LeavesTable Fault = "leaves table"
)

// apply returns the view as a proxy with the fault misreads it.
func (f Fault) apply(se *api.ServiceEndpoints) *api.ServiceEndpoints {
	misread, service := *se, *se.Service
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

// renamed reports whether the names of a service's ports changed.
func renamed(c sink.Change) bool {
	return c.Old != nil && c.New != nil && !slices.EqualFunc(c.Old.Service.Ports, c.New.Service.Ports,
		func(a, b api.PortMapping) bool { return a.Name == b.Name })
}

func hasSCTP(se *api.ServiceEndpoints) bool {
	return slices.ContainsFunc(se.Service.Ports, func(p api.PortMapping) bool { return p.Protocol == api.SCTP })
}
