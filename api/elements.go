// SPDX-License-Identifier: Apache-2.0

package api

import "fmt"

// Elements counts what a proxy builds for a service. The memory and the time that a
// service costs are roughly proportional to Total.
type Elements struct {
	// Frontends is the number of addresses × ports. A node port counts once for each family.
	Frontends int64
	// Targets is the number of endpoints × ports. In a [ServiceState], an EndpointSlice
	// counts as one more endpoint.
	Targets int64
	// SourceRanges is the number of source ranges.
	SourceRanges int64
}

// DefaultMaxElements is the default limit for the elements of a service.
const DefaultMaxElements = 1_000_000

// Elements returns the elements of the service, without computing a view. A service that
// has no view, because the Service object is missing or has the type ExternalName, has no
// elements.
func (s *ServiceState) Elements() Elements {
	endpoints := len(s.Slices)
	for _, slice := range s.Slices {
		endpoints += len(slice.Endpoints)
	}
	return s.Service.Elements(endpoints)
}

// Elements returns the elements of the view.
func (view *View) Elements() Elements {
	return view.Service.Elements(len(view.Endpoints) + len(view.Draining))
}

// Elements returns the elements of the service with this number of endpoints. A nil service
// has none.
func (s *Service) Elements(endpoints int) Elements {
	if s == nil || s.Type == ExternalName {
		return Elements{}
	}
	ports := int64(len(s.Ports))
	if s.AllPorts || ports == 0 {
		ports = 1
	}
	addresses := 0
	for _, family := range [...]Family{IPv4, IPv6} {
		for _, ips := range s.FrontendIPs(family) {
			addresses += len(ips)
		}
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

// Total returns the sum of all elements.
func (e Elements) Total() int64 { return e.Frontends + e.Targets + e.SourceRanges }

// Check returns an error that contains the numbers if Total is greater than limit. A limit
// of 0 means DefaultMaxElements.
func (e Elements) Check(limit int) error {
	if limit == 0 {
		limit = DefaultMaxElements
	}
	if e.Total() <= int64(limit) {
		return nil
	}
	return fmt.Errorf("it needs %d elements, more than the limit of %d: %d of addresses × ports, %d of endpoints × ports, %d source ranges",
		e.Total(), limit, e.Frontends, e.Targets, e.SourceRanges)
}
