// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"net/netip"

	utilnet "k8s.io/utils/net"
)

// parseAddr reads an address as Kubernetes components do: numbers with leading
// zeros are decimal, IPv4 mapped into IPv6 is IPv4, and zones are not allowed.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		a, _ = netip.AddrFromSlice(utilnet.ParseIPSloppy(s))
	}
	return a.Unmap(), a.IsValid() && a.Zone() == ""
}

// parsePrefix reads a CIDR by the same rules; bits behind the prefix are
// cleared. A prefix of mapped addresses has no family and is refused.
func parsePrefix(s string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		_, n, err := utilnet.ParseCIDRSloppy(s)
		if err != nil {
			return netip.Prefix{}, false
		}
		a, _ := netip.AddrFromSlice(n.IP)
		ones, _ := n.Mask.Size()
		p = netip.PrefixFrom(a, ones)
	}
	return p.Masked(), p.IsValid() && !p.Addr().Is4In6()
}
