// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strconv"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Frontend is what a load balancer takes for itself. No two load balancers of a
// machine have the same, so it is their identity.
type Frontend struct {
	// VIP is the zero Addr for a node port: all addresses of the node.
	VIP      netip.Addr
	Family   api.Family
	Protocol uint32
	Port     uint16
}

// String returns the frontend as in "10.96.0.10:53/UDP" or "IPv4 node port 30053/UDP".
func (f Frontend) String() string {
	protocol := strconv.Itoa(int(f.Protocol))
	switch f.Protocol {
	case ProtocolTCP:
		protocol = "TCP"
	case ProtocolUDP:
		protocol = "UDP"
	}
	if !f.VIP.IsValid() {
		return fmt.Sprintf("%s node port %d/%s", f.Family, f.Port, protocol)
	}
	return netip.AddrPortFrom(f.VIP, f.Port).String() + "/" + protocol
}

// policy is a load balancer as the node must have it: a [LoadBalancer] with
// endpoints by address, as HNS' IDs are not known before it is asked.
type policy struct {
	Frontend
	// target is the port at the endpoints.
	target       uint16
	flags        LoadBalancerFlags
	portFlags    PortFlags
	distribution Distribution
	sourceVIP    netip.Addr
	// needsVIPEndpoint says that HNS needs an endpoint for the VIP as well.
	needsVIPEndpoint bool
	// endpoints are in order of their addresses, each once. Health checks go to the
	// root endpoint instead.
	endpoints []destination
	toRoot    bool
}

// destination is an endpoint of a policy.
type destination struct {
	addr netip.Addr
	at   place
}

// place says where an endpoint is.
type place uint8

const (
	// elsewhere is not on this node: the backend makes an HNS endpoint for it.
	elsewhere place = iota
	// podHere is a pod of this node: the network plug-in makes its HNS endpoint.
	podHere
	// hostHere is this node itself, with a pod in its host network. An HNS endpoint that
	// claims the node's own address would take it from the node, so none is made.
	hostHere
)

// unserved is a frontend that HNS cannot provide, or not as it is asked for.
type unserved struct {
	key    nodeview.FrontendKey
	reason string
	// degraded says that it is served nevertheless.
	degraded bool
}

// terrain is what of this node decides about its load balancers.
type terrain struct {
	features Features
	// dsr asks for direct server return for cluster IPs.
	dsr bool
	// forwardHealthChecks has health checks at load-balancer addresses forwarded, those
	// of services without a port of their own to healthzPort unless it is 0.
	forwardHealthChecks bool
	healthzPort         uint16
	// sourceVIPs are zero where the family has none.
	sourceVIP4, sourceVIP6 netip.Addr
	// nodeIPs are this node's addresses, the ones to use in tunnels first.
	nodeIPs []netip.Addr
	network *Network
}

// PreserveDestination is the annotation that, if "true", has packets for a load
// balancer's ingress address delivered to local pods with that address as
// destination. Sources drop annotations that they are not told to keep.
const PreserveDestination = "preserve-destination"

// plan returns the load balancers that a node must have for a service, in the
// order of its frontends, and what is not provided as it is asked for. It is
// pure. A frontend without endpoints has no load balancer: HNS can neither
// reject nor drop.
func plan(se *api.ServiceEndpoints, on *terrain) (policies []policy, lacking []unserved) {
	var checked []nodeview.Frontend
	for f := range nodeview.Frontends(se) {
		if reason := on.refuses(&f); reason != "" {
			lacking = append(lacking, unserved{key: f.FrontendKey, reason: reason})
			continue
		}
		p, degraded := on.policy(&f, preservesDestination(se.Service))
		for _, reason := range degraded {
			lacking = append(lacking, unserved{f.FrontendKey, reason, true})
		}
		if len(p.endpoints) == 0 {
			continue
		}
		policies = append(policies, p)
		if f.Kind == nodeview.LoadBalancerIP && slices.ContainsFunc(f.Elsewhere.Endpoints, isNotTerminating) {
			checked = append(checked, f)
		}
	}
	for i := range checked {
		p, ok := on.healthCheck(&checked[i], se.Service)
		if ok && !slices.ContainsFunc(policies, func(other policy) bool { return other.Frontend == p.Frontend }) {
			policies = append(policies, p)
		}
	}
	return policies, lacking
}

func isNotTerminating(t nodeview.Target) bool { return !t.Conditions.Terminating }

// refuses returns why HNS cannot provide a frontend, "" if it can.
func (on *terrain) refuses(f *nodeview.Frontend) string {
	switch {
	case f.ServicePort == nil:
		return "HNS balances ports, not whole addresses"
	case protocolOf(f.Protocol) == 0:
		return fmt.Sprintf("HNS does not balance %s", f.Protocol)
	case f.Sources.Restricted:
		return "HNS cannot limit a load balancer to source ranges, and to let everybody in is not what was asked for"
	case f.Family == api.IPv6 && on.network.Overlay:
		return "HNS does not balance IPv6 on overlay networks"
	case f.Family == api.IPv6 && !on.features.DualStack:
		return "IPv6 is not supported by this version of Windows"
	default:
		return ""
	}
}

// policy decides all about a frontend's load balancer, and says what of the frontend
// it leaves out. External frontends have the endpoints for traffic from elsewhere: HNS
// has one list for all.
func (on *terrain) policy(f *nodeview.Frontend, preserve bool) (p policy, degraded []string) {
	p = policy{Frontend: Frontend{VIP: f.Addr, Family: f.Family, Protocol: protocolOf(f.Protocol), Port: uint16(f.Port)}}
	if f.Family == api.IPv6 {
		p.flags |= IPv6
	}
	if f.Affinity > 0 && on.features.SessionAffinity {
		p.distribution = PerClient
	} else if f.Affinity > 0 {
		degraded = append(degraded, "session affinity is not supported by this version of Windows")
	}
	// With the external policy Local, replies leave from the pods' own node with
	// the client's address untouched: that is direct server return.
	dsr := f.Masquerade == nodeview.MasqueradeNode
	localOnly := false
	switch f.Kind {
	case nodeview.ClusterIP:
		dsr = on.dsr
		p.needsVIPEndpoint = on.network.Overlay
	case nodeview.NodePort:
		p.portFlags = LocalRoutedVIP | VIPExternalIP
		localOnly = preserve
	case nodeview.ExternalIP:
		p.portFlags = VIPExternalIP
	case nodeview.LoadBalancerIP:
		p.portFlags = VIPExternalIP
		if preserve && on.features.DSR {
			p.portFlags |= UseMux | PreserveDIP
			dsr = true
		}
		localOnly = preserve
	}
	if dsr && on.features.DSR {
		p.flags |= DSR
	}
	var candidates []nodeview.Target
	for _, e := range f.Elsewhere.Endpoints {
		if !localOnly || e.Local {
			candidates = append(candidates, e)
		}
	}
	p.target = commonPort(candidates)
	for _, e := range candidates {
		if uint16(e.Port) == p.target {
			p.endpoints = append(p.endpoints, on.destination(e.Endpoint))
		}
	}
	if len(p.endpoints) < len(candidates) {
		degraded = append(degraded, fmt.Sprintf("HNS balances to one target port: only endpoints at port %d get traffic", p.target))
	}
	slices.SortFunc(p.endpoints, func(a, b destination) int { return a.addr.Compare(b.addr) })
	p.endpoints = slices.Compact(p.endpoints)
	if slices.ContainsFunc(p.endpoints, func(d destination) bool { return d.at == hostHere }) {
		degraded = append(degraded, "endpoints in the host network of this node get no traffic, unless HNS has an endpoint for the node's address")
	}
	p.sourceVIP = on.source(&p)
	return p, degraded
}

// commonPort returns the port of most endpoints, of several the lowest one.
func commonPort(endpoints []nodeview.Target) uint16 {
	count := map[uint16]int{}
	var common uint16
	for _, e := range endpoints {
		port := uint16(e.Port)
		count[port]++
		if more := count[port] - count[common]; more > 0 || more == 0 && port < common {
			common = port
		}
	}
	return common
}

func (on *terrain) destination(e *api.Endpoint) destination {
	d := destination{addr: e.Addr}
	switch {
	case slices.Contains(on.nodeIPs, d.addr):
		d.at = hostHere
	case e.Local:
		d.at = podHere
	}
	return d
}

// healthCheck returns the load balancer that forwards health checks from a load-balancer
// address to this node's health-check port, as kube-proxy does with
// --forward-healthcheck-vip. It is not ok if that is not needed.
func (on *terrain) healthCheck(f *nodeview.Frontend, svc *api.Service) (p policy, ok bool) {
	port := cmp.Or(uint16(svc.HealthCheckNodePort), on.healthzPort)
	if !on.forwardHealthChecks || port == 0 {
		return policy{}, false
	}
	p = policy{
		Frontend: Frontend{VIP: f.Addr, Family: f.Family, Protocol: ProtocolTCP, Port: port},
		target:   port, toRoot: true,
	}
	if f.Family == api.IPv6 {
		p.flags |= IPv6
	}
	if preservesDestination(svc) {
		p.portFlags |= UseMux | PreserveDIP
	}
	p.sourceVIP = on.source(&p)
	return p, true
}

// source returns the source address of a policy. On an overlay network it is the
// configured one, or the node's own where an endpoint is outside the network of pods:
// another node, or beyond the cluster. On other networks it is the node's own unless
// another one is configured.
func (on *terrain) source(p *policy) netip.Addr {
	vip := on.sourceVIP4
	if p.Family == api.IPv6 {
		vip = on.sourceVIP6
	}
	if !on.network.Overlay {
		return cmp.Or(vip, on.nodeIP(p.Family))
	}
	for _, e := range p.endpoints {
		if e.at != elsewhere {
			continue
		}
		if provider := on.network.Provider(e.addr); !provider.IsValid() || provider == e.addr {
			return cmp.Or(on.nodeIP(p.Family), vip)
		}
	}
	return vip
}

// nodeIP returns this node's address of a family, the zero Addr if there is none.
func (on *terrain) nodeIP(f api.Family) netip.Addr {
	for _, ip := range on.nodeIPs {
		if api.FamilyOf(ip) == f {
			return ip
		}
	}
	return netip.Addr{}
}

// remote returns the HNS endpoint to make for an address that is not a pod's of
// this node.
func (on *terrain) remote(name string, addr netip.Addr) Endpoint {
	e := Endpoint{Name: name, Network: on.network.ID, Addrs: []netip.Addr{addr}, MAC: macOf(addr), Remote: true}
	if on.network.Overlay {
		// What no tunnel leads to is this node's to send.
		e.Provider = cmp.Or(on.network.Provider(addr), on.nodeIP(api.FamilyOf(addr)))
	}
	return e
}

// vipEndpoint returns the HNS endpoint of a cluster IP on an overlay network: this node
// claims the address, so that its own packets reach the load balancer.
func (on *terrain) vipEndpoint(name string, vip netip.Addr, mac string) Endpoint {
	return Endpoint{
		Name: name, Network: on.network.ID, Addrs: []netip.Addr{vip}, MAC: mac,
		Remote: true, Provider: on.nodeIP(api.FamilyOf(vip)),
	}
}

// macOf makes up the hardware address of a remote endpoint: locally administered,
// and always the same for the same address. An IPv6 address is hashed, for those
// of two nodes may differ in their first bytes only.
func macOf(a netip.Addr) string {
	b := a.AsSlice()
	if a.Is6() {
		h := fnv.New32a()
		h.Write(b)
		b = h.Sum(nil)
	}
	return fmt.Sprintf("02-11-%02x-%02x-%02x-%02x", b[0], b[1], b[2], b[3])
}

func preservesDestination(svc *api.Service) bool {
	return svc.Annotations[PreserveDestination] == "true"
}

// protocolOf returns the number of a protocol that HNS balances, 0 for others.
func protocolOf(p api.Protocol) uint32 {
	switch p {
	case api.TCP:
		return ProtocolTCP
	case api.UDP:
		return ProtocolUDP
	default:
		return 0
	}
}

// with returns the policy as a load balancer, with endpoints of these IDs.
func (p *policy) with(ids []string) LoadBalancer {
	lb := LoadBalancer{
		Endpoints: ids, SourceVIP: p.sourceVIP, Flags: p.flags,
		Ports: []PortMapping{{
			Protocol: p.Protocol, External: p.Port, Internal: p.target,
			Distribution: p.distribution, Flags: p.portFlags,
		}},
	}
	if p.VIP.IsValid() {
		lb.VIPs = []netip.Addr{p.VIP}
	}
	return lb
}
