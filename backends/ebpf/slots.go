// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"cmp"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// slots are the slots of a list. A program chooses one of the slots 0 to n-1 at random.
// If the weights of the endpoints differ, the field others has a second endpoint for each
// slot. A program then uses the second endpoint with the probability Other / 65536. So
// endpoints get shares according to their weights (alias method of Walker and Vose), and
// the choice takes at most two look-ups for any weights.
type slots struct {
	endpoints, others []address
}

// othersFrom is an index of the map slots. The second endpoint of slot n of a list is at
// othersFrom + n.
const othersFrom = 1 << 31

// slotsOf returns the slots of endpoints.
func slotsOf(targets []nodeview.Target) slots {
	s := slots{endpoints: toAddresses(targets)}
	weight := func(t nodeview.Target) uint64 { return uint64(cmp.Or(t.Weight, api.DefaultWeight)) }
	if !slices.ContainsFunc(targets, func(t nodeview.Target) bool { return weight(t) != weight(targets[0]) }) {
		return s
	}
	s.others = slices.Clone(s.endpoints)
	// rest[i] is the share of endpoint i that no slot has yet. The share of a slot is
	// "total", so the n endpoints together have n times this share.
	rest, total := make([]uint64, len(targets)), uint64(0)
	for i, t := range targets {
		rest[i] = weight(t) * uint64(len(targets))
		total += weight(t)
	}
	// An endpoint that needs less than one slot is in small. An endpoint in large fills
	// the rest of that slot.
	var small, large []int
	for i := range rest {
		if rest[i] < total {
			small = append(small, i)
		} else {
			large = append(large, i)
		}
	}
	for len(small) > 0 && len(large) > 0 {
		i, j := small[len(small)-1], large[len(large)-1]
		small = small[:len(small)-1]
		// The endpoint with the smallest weight also gets connections.
		s.endpoints[i].Other = uint16(min((total-rest[i])*(1<<16)/total, 1<<16-1))
		s.others[i] = address{IP: s.endpoints[j].IP, Port: s.endpoints[j].Port}
		if rest[j] -= total - rest[i]; rest[j] < total {
			large, small = large[:len(large)-1], append(small, j)
		}
	}
	return s
}

// all yields each index and its slot.
func (s *slots) all() iter.Seq2[uint32, address] {
	return func(yield func(uint32, address) bool) {
		for i, a := range s.endpoints {
			if !yield(uint32(i), a) {
				return
			}
		}
		for i, a := range s.others {
			if !yield(othersFrom+uint32(i), a) {
				return
			}
		}
	}
}
