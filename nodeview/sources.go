// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// Sources are the sources that may use a frontend
// (Service.spec.loadBalancerSourceRanges). The zero value admits all.
type Sources struct {
	// Restricted limits the sources to Ranges. If Ranges is empty, no source is admitted.
	Restricted bool
	// Ranges are the source ranges of the frontend's family.
	Ranges []netip.Prefix `json:",omitempty"`
	// Own are the service's load-balancer addresses of the frontend's family. They are
	// admitted as sources if a range admits this node. The reason is that the node uses
	// such an address as the source of packets to it if an interface of the node has it.
	Own []netip.Addr `json:",omitempty"`
}

// sourceRanges returns the sources that the service admits to its frontends at addr. If
// source ranges name addr, they are the union of those ranges; otherwise all are
// admitted. A /0 admits its whole family. If all ranges are of the other family, no
// source is admitted.
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

// Prefixes returns the sources that a node with the addresses nodeAddrs admits: the
// ranges, and the service's own addresses if a range admits the node. The result is
// meaningless unless s.Restricted is true.
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
