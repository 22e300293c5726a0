// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// Sources describe the clients that may use a frontend, by source address
// (Service.spec.loadBalancerSourceRanges). The zero value admits all sources.
type Sources struct {
	// Restricted means that only sources in Ranges and, on some nodes, in Own are admitted.
	// If Ranges is empty, no source is admitted.
	Restricted bool
	// Ranges are the source ranges of the frontend's family.
	Ranges []netip.Prefix `json:",omitempty"`
	// Own are the service's load-balancer addresses of the frontend's family. If a range
	// contains an address of this node, the addresses in Own are also admitted as sources.
	// If an interface of the node has an address in Own, the node's packets to this address
	// have the same address as their source.
	Own []netip.Addr `json:",omitempty"`
}

// sourceRanges returns the sources that the service admits to its frontends at addr. If
// svc.SourceRanges has ranges for addr, only sources in these ranges are admitted. If all
// these ranges are of the other family, no source is admitted. The range /0 admits all
// sources of its family.
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

// Prefixes returns the admitted sources on a node with the addresses nodeAddrs: Ranges,
// and also Own if a range contains an address of the node. If s.Restricted is false, the
// result has no meaning.
func (s *Sources) Prefixes(nodeAddrs []netip.Addr) []netip.Prefix {
	out := slices.Clone(s.Ranges)
	if slices.ContainsFunc(nodeAddrs, s.contains) {
		for _, a := range s.Own {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return out
}

func (s *Sources) contains(a netip.Addr) bool {
	return slices.ContainsFunc(s.Ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}
