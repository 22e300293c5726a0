// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"net/netip"

	utilnet "k8s.io/utils/net"
)

// parseAddr parses an address as Kubernetes does: numbers with leading zeros are decimal,
// an IPv4-mapped IPv6 address becomes an IPv4 address, and zones are not allowed.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		a, _ = netip.AddrFromSlice(utilnet.ParseIPSloppy(s))
	}
	return a.Unmap(), a.IsValid() && a.Zone() == ""
}

// parsePrefix parses a CIDR by the rules of parseAddr, and clears the host bits. It
// rejects a prefix of IPv4-mapped addresses, because its IP family is unclear.
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
