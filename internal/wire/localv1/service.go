// SPDX-License-Identifier: Apache-2.0

package localv1

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/plain"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"
)

// FromService returns the wire form of s.
func FromService(s *api.Service) *Service {
	w := &Service{
		Namespace: s.Namespace,
		Name:      s.Name,
		Type:      string(s.Type),
		IPs: &ServiceIPs{
			ClusterIPs:      fromIPSet(s.IPs.ClusterIPs),
			ExternalIPs:     fromIPSetUnlessEmpty(s.IPs.ExternalIPs),
			Headless:        s.IPs.Headless,
			LoadBalancerIPs: fromIPSetUnlessEmpty(s.IPs.LoadBalancerIPs),
			ProxiedIPs:      fromIPSetUnlessEmpty(s.IPs.ProxiedIPs),
		},
		MapIP:                  s.AllPorts,
		Ports:                  convert(s.Ports, fromPort),
		ExternalTrafficToLocal: s.ExternalTrafficToLocal,
		Labels:                 s.Labels,
		Annotations:            s.Annotations,
		IPFilters:              convert(s.SourceRanges, fromFilter),
		InternalTrafficToLocal: s.InternalTrafficToLocal,
		LoadBalancerClass:      s.LoadBalancerClass,
		HealthCheckNodePort:    s.HealthCheckNodePort,
		Algorithm:              Algorithm(s.Algorithm),
		ResetConnections:       s.ResetConnections,
		UID:                    string(s.UID),
		IPFamilies:             convert(s.IPFamilies, fromFamily),
	}
	if s.AffinitySeconds != 0 {
		w.SessionAffinity = &Service_ClientIP{ClientIP: &ClientIPAffinity{TimeoutSeconds: s.AffinitySeconds}}
	}
	if !s.Created.IsZero() {
		w.Created = timestamppb.New(s.Created)
	}
	return w
}

// FromView returns the wire form of v, but without endpoints.
func FromView(v *api.View) *Service {
	w := FromService(v.Service)
	w.Unusable = convert(v.Unusable, func(p *api.PortFamily) *PortFamily {
		return &PortFamily{Protocol: Protocol(p.Protocol), Port: p.Port, Family: Family(p.Family)}
	})
	w.Lost = convert(v.Lost, func(l *api.LostClaim) *LostClaim {
		return &LostClaim{
			IP: fromAddr(l.IP), Family: Family(l.Family), Protocol: Protocol(l.Protocol), Port: l.Port,
			WinnerNamespace: l.Winner.Namespace, WinnerName: l.Winner.Name,
		}
	})
	return w
}

// ToService converts x to an api.Service. An error names the field that cannot be read.
func (x *Service) ToService() (*api.Service, error) {
	s := &api.Service{
		Namespace:              x.GetNamespace(),
		Name:                   x.GetName(),
		Type:                   api.ServiceType(x.GetType()),
		AllPorts:               x.GetMapIP(),
		Ports:                  convertPointers(x.GetPorts(), toPort),
		ExternalTrafficToLocal: x.GetExternalTrafficToLocal(),
		InternalTrafficToLocal: x.GetInternalTrafficToLocal(),
		Labels:                 x.GetLabels(),
		Annotations:            x.GetAnnotations(),
		LoadBalancerClass:      x.GetLoadBalancerClass(),
		HealthCheckNodePort:    x.GetHealthCheckNodePort(),
		Algorithm:              api.Algorithm(x.GetAlgorithm()),
		ResetConnections:       x.GetResetConnections(),
		UID:                    types.UID(x.GetUID()),
		IPFamilies:             convert(x.GetIPFamilies(), func(f *Family) api.Family { return api.Family(*f) }),
	}
	texts := []string{s.Namespace, s.Name, string(s.Type), s.LoadBalancerClass, string(s.UID)}
	for _, p := range s.Ports {
		texts = append(texts, p.Name, p.TargetPortName, p.AppProtocol)
	}
	if err := errors.Join(plain.Check(texts...), plain.CheckMap(s.Labels)); err != nil {
		return nil, fmt.Errorf("service: %w", err)
	}
	if t := x.GetCreated(); t != nil {
		s.Created = t.AsTime()
	}
	s.AffinitySeconds = x.GetClientIP().GetTimeoutSeconds()
	ips := x.GetIPs()
	s.IPs.Headless = ips.GetHeadless()
	for _, set := range [...]struct {
		to   *api.IPSet
		from *IPSet
	}{
		{&s.IPs.ClusterIPs, ips.GetClusterIPs()},
		{&s.IPs.ExternalIPs, ips.GetExternalIPs()},
		{&s.IPs.LoadBalancerIPs, ips.GetLoadBalancerIPs()},
		{&s.IPs.ProxiedIPs, ips.GetProxiedIPs()},
	} {
		addrs, err := set.from.toAddrs()
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", s.Key(), err)
		}
		*set.to = api.NewIPSet(addrs...)
	}
	for _, f := range x.GetIPFilters() {
		filter, err := f.toFilter()
		if err != nil {
			return nil, fmt.Errorf("service %s: filter: %w", s.Key(), err)
		}
		s.SourceRanges = append(s.SourceRanges, filter)
	}
	return s, nil
}

// ToView converts x to a view without endpoints. An error names the field that cannot be
// read.
func (x *Service) ToView() (*api.View, error) {
	s, err := x.ToService()
	if err != nil {
		return nil, err
	}
	v := &api.View{
		Service: s,
		Unusable: convertPointers(x.GetUnusable(), func(p *PortFamily) api.PortFamily {
			return api.PortFamily{Protocol: api.Protocol(p.GetProtocol()), Port: p.GetPort(), Family: api.Family(p.GetFamily())}
		}),
	}
	for _, l := range x.GetLost() {
		lost := api.LostClaim{
			Claim:  api.Claim{Family: api.Family(l.GetFamily()), Protocol: api.Protocol(l.GetProtocol()), Port: l.GetPort()},
			Winner: types.NamespacedName{Namespace: l.GetWinnerNamespace(), Name: l.GetWinnerName()},
		}
		if err := plain.Check(lost.Winner.Namespace, lost.Winner.Name); err != nil {
			return nil, fmt.Errorf("service %s: lost claim: %w", s.Key(), err)
		}
		if l.GetIP() != "" {
			if lost.IP, err = netip.ParseAddr(l.GetIP()); err != nil {
				return nil, fmt.Errorf("service %s: lost claim: %w", s.Key(), err)
			}
		}
		v.Lost = append(v.Lost, lost)
	}
	return v, nil
}

func fromPort(p *api.PortMapping) *PortMapping {
	return &PortMapping{
		Name: p.Name, Protocol: Protocol(p.Protocol), Port: p.Port, NodePort: p.NodePort,
		TargetPort: p.TargetPort, TargetPortName: p.TargetPortName, AppProtocol: p.AppProtocol,
	}
}

func toPort(x *PortMapping) api.PortMapping {
	return api.PortMapping{
		Name: x.GetName(), Protocol: api.Protocol(x.GetProtocol()), Port: x.GetPort(), NodePort: x.GetNodePort(),
		TargetPort: x.GetTargetPort(), TargetPortName: x.GetTargetPortName(), AppProtocol: x.GetAppProtocol(),
	}
}

func fromFamily(f *api.Family) Family { return Family(*f) }

func fromFilter(f *api.SourceRanges) *IPFilter {
	return &IPFilter{
		TargetIPs:    fromIPSetUnlessEmpty(f.TargetIPs),
		NodePorts:    f.NodePorts,
		SourceRanges: convert(f.Prefixes, func(p *netip.Prefix) string { return p.String() }),
	}
}

func (x *IPFilter) toFilter() (f api.SourceRanges, err error) {
	addrs, err := x.GetTargetIPs().toAddrs()
	if err != nil {
		return f, err
	}
	f.TargetIPs = api.NewIPSet(addrs...)
	f.NodePorts = x.GetNodePorts()
	f.Prefixes, err = toPrefixes(x.GetSourceRanges())
	return f, err
}
