// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
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

// IPSet holds addresses, IPv4 before IPv6. Addresses of one family have the order in
// which they were added. No address is IPv4-mapped or has a zone. The zero value is the
// empty set. An IPSet is a value like a netip.Addr: copies are independent and cheap, and
// == compares the addresses and their order.
type IPSet struct {
	// packed has, for each address, the number of its bytes, 4 or 16, and then the bytes.
	// A service has several sets, most of them empty, so a small size matters.
	packed string
}

// NewIPSet returns a set of the given addresses. Addresses of one family keep their
// order. NewIPSet unmaps IPv4-mapped addresses, removes zones, and drops duplicates.
func NewIPSet(addrs ...netip.Addr) IPSet {
	var v4, v6 []byte
	var seen distinct.Set[netip.Addr]
	for _, a := range addrs {
		switch a = a.Unmap().WithZone(""); {
		case !a.IsValid() || !seen.Add(a):
		case a.Is4():
			ip := a.As4()
			v4 = append(append(v4, 4), ip[:]...)
		default:
			ip := a.As16()
			v6 = append(append(v6, 16), ip[:]...)
		}
	}
	return IPSet{string(append(v4, v6...))}
}

// Add replaces s by a set that also has the address a. It copies all addresses, so
// NewIPSet is faster for many.
func (s *IPSet) Add(a netip.Addr) { *s = NewIPSet(append(slices.Collect(s.All()), a)...) }

// Family returns the addresses of family f in a new list, or nil if there are none.
func (s IPSet) Family(f Family) (list []netip.Addr) {
	for rest := s.packed; rest != ""; {
		var a netip.Addr
		if a, rest = first(rest); FamilyOf(a) == f {
			list = append(list, a)
		}
	}
	return list
}

// first returns the first address of packed, and the rest.
func first(packed string) (a netip.Addr, rest string) {
	if packed[0] == 4 {
		var ip [4]byte
		n := copy(ip[:], packed[1:])
		return netip.AddrFrom4(ip), packed[1+n:]
	}
	var ip [16]byte
	n := copy(ip[:], packed[1:])
	return netip.AddrFrom16(ip), packed[1+n:]
}

// Len returns the number of addresses.
func (s IPSet) Len() (n int) {
	for range s.All() {
		n++
	}
	return n
}

// IsZero reports whether the set is empty.
func (s IPSet) IsZero() bool { return s == IPSet{} }

// Equal returns s == o. Package go-cmp uses this method.
func (s IPSet) Equal(o IPSet) bool { return s == o }

// All yields every address, IPv4 first.
func (s IPSet) All() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for rest := s.packed; rest != ""; {
			var a netip.Addr
			if a, rest = first(rest); !yield(a) {
				return
			}
		}
	}
}

// String returns the addresses like a list, for example [10.0.0.1 fd00::1].
func (s IPSet) String() string { return fmt.Sprint(slices.Collect(s.All())) }

// ipSetJSON is the JSON form of an IPSet.
type ipSetJSON struct {
	V4 []netip.Addr `json:",omitempty"`
	V6 []netip.Addr `json:",omitempty"`
}

// MarshalJSON returns the JSON form, which has a list for each family: V4 and V6.
func (s IPSet) MarshalJSON() ([]byte, error) {
	return json.Marshal(ipSetJSON{s.Family(IPv4), s.Family(IPv6)})
}

// UnmarshalJSON reads the JSON form.
func (s *IPSet) UnmarshalJSON(text []byte) error {
	var j ipSetJSON
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	*s = NewIPSet(append(j.V4, j.V6...)...)
	return nil
}
