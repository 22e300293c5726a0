// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

// Fault is something that a Proxy does wrong.
type Fault string

// The faults.
const (
	// OneEndpoint: all connections go to the first endpoint.
	OneEndpoint Fault = "one endpoint"
	// Uneven: the first endpoint gets three shares.
	Uneven Fault = "uneven"
	// DrainingToo: draining endpoints get new connections.
	DrainingToo Fault = "draining too"
	// OneFamily: IPv6 is forgotten.
	OneFamily Fault = "one family"

	// KeepPort: connections keep their port.
	KeepPort Fault = "keep port"
	// AnyPort: a port's rules match all ports.
	AnyPort Fault = "any port"
	// AnyProtocol: a port's rules match TCP and UDP.
	AnyProtocol Fault = "any protocol"
	// LosesRenamed: a service is lost when names of its ports change.
	LosesRenamed Fault = "loses renamed"
	// RefusesSCTP: where there is an SCTP port nothing is programmed.
	RefusesSCTP Fault = "refuses SCTP"
	// NoAllPorts: all-ports services take TCP only.
	NoAllPorts Fault = "no all ports"

	// DropsAll: what is to be rejected is dropped.
	DropsAll Fault = "drops all"
	// NoVerdicts: what is to be rejected or dropped is left alone.
	NoVerdicts Fault = "no verdicts"
	// UnknownPorts: unknown ports of cluster IPs are left alone.
	UnknownPorts Fault = "unknown ports"

	// AnyNodePort: node ports are on all addresses.
	AnyNodePort Fault = "any node port"
	// FirstNodePort: node ports are on the first address only.
	FirstNodePort Fault = "first node port"
	// ServesProxied: load-balancer IPs of mode Proxy are served.
	ServesProxied Fault = "serves proxied"
	// IgnoresClaims: addresses of older services are served, too, and first.
	IgnoresClaims Fault = "ignores claims"

	// AnySource: source ranges are ignored.
	AnySource Fault = "any source"
	// GuardsAll: source ranges hold for all frontends.
	GuardsAll Fault = "guards all"
	// GuardsLate: source ranges do not come before verdicts.
	GuardsLate Fault = "guards late"
	// NoOwnAddress: the service's own addresses are no exception to source ranges.
	NoOwnAddress Fault = "no own address"

	// NoShortCircuit: traffic of this node uses the list of traffic from elsewhere.
	NoShortCircuit Fault = "no short circuit"
	// NoHairpin: hairpin is not masqueraded.
	NoHairpin Fault = "no hairpin"
	// NoMasquerade: nothing is, but hairpin.
	NoMasquerade Fault = "no masquerade"
	// MasqueradesAll: everything is.
	MasqueradesAll Fault = "masquerades all"

	// NoAffinity: there is none.
	NoAffinity Fault = "no affinity"
	// EternalAffinity: affinity does not expire.
	EternalAffinity Fault = "eternal affinity"
	// FixedAffinity: affinity is to the place of an endpoint in the list, so that
	// other endpoints' coming and going moves clients.
	FixedAffinity Fault = "fixed affinity"
	// SharedAffinity: the ports of a service share it.
	SharedAffinity Fault = "shared affinity"
	// LooseAffinity: it leads to any endpoint of the service.
	LooseAffinity Fault = "loose affinity"

	// KeepsFlows: connection tracking is left alone.
	KeepsFlows Fault = "keeps flows"
	// ForgetsFlows: each change deletes all connections through services.
	ForgetsFlows Fault = "forgets flows"

	// HealthLies: health checks are always good.
	HealthLies Fault = "health lies"
	// HealthStays: health-check ports are not closed.
	HealthStays Fault = "health stays"
	// HealthFirst: as long as a health-check port cannot be opened nothing else is
	// done.
	HealthFirst Fault = "health first"

	// KeepsRules: what was there before stays, and comes first.
	KeepsRules Fault = "keeps rules"
	// Flushes: the table is deleted and made anew in two steps.
	Flushes Fault = "flushes"
	// FlushesOthers: the first of all changes flushes all tables.
	FlushesOthers Fault = "flushes others"
	// LeavesTable: Cleanup does nothing.
	LeavesTable Fault = "leaves table"
)

// apply returns the view as the fault makes it be misread.
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

// renamed reports whether the ports of a service have other names than before.
func renamed(c sink.Change) bool {
	return c.Old != nil && c.New != nil && !slices.EqualFunc(c.Old.Service.Ports, c.New.Service.Ports,
		func(a, b api.PortMapping) bool { return a.Name == b.Name })
}

func hasSCTP(se *api.ServiceEndpoints) bool {
	return slices.ContainsFunc(se.Service.Ports, func(p api.PortMapping) bool { return p.Protocol == api.SCTP })
}
