// SPDX-License-Identifier: Apache-2.0

package hns

import (
	"encoding/json"
	"net/netip"
	"strings"

	"github.com/Microsoft/hcsshim/hcn"
)

// endpoint converts an endpoint from the type of package hcn. It omits invalid addresses.
func endpoint(from *hcn.HostComputeEndpoint) Endpoint {
	e := Endpoint{
		ID:      strings.ToLower(from.Id),
		Name:    from.Name,
		Network: from.HostComputeNetwork,
		MAC:     from.MacAddress,
		Remote:  from.Flags&hcn.EndpointFlagsRemoteEndpoint != 0,
	}
	for _, c := range from.IpConfigurations {
		if a, err := netip.ParseAddr(c.IpAddress); err == nil {
			e.Addrs = append(e.Addrs, a.Unmap())
		}
	}
	for _, p := range from.Policies {
		var setting hcn.ProviderAddressEndpointPolicySetting
		if p.Type == hcn.NetworkProviderAddress && json.Unmarshal(p.Settings, &setting) == nil {
			e.Provider, _ = netip.ParseAddr(setting.ProviderAddress)
		}
	}
	return e
}

// balancer converts a load balancer from the type of package hcn. If the address of a
// frontend is invalid, balancer returns false, because the converted load balancer would
// lack that frontend.
func balancer(from *hcn.HostComputeLoadBalancer) (lb LoadBalancer, ok bool) {
	lb = LoadBalancer{
		ID:    strings.ToLower(from.Id),
		Flags: LoadBalancerFlags(from.Flags),
	}
	lb.SourceVIP, _ = netip.ParseAddr(from.SourceVIP)
	for _, id := range from.HostComputeEndpoints {
		lb.Endpoints = append(lb.Endpoints, strings.ToLower(id))
	}
	for _, s := range from.FrontendVIPs {
		vip, err := netip.ParseAddr(s)
		if err != nil {
			return LoadBalancer{}, false
		}
		lb.VIPs = append(lb.VIPs, vip.Unmap())
	}
	for _, p := range from.PortMappings {
		lb.Ports = append(lb.Ports, PortMapping{
			Protocol: p.Protocol, External: p.ExternalPort, Internal: p.InternalPort,
			Distribution: Distribution(p.DistributionType), Flags: PortFlags(p.Flags),
		})
	}
	return lb, true
}

// hcnBalancer converts a load balancer, except its ID, to the type of package hcn.
func hcnBalancer(lb LoadBalancer) *hcn.HostComputeLoadBalancer {
	to := &hcn.HostComputeLoadBalancer{
		HostComputeEndpoints: lb.Endpoints,
		SchemaVersion:        hcn.V2SchemaVersion(),
		Flags:                hcn.LoadBalancerFlags(lb.Flags),
	}
	if lb.SourceVIP.IsValid() {
		to.SourceVIP = lb.SourceVIP.String()
	}
	for _, vip := range lb.VIPs {
		to.FrontendVIPs = append(to.FrontendVIPs, vip.String())
	}
	for _, p := range lb.Ports {
		to.PortMappings = append(to.PortMappings, hcn.LoadBalancerPortMapping{
			Protocol: p.Protocol, InternalPort: p.Internal, ExternalPort: p.External,
			DistributionType: hcn.LoadBalancerDistribution(p.Distribution), Flags: hcn.LoadBalancerPortMappingFlags(p.Flags),
		})
	}
	return to
}
