// SPDX-License-Identifier: Apache-2.0

package nodeaddrs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// selection is a parsed nodeaddr.Selection.
type selection struct {
	primary, all bool
	cidrs        []netip.Prefix
}

func parseSelection(list []string) (selection, error) {
	s := selection{primary: len(list) == 0}
	for _, item := range list {
		switch item = strings.TrimSpace(item); item {
		case "primary":
			s.primary = true
		case "all":
			s.all = true
		case "localhost":
			s.cidrs = append(s.cidrs, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
		default:
			prefix, err := netip.ParsePrefix(item)
			if err != nil {
				return selection{}, fmt.Errorf("node-port addresses %q: not primary, all, localhost or a CIDR", item)
			}
			s.cidrs = append(s.cidrs, prefix.Masked())
		}
	}
	return s, nil
}

func (s *selection) of(machine, primary []netip.Addr) []netip.Addr {
	var selected []netip.Addr
	if s.primary {
		selected = slices.Clone(primary)
	}
	for _, a := range machine {
		if s.admits(a) {
			selected = append(selected, a)
		}
	}
	return selected
}

func (s *selection) admits(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	if s.all && !confined(a) {
		return true
	}
	return slices.ContainsFunc(s.cidrs, func(p netip.Prefix) bool {
		return p.Contains(a) && (!confined(a) || confined(p.Masked().Addr()))
	})
}

// confined reports whether an address is a loopback or link-local address.
func confined(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }
