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
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/nodeview"
)

// frontend identifies a load balancer. No two load balancers of a machine have the same
// frontend.
type frontend struct {
	// VIP is the zero Addr for a node port, which applies to all addresses of the node.
	VIP      netip.Addr
	Family   api.Family
	Protocol uint32
	Port     uint16
}

// String returns the frontend in the form "10.96.0.10:53/UDP" or "IPv4 node port
// 30053/UDP".
func (f frontend) String() string {
	protocol := strconv.Itoa(int(f.Protocol))
	switch f.Protocol {
	case hns.ProtocolTCP:
		protocol = "TCP"
	case hns.ProtocolUDP:
		protocol = "UDP"
	}
	if !f.VIP.IsValid() {
		return fmt.Sprintf("%s node port %d/%s", f.Family, f.Port, protocol)
	}
	return netip.AddrPortFrom(f.VIP, f.Port).String() + "/" + protocol
}

// policy is a load balancer that the node must have. Unlike an [hns.LoadBalancer], it
// identifies endpoints by address, because their IDs are not known in advance.
type policy struct {
	frontend
	// target is the port at the endpoints.
	target       uint16
	flags        hns.LoadBalancerFlags
	portFlags    hns.PortFlags
	distribution hns.Distribution
	sourceVIP    netip.Addr
	// needsVIPEndpoint is true if HNS also needs an endpoint for the VIP.
	needsVIPEndpoint bool
	// endpoints is sorted by address and has no duplicates. If toRoot is true, the load
	// balancer uses only the root endpoint.
	endpoints []destination
	toRoot    bool
}

// destination is an endpoint of a policy.
type destination struct {
	addr netip.Addr
	at   nodeLocation
	// otherNode is true if the EndpointSlice says that the endpoint is on another node. It is
	// false for endpoints without a node name, which may be pods of this node.
	otherNode bool
}

// nodeLocation is where an endpoint is, relative to this node.
type nodeLocation uint8

const (
	// The location elsewhere means another node. The backend creates the endpoint in HNS.
	elsewhere nodeLocation = iota
	// podHere means a pod of this node. The network plug-in creates the pod's HNS endpoint.
	podHere
	// hostHere is this node itself, for a pod in the host network. The backend creates no
	// HNS endpoint for the node's address, because the node would then lose this address.
	hostHere
)

// unservedFrontend describes a frontend that HNS cannot provide, or can provide only
// partly.
type unservedFrontend struct {
	key    nodeview.FrontendKey
	reason string
	// degraded is true if HNS provides the frontend partly.
	degraded bool
}

// environment contains the settings and the state of this node that affect its load
// balancers.
type environment struct {
	features hns.Features
	// dsr enables direct server return for cluster IPs.
	dsr bool
	// forwardChecks makes this node receive health checks that are sent to a service's
	// load-balancer addresses. It applies to the port HealthCheckNodePort of the service or,
	// if that is 0, to healthzPort. If both are 0, forwardChecks has no effect.
	forwardChecks bool
	healthzPort   uint16
	// sourceVIP4 and sourceVIP6 are the source VIPs. For a family without a source VIP, the
	// value is the zero Addr.
	sourceVIP4, sourceVIP6 netip.Addr
	// nodeIPs are this node's addresses. The addresses preferred for tunnels come first.
	nodeIPs []netip.Addr
	network *hns.Network
	tunnels tunnels // the tunnels of the field network
	// maxBalancers limits the load balancers of a service.
	maxBalancers int
}

// plan returns the load balancers of a service on this node, in the order of its
// frontends. It also returns the frontends that HNS cannot provide fully. The function
// has no side effects. A frontend without endpoints gets no load balancer, because HNS
// can neither reject nor drop packets. If the service has too many frontends, plan returns
// an error.
func plan(view *api.View, on *environment) (policies []policy, lacking []unservedFrontend, err error) {
	var checked []nodeview.Frontend
	preserve := preservesDestination(view.Service)
	lists := map[listKey]*destinations{}
	planned := map[frontend]bool{}
	frontends := 0
	for f := range nodeview.Frontends(view) {
		if frontends++; frontends > on.maxBalancers {
			return nil, nil, fmt.Errorf("create more than %d load balancers for one service: raise Options.MaxLoadBalancers", on.maxBalancers)
		}
		if reason := on.refusal(&f); reason != "" {
			lacking = append(lacking, unservedFrontend{key: f.FrontendKey, reason: reason})
			continue
		}
		p, degraded := on.planPolicy(&f, preserve, lists)
		for _, reason := range degraded {
			lacking = append(lacking, unservedFrontend{f.FrontendKey, reason, true})
		}
		if len(p.endpoints) == 0 {
			continue
		}
		policies = append(policies, p)
		planned[p.frontend] = true
		if f.Kind == nodeview.LoadBalancerIP && lists[listKeyOf(&f, preserve)].running {
			checked = append(checked, f)
		}
	}
	for i := range checked {
		if p, ok := on.healthCheck(&checked[i], view.Service); ok && !planned[p.frontend] {
			policies = append(policies, p)
			planned[p.frontend] = true
		}
	}
	return policies, lacking, nil
}

// listKey identifies a list of endpoints of a service. If localOnly is true, only the
// endpoints on this node are used.
type listKey struct {
	id        nodeview.ListID
	family    api.Family
	localOnly bool
}

func listKeyOf(f *nodeview.Frontend, preserve bool) listKey {
	return listKey{f.Elsewhere.List, f.Family, preserve && (f.Kind == nodeview.NodePort || f.Kind == nodeview.LoadBalancerIP)}
}

// destinations is a list of endpoints that all frontends with an equal list share.
type destinations struct {
	target    uint16
	endpoints []destination
	sourceVIP netip.Addr
	degraded  []string
	running   bool // true if an endpoint of the whole list is not terminating
}

func (on *environment) destinationsOf(f *nodeview.Frontend, key listKey) *destinations {
	d := &destinations{running: slices.ContainsFunc(f.Elsewhere.Endpoints, isNotTerminating)}
	var candidates []nodeview.Target
	for _, e := range f.Elsewhere.Endpoints {
		if !key.localOnly || e.Local {
			candidates = append(candidates, e)
		}
	}
	d.target = commonPort(candidates)
	for _, e := range candidates {
		if uint16(e.Port) == d.target {
			d.endpoints = append(d.endpoints, on.destination(e.Endpoint))
		}
	}
	if len(d.endpoints) < len(candidates) {
		d.degraded = append(d.degraded, fmt.Sprintf("HNS balances to one target port: only endpoints at port %d get traffic", d.target))
	}
	slices.SortFunc(d.endpoints, func(a, b destination) int { return a.addr.Compare(b.addr) })
	d.endpoints = slices.Compact(d.endpoints)
	if slices.ContainsFunc(d.endpoints, func(d destination) bool { return d.at == hostHere }) {
		d.degraded = append(d.degraded, "endpoints in the host network of this node get no traffic, unless HNS has an endpoint for the node's address")
	}
	d.sourceVIP = on.source(f.Family, d.endpoints)
	return d
}

func isNotTerminating(t nodeview.Target) bool { return !t.Conditions.Terminating }

// refusal returns the reason why HNS cannot provide a frontend, or "" if it can.
func (on *environment) refusal(f *nodeview.Frontend) string {
	switch {
	case f.ServicePort == nil:
		return "HNS balances ports, not whole addresses"
	case protocolOf(f.Protocol) == 0:
		return fmt.Sprintf("HNS does not balance %s", f.Protocol)
	case f.Sources.Restricted:
		return "HNS does not support source ranges"
	case f.Family == api.IPv6 && on.network.Overlay:
		return "HNS does not balance IPv6 on overlay networks"
	case f.Family == api.IPv6 && !on.features.DualStack:
		return "IPv6 is not supported by this version of Windows"
	default:
		return ""
	}
}

func frontendOf(f *nodeview.Frontend) frontend {
	return frontend{VIP: f.Addr, Family: f.Family, Protocol: protocolOf(f.Protocol), Port: uint16(f.Port)}
}

// planPolicy plans the load balancer of a frontend. The second result describes the
// settings that HNS does not support. The policy has the endpoints for traffic from outside
// this node. This node's own traffic goes to them too, because a load balancer of HNS has
// only one list of endpoints. Frontends with equal lists share the endpoints. The argument
// "lists" has these endpoints.
func (on *environment) planPolicy(f *nodeview.Frontend, preserve bool, lists map[listKey]*destinations) (p policy, degraded []string) {
	p = policy{frontend: frontendOf(f)}
	if f.Family == api.IPv6 {
		p.flags |= hns.IPv6
	}
	if f.Affinity > 0 && on.features.SessionAffinity {
		p.distribution = hns.PerClient
	} else if f.Affinity > 0 {
		degraded = append(degraded, "session affinity is not supported by this version of Windows")
	}
	// MasqueradeNode means externalTrafficPolicy Local: a pod gets packets with the client's
	// address and replies directly to the client. That is direct server return.
	dsr := f.Masquerade == nodeview.MasqueradeNode
	switch f.Kind {
	case nodeview.ClusterIP:
		dsr = on.dsr
		p.needsVIPEndpoint = on.network.Overlay
	case nodeview.NodePort:
		p.portFlags = hns.LocalRoutedVIP | hns.VIPExternalIP
	case nodeview.ExternalIP:
		p.portFlags = hns.VIPExternalIP
	case nodeview.LoadBalancerIP:
		p.portFlags = hns.VIPExternalIP
		if preserve && on.features.DSR {
			p.portFlags |= hns.UseMux | hns.PreserveDIP
			dsr = true
		}
	}
	if dsr && on.features.DSR {
		p.flags |= hns.DSR
	}
	key := listKeyOf(f, preserve)
	list := lists[key]
	if list == nil {
		list = on.destinationsOf(f, key)
		lists[key] = list
	}
	p.target, p.endpoints, p.sourceVIP = list.target, list.endpoints, list.sourceVIP
	return p, append(degraded, list.degraded...)
}

// commonPort returns the most common port of endpoints. If several ports are equally
// common, it returns the lowest.
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

func (on *environment) destination(e *api.Endpoint) destination {
	d := destination{addr: e.Addr}
	switch {
	case slices.Contains(on.nodeIPs, d.addr):
		d.at = hostHere
	case e.Local:
		d.at = podHere
	default:
		d.otherNode = e.NodeName != ""
	}
	return d
}

// healthCheck returns the load balancer that forwards health checks from a load-balancer
// address to this node's health-check port. kube-proxy does the same with
// --forward-healthcheck-vip. If no such load balancer is needed, ok is false.
func (on *environment) healthCheck(f *nodeview.Frontend, svc *api.Service) (p policy, ok bool) {
	port := cmp.Or(uint16(svc.HealthCheckNodePort), on.healthzPort)
	if !on.forwardChecks || port == 0 {
		return policy{}, false
	}
	p = policy{
		frontend: frontend{VIP: f.Addr, Family: f.Family, Protocol: hns.ProtocolTCP, Port: port},
		target:   port, toRoot: true,
	}
	if f.Family == api.IPv6 {
		p.flags |= hns.IPv6
	}
	if preservesDestination(svc) {
		p.portFlags |= hns.UseMux | hns.PreserveDIP
	}
	p.sourceVIP = on.source(p.Family, nil)
	return p, true
}

// source returns the source address for a policy with these endpoints. This address is the
// configured source VIP or, if there is none, the node's own address. On an overlay
// network, the node's own address replaces the source VIP if an endpoint is outside the pod
// network.
func (on *environment) source(family api.Family, endpoints []destination) netip.Addr {
	vip := on.sourceVIP4
	if family == api.IPv6 {
		vip = on.sourceVIP6
	}
	if !on.network.Overlay {
		return cmp.Or(vip, on.nodeIP(family))
	}
	for _, e := range endpoints {
		if e.at != elsewhere {
			continue
		}
		if provider := on.tunnels.provider(e.addr); !provider.IsValid() || provider == e.addr {
			return cmp.Or(on.nodeIP(family), vip)
		}
	}
	return vip
}

// nodeIP returns this node's address of a family, or the zero Addr.
func (on *environment) nodeIP(f api.Family) netip.Addr {
	for _, ip := range on.nodeIPs {
		if api.FamilyOf(ip) == f {
			return ip
		}
	}
	return netip.Addr{}
}

// remoteEndpoint returns the HNS endpoint to create for the address of a pod on
// another node.
func (on *environment) remoteEndpoint(name string, addr netip.Addr) hns.Endpoint {
	e := hns.Endpoint{Name: name, Network: on.network.ID, Addrs: []netip.Addr{addr}, MAC: macOf(addr), Remote: true}
	if on.network.Overlay {
		// If the address belongs to no other node, the provider is this node.
		e.Provider = cmp.Or(on.tunnels.provider(addr), on.nodeIP(api.FamilyOf(addr)))
	}
	return e
}

// vipEndpoint returns the HNS endpoint of a cluster IP on an overlay network. The
// endpoint's provider is this node, so that packets from this node to the cluster IP
// reach the load balancer.
func (on *environment) vipEndpoint(name string, vip netip.Addr, mac string) hns.Endpoint {
	return hns.Endpoint{
		Name: name, Network: on.network.ID, Addrs: []netip.Addr{vip}, MAC: mac,
		Remote: true, Provider: on.nodeIP(api.FamilyOf(vip)),
	}
}

// macOf returns a hardware address for a remote endpoint. It is locally administered and
// depends only on the IP address. For IPv6 it contains a hash of the whole IP address,
// because the addresses of pods on two nodes may differ only in their first bytes.
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
	return svc.Annotations["preserve-destination"] == "true"
}

// protocolOf returns the IP protocol number of p, or 0 if HNS does not balance p.
func protocolOf(p api.Protocol) uint32 {
	if p != api.TCP && p != api.UDP {
		return 0
	}
	return uint32(p.Number())
}

// toLoadBalancer returns the policy as a load balancer with these endpoint IDs.
func (p *policy) toLoadBalancer(ids []string) hns.LoadBalancer {
	lb := hns.LoadBalancer{
		Endpoints: ids, SourceVIP: p.sourceVIP, Flags: p.flags,
		Ports: []hns.PortMapping{{
			Protocol: p.Protocol, External: p.Port, Internal: p.target,
			Distribution: p.distribution, Flags: p.portFlags,
		}},
	}
	if p.VIP.IsValid() {
		lb.VIPs = []netip.Addr{p.VIP}
	}
	return lb
}
