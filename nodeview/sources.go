// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// Sources says who may use a frontend (Service.spec.loadBalancerSourceRanges).
// Its zero value lets everybody in.
type Sources struct {
	// Restricted says that only sources in Ranges get in; if there are none,
	// nobody does.
	Restricted bool
	// Ranges are those of the frontend's family.
	Ranges []netip.Prefix `json:",omitempty"`
	// Own are the service's load-balancer addresses of the frontend's family.
	// As sources, they get in where a range admits this node: on a node that has
	// such an address on an interface, what it sends there comes from there.
	Own []netip.Addr `json:",omitempty"`
}

// sourceRanges returns who may use the service's frontends at addr: where
// filters name the address, whom any of them names; otherwise everybody. A /0
// is everybody in its family. Ranges of the other family only let nobody in.
func sourceRanges(svc *api.Service, addr netip.Addr) Sources {
	var s Sources
	for i := range svc.SourceRanges {
		filter := &svc.SourceRanges[i]
		if !addr.IsValid() || !filter.TargetIPs.Contains(addr) {
			continue
		}
		s.Restricted = true
		for _, r := range filter.Prefixes {
			if r.Addr().BitLen() != addr.BitLen() {
				continue
			}
			if r.Bits() == 0 {
				return Sources{}
			}
			s.Ranges = append(s.Ranges, r)
		}
	}
	if s.Restricted {
		s.Own = svc.IPs.LoadBalancerIPs.Family(api.FamilyOf(addr))
	}
	return s
}

// Prefixes returns the sources that get in on a node with the addresses
// nodeAddrs: the ranges, and the service's own addresses if a range admits the
// node. It says nothing unless s is Restricted.
func (s *Sources) Prefixes(nodeAddrs []netip.Addr) []netip.Prefix {
	out := slices.Clone(s.Ranges)
	if slices.ContainsFunc(nodeAddrs, s.contains) {
		for _, a := range s.Own {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return out
}

// contains reports whether a is in one of the ranges.
func (s *Sources) contains(a netip.Addr) bool {
	return slices.ContainsFunc(s.Ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}
