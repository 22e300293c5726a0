// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/internal/distinct"
)

// Family is an IP family. The zero value means no family.
type Family uint8

// The IP families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of an address, or 0 for the zero Addr. An IPv4-mapped IPv6
// address counts as IPv4.
func FamilyOf(a netip.Addr) Family {
	switch {
	case !a.IsValid():
		return 0
	case a.Unmap().Is4():
		return IPv4
	default:
		return IPv6
	}
}

// String returns the name that the Kubernetes API uses: "IPv4" or "IPv6".
func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	default:
		return fmt.Sprintf("Family(%d)", uint8(f))
	}
}

// MarshalText returns the same name as String.
func (f Family) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText accepts "IPv4" and "IPv6".
func (f *Family) UnmarshalText(text []byte) error {
	switch string(text) {
	case "IPv4":
		*f = IPv4
	case "IPv6":
		*f = IPv6
	default:
		return fmt.Errorf("unknown IP family %q", text)
	}
	return nil
}

// IPSet holds addresses by family. V4 has IPv4 addresses and V6 has IPv6 addresses, in
// the order in which they were added. No address is IPv4-mapped or has a zone.
type IPSet struct {
	V4 []netip.Addr `json:",omitempty"`
	V6 []netip.Addr `json:",omitempty"`
}

// NewIPSet returns a set of the given addresses. Addresses of one family keep their
// order. NewIPSet unmaps IPv4-mapped addresses and drops duplicates.
func NewIPSet(addrs ...netip.Addr) IPSet {
	var s IPSet
	var seen distinct.Set[netip.Addr]
	for _, a := range addrs {
		if a = a.Unmap(); a.IsValid() && seen.Add(a) {
			s.append(a)
		}
	}
	return s
}

// Add appends an address to the list of its family. It ignores invalid addresses and
// duplicates. It searches the list, so NewIPSet is faster for many addresses.
func (s *IPSet) Add(a netip.Addr) {
	if a = a.Unmap(); a.IsValid() && !slices.Contains(s.Family(FamilyOf(a)), a) {
		s.append(a)
	}
}

func (s *IPSet) append(a netip.Addr) {
	if a.Is4() {
		s.V4 = append(s.V4, a)
	} else {
		s.V6 = append(s.V6, a)
	}
}

// Family returns the addresses of family f.
func (s *IPSet) Family(f Family) []netip.Addr {
	switch f {
	case IPv4:
		return s.V4
	case IPv6:
		return s.V6
	default:
		return nil
	}
}

// IsZero reports whether the set is empty.
func (s IPSet) IsZero() bool { return len(s.V4)+len(s.V6) == 0 }

// All yields every address, IPv4 first.
func (s *IPSet) All() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, list := range [...][]netip.Addr{s.V4, s.V6} {
			for _, a := range list {
				if !yield(a) {
					return
				}
			}
		}
	}
}

// The method equal reports whether both sets have the same addresses in the same order.
func (s *IPSet) equal(o *IPSet) bool {
	return slices.Equal(s.V4, o.V4) && slices.Equal(s.V6, o.V6)
}
