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
	// Ranges are the source ranges of the frontend's family. Frontends of a view share lists
	// of ranges in memory.
	Ranges []netip.Prefix `json:",omitempty"`
	// Own are the service's load-balancer addresses of the frontend's family. If a range
	// contains an address of this node, the addresses in Own are also admitted as sources.
	// If an interface of the node has an address in Own, the node's packets to this address
	// have this address also as their source.
	Own []netip.Addr `json:",omitempty"`
}

// sourcesByAddress returns the sources that the service admits to its frontends. The keys
// are the addresses for which svc.SourceRanges has ranges. Only sources in these ranges are
// admitted. If all ranges for an address are of the other family, no source is admitted.
// The range /0 admits all sources of its family. The addresses 0.0.0.0 and :: stand for
// node ports.
//
// Addresses of one element of svc.SourceRanges share their lists of ranges, because a
// service may have many addresses and many ranges.
func sourcesByAddress(svc *api.Service) map[netip.Addr]Sources {
	if len(svc.SourceRanges) == 0 {
		return nil
	}
	sources := map[netip.Addr]Sources{}
	for i := range svc.SourceRanges {
		filter := &svc.SourceRanges[i]
		for _, family := range [...]api.Family{api.IPv4, api.IPv6} {
			addrs := filter.TargetIPs.Family(family)
			if filter.NodePorts {
				addrs = append(addrs, anyAddr(family))
			}
			if len(addrs) == 0 {
				continue
			}
			one := Sources{Restricted: true, Ranges: rangesOf(filter.Prefixes, family), Own: svc.IPs.LoadBalancerIPs.Family(family)}
			if slices.ContainsFunc(one.Ranges, func(r netip.Prefix) bool { return r.Bits() == 0 }) {
				one = Sources{}
			}
			for _, addr := range addrs {
				s := one
				switch other, ok := sources[addr]; {
				case ok && !other.Restricted:
					s = other
				case ok && s.Restricted:
					s.Ranges = append(slices.Clip(other.Ranges), one.Ranges...)
				}
				sources[addr] = s
			}
		}
	}
	return sources
}

// anyAddr returns the unspecified address of a family. No frontend has this address.
func anyAddr(family api.Family) netip.Addr {
	if family == api.IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// rangesOf returns the prefixes of a family. It copies the prefixes only if prefixes of
// the other family are between them.
func rangesOf(prefixes []netip.Prefix, family api.Family) []netip.Prefix {
	isOf := func(p netip.Prefix) bool { return p.Addr().Is4() == (family == api.IPv4) }
	begin := slices.IndexFunc(prefixes, isOf)
	if begin < 0 {
		return nil
	}
	end := begin
	for end < len(prefixes) && isOf(prefixes[end]) {
		end++
	}
	ranges := prefixes[begin:end:end]
	for _, p := range prefixes[end:] {
		if isOf(p) {
			ranges = append(ranges, p)
		}
	}
	return ranges
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
