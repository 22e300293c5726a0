// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"fmt"
	"math"
	"testing"

	"github.com/kpng-project/kpng/api"
)

// group returns slices with n ready endpoints of a family, one that is not ready, and one
// that drains.
func group(family api.Family, n int) (all []*api.EndpointSlice) {
	slice := &api.EndpointSlice{Family: family, Endpoints: []api.SliceEndpoint{{}, {Conditions: api.Conditions{Ready: true, Drain: true}}}}
	for range n {
		if len(slice.Endpoints) == 100 {
			all = append(all, slice)
			slice = &api.EndpointSlice{Family: family}
		}
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{Weight: 7, Conditions: api.Conditions{Ready: true}})
	}
	return append(all, slice)
}

func total(group []*api.EndpointSlice, family api.Family) (sum int64) {
	for e := range endpoints(group, family) {
		if e.Ready && !e.Drain {
			sum += int64(e.Weight)
		}
	}
	return sum
}

func TestSharesDoNotDependOnNumbersOfEndpoints(t *testing.T) {
	for _, weights := range [][]int64{{1, 9}, {9, 1}, {1, 1}, {50, 950}, {1_000_000, 1_000_000}} {
		for _, counts := range [][]int{{1, 1}, {3, 7}, {1, 1000}, {1000, 1}, {997, 1009}} {
			t.Run(fmt.Sprint(weights, counts), func(t *testing.T) {
				groups := [][]*api.EndpointSlice{
					append(group(api.IPv4, counts[0]), group(api.IPv6, 5)...),
					append(group(api.IPv4, counts[1]), group(api.IPv6, 1)...),
				}
				Divide(weights, groups)
				want := float64(weights[0]) / float64(weights[0]+weights[1])
				for _, family := range []api.Family{api.IPv4, api.IPv6} {
					a, b := total(groups[0], family), total(groups[1], family)
					got := float64(a) / float64(a+b)
					if math.Abs(got/want-1) > 0.01 {
						t.Errorf("%s: the first group has %v of the traffic, want %v", family, got, want)
					}
				}
				for i := range groups {
					smallest, largest := int32(math.MaxInt32), int32(0)
					for e := range endpoints(groups[i], api.IPv4) {
						if e.Ready && !e.Drain {
							smallest, largest = min(smallest, e.Weight), max(largest, e.Weight)
						}
					}
					if smallest < 1 || largest > 65535 || largest-smallest > 1 {
						t.Errorf("group %d has weights of %d to %d", i, smallest, largest)
					}
				}
			})
		}
	}
}

func TestEmptyGroups(t *testing.T) {
	groups := [][]*api.EndpointSlice{group(api.IPv4, 2), group(api.IPv4, 0), group(api.IPv4, 2), nil}
	Divide([]int64{1, 8, 0, 5}, groups)
	if got := total(groups[0], api.IPv4); got != shares {
		t.Errorf("the only group with endpoints has %d shares, want %d", got, shares)
	}
	if got := total(groups[2], api.IPv4); got != 0 {
		t.Errorf("the group with weight 0 has %d shares, want none", got)
	}
}
