// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sourcelists

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
)

// Ranges are source ranges of one family. Two values with the same ranges are equal. The
// order of the arguments of NewRanges does not matter.
type Ranges struct {
	family api.Family
	// records has the ranges, sorted. A record is the first address of a range, followed by
	// the prefix length.
	records string
}

// NewRanges returns the ranges in prefixes. All prefixes must be of the given family.
func NewRanges(family api.Family, prefixes []netip.Prefix) Ranges {
	sorted := make([]netip.Prefix, len(prefixes))
	for i, p := range prefixes {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, comparePrefixes)
	sorted = slices.Compact(sorted)
	records := make([]byte, 0, len(sorted)*recordLen(family))
	for _, p := range sorted {
		records = append(append(records, p.Addr().AsSlice()...), byte(p.Bits()))
	}
	return Ranges{family, string(records)}
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

func recordLen(family api.Family) int { return nft.AddrLen(family) + 1 }

// Len returns the number of ranges.
func (r Ranges) Len() int { return len(r.records) / recordLen(r.family) }

func (r Ranges) at(i int) netip.Prefix {
	record := r.records[i*recordLen(r.family) : (i+1)*recordLen(r.family)]
	addr, _ := netip.AddrFromSlice([]byte(record[:len(record)-1]))
	return netip.PrefixFrom(addr, int(record[len(record)-1]))
}

// slice returns the ranges from the index i up to, but not including, the index j.
func (r Ranges) slice(i, j int) Ranges {
	return Ranges{r.family, r.records[i*recordLen(r.family) : j*recordLen(r.family)]}
}

// difference returns the ranges that are only in a, and the ranges that are only in b.
func difference(a, b Ranges) (onlyA, onlyB []netip.Prefix) {
	i, j := 0, 0
	for i < a.Len() || j < b.Len() {
		order := -1
		switch {
		case i == a.Len():
			order = 1
		case j < b.Len():
			order = comparePrefixes(a.at(i), b.at(j))
		}
		if order < 0 {
			onlyA = append(onlyA, a.at(i))
		} else if order > 0 {
			onlyB = append(onlyB, b.at(j))
		}
		if order <= 0 {
			i++
		}
		if order >= 0 {
			j++
		}
	}
	return onlyA, onlyB
}

// overlap reports whether a range in the list a overlaps a range in the list b. Both
// lists are sorted.
func overlap(a, b []netip.Prefix) bool {
	for len(a) > 0 && len(b) > 0 {
		if a[0].Overlaps(b[0]) {
			return true
		}
		if comparePrefixes(a[0], b[0]) > 0 {
			a, b = b, a
		}
		a = a[1:] // b[0] begins after a[0] ends, and so do all later ranges of b
	}
	return false
}

// Range is a range of a list, as the kernel has it. The field List is the number of the
// list.
type Range struct {
	List   uint32
	Prefix netip.Prefix
}

// Key returns the key of the range in the kernel's set: the number of the list and the
// first address. The last octet of the number is the prefix length.
func (r Range) Key() []byte {
	key := binary.NativeEndian.AppendUint32(nil, r.List&^lengthMask|uint32(r.Prefix.Bits()))
	return append(key, r.Prefix.Addr().AsSlice()...)
}

// ParseKey returns the range with a key. If no range has this key, ok is false.
func ParseKey(key []byte) (r Range, ok bool) {
	if len(key) < 4 {
		return r, false
	}
	number := binary.NativeEndian.Uint32(key)
	addr, ok := netip.AddrFromSlice(key[4:])
	r = Range{number | lengthMask, netip.PrefixFrom(addr, int(number&lengthMask))}
	return r, ok && r.Prefix.IsValid() && r.Prefix.Bits() > 0 && r.Prefix == r.Prefix.Masked() && r.List>>8 > 0
}
