// SPDX-License-Identifier: Apache-2.0

package nodeaddr

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Selection selects addresses of a node. An address is selected if at least one field
// selects it. The zero value selects the same addresses as Primary.
//
// Loopback and link-local addresses are selected only by a CIDR within their own ranges,
// such as 127.0.0.0/8 or fe80::/10. A wider CIDR does not select them.
type Selection struct {
	// Primary selects the InternalIPs of the Node object or, if it has none, its
	// ExternalIPs. While the Node object is unknown, Primary selects the source addresses of
	// the machine's default routes, at most one per family.
	Primary bool
	// All selects every address of the machine, except loopback and link-local addresses.
	All bool
	// CIDRs select the addresses of the machine that are in at least one of these ranges.
	CIDRs []netip.Prefix
}

// ParseSelection parses a list of these items: primary, all, localhost, and CIDRs. The
// item localhost means 127.0.0.0/8 and ::1/128. An empty list means primary.
func ParseSelection(list []string) (Selection, error) {
	var s Selection
	for _, item := range list {
		switch item = strings.TrimSpace(item); item {
		case "primary":
			s.Primary = true
		case "all":
			s.All = true
		case "localhost":
			s.CIDRs = append(s.CIDRs, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
		default:
			prefix, err := netip.ParsePrefix(item)
			if err != nil {
				return Selection{}, fmt.Errorf("node-port addresses %q: not primary, all, localhost or a CIDR", item)
			}
			s.CIDRs = append(s.CIDRs, prefix.Masked())
		}
	}
	return s, nil
}

// String returns the items of s, separated by commas. ParseSelection parses these items.
func (s Selection) String() string {
	var list []string
	if s.primary() {
		list = append(list, "primary")
	}
	if s.All {
		list = append(list, "all")
	}
	for _, p := range s.CIDRs {
		list = append(list, p.String())
	}
	return strings.Join(list, ",")
}

func (s *Selection) primary() bool { return s.Primary || !s.All && len(s.CIDRs) == 0 }

func (s *Selection) of(machine, primary []netip.Addr) []netip.Addr {
	var selected []netip.Addr
	if s.primary() {
		selected = slices.Clone(primary)
	}
	for _, a := range machine {
		if s.admits(a) {
			selected = append(selected, a)
		}
	}
	return selected
}

func (s *Selection) admits(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	if s.All && !confined(a) {
		return true
	}
	return slices.ContainsFunc(s.CIDRs, func(p netip.Prefix) bool {
		return p.Contains(a) && (!confined(a) || confined(p.Masked().Addr()))
	})
}

// confined reports whether an address is a loopback or link-local address.
func confined(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }
