// SPDX-License-Identifier: Apache-2.0

package localv1

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

func fromIPSet(s api.IPSet) *IPSet {
	return &IPSet{V4: convert(s.Family(api.IPv4), fromAddrIn), V6: convert(s.Family(api.IPv6), fromAddrIn)}
}

// fromIPSetUnlessEmpty returns the wire form of s, or nil if s is empty, so that JSON
// omits the field.
func fromIPSetUnlessEmpty(s api.IPSet) *IPSet {
	if s.IsZero() {
		return nil
	}
	return fromIPSet(s)
}

func (x *IPSet) toAddrs() ([]netip.Addr, error) {
	v4, err := toAddrs(x.GetV4(), api.IPv4)
	if err != nil {
		return nil, err
	}
	v6, err := toAddrs(x.GetV6(), api.IPv6)
	return append(v4, v6...), err
}

func toAddrs(list []string, family api.Family) ([]netip.Addr, error) {
	if len(list) == 0 {
		return nil, nil
	}
	addrs := make([]netip.Addr, len(list))
	for i, s := range list {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, err
		}
		if a = a.Unmap(); api.FamilyOf(a) != family || a.Zone() != "" {
			return nil, fmt.Errorf("%s is not an %s address", a, family)
		}
		addrs[i] = a
	}
	return addrs, nil
}

// fromAddr returns the address as text, or "" for the zero Addr.
func fromAddr(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func fromAddrIn(a *netip.Addr) string { return fromAddr(*a) }

func toPrefixes(list []string) ([]netip.Prefix, error) {
	if len(list) == 0 {
		return nil, nil
	}
	prefixes := make([]netip.Prefix, len(list))
	for i, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, err
		}
		prefixes[i] = p
	}
	return prefixes, nil
}

// convert applies f to each value. It returns nil for an empty list.
func convert[From, To any](list []From, f func(*From) To) []To {
	if len(list) == 0 {
		return nil
	}
	out := make([]To, len(list))
	for i := range list {
		out[i] = f(&list[i])
	}
	return out
}

// convertPointers converts a list of pointers with f. An empty list becomes nil.
func convertPointers[From, To any](list []*From, f func(*From) To) []To {
	return convert(list, func(x **From) To { return f(*x) })
}
