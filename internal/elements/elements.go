// SPDX-License-Identifier: Apache-2.0

// Package elements counts what a proxy builds for a service. The packages that limit or
// batch services use these numbers as the size of a service.
package elements

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

// Elements counts what a proxy builds for a service. The memory and the time that a
// service costs are roughly proportional to Total.
type Elements struct {
	// Frontends is the number of addresses × ports. A node port counts once for each family.
	Frontends int64
	// Targets is the number of endpoints × ports. For [OfState], an EndpointSlice counts as one
	// more endpoint.
	Targets int64
	// SourceRanges is the number of source ranges.
	SourceRanges int64
}

// DefaultMax is the default limit for the elements of a service.
const DefaultMax = 1_000_000

// OfState returns the elements of the service in s, without computing a view. If the Service
// object is missing or has the type ExternalName, the service has no view and no elements.
func OfState(s *api.ServiceState) Elements {
	endpoints := len(s.Slices)
	for _, slice := range s.Slices {
		endpoints += len(slice.Endpoints)
	}
	return Of(s.Service, endpoints)
}

// OfView returns the elements of the view.
func OfView(view *api.View) Elements {
	return Of(view.Service, len(view.Endpoints)+len(view.Draining))
}

// Of returns the elements of a service with this number of endpoints. If s is nil, there
// are no elements.
func Of(s *api.Service, endpoints int) Elements {
	if s == nil || s.Type == api.ExternalName {
		return Elements{}
	}
	ports := int64(len(s.Ports))
	if s.AllPorts || ports == 0 {
		ports = 1
	}
	addresses := 0
	for _, ips := range Sets(s) {
		addresses += ips.Len()
	}
	e := Elements{Frontends: ports * int64(addresses), Targets: ports * int64(endpoints)}
	families := int64(len(s.Families()))
	for i := range s.Ports {
		if s.Ports[i].NodePort != 0 {
			e.Frontends += families
		}
	}
	for i := range s.SourceRanges {
		e.SourceRanges += int64(len(s.SourceRanges[i].Prefixes))
	}
	return e
}

// Sets returns the addresses of s that have frontends: cluster IPs (none for a headless
// service), load-balancer IPs, and external IPs.
func Sets(s *api.Service) [3]api.IPSet {
	sets := [3]api.IPSet{s.IPs.ClusterIPs, s.IPs.LoadBalancerIPs, s.IPs.ExternalIPs}
	if s.IPs.Headless {
		sets[0] = api.IPSet{}
	}
	return sets
}

// Addresses returns the addresses of family f in the results of Sets.
func Addresses(s *api.Service, f api.Family) (ips [3][]netip.Addr) {
	for i, set := range Sets(s) {
		ips[i] = set.Family(f)
	}
	return ips
}

// Total returns the sum of all elements.
func (e Elements) Total() int64 { return e.Frontends + e.Targets + e.SourceRanges }

// Check returns an error that contains the numbers if Total is greater than limit. A limit
// of 0 means DefaultMax.
func (e Elements) Check(limit int) error {
	if limit == 0 {
		limit = DefaultMax
	}
	if e.Total() <= int64(limit) {
		return nil
	}
	return fmt.Errorf("it needs %d elements, more than the limit of %d: %d of addresses × ports, %d of endpoints × ports, %d source ranges",
		e.Total(), limit, e.Frontends, e.Targets, e.SourceRanges)
}
