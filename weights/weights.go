// SPDX-License-Identifier: Apache-2.0

// Package weights divides the traffic of a service among groups of endpoints, such as the
// versions of a program. The weight of a group does not depend on its number of endpoints.
package weights

import "github.com/kpng-project/kpng/api"

// shares is the sum of the weights of all endpoints, if they are few. Dataplanes divide
// traffic so finely.
const shares = 4000

// Divide sets the weights of the endpoints in slices, which belong to one port of a service.
// The ready endpoints of groups[i] have together a share of the traffic in proportion to
// weights[i], which is 0 to 1,000,000, for each family. A group with weight 0 gets no new
// connections. If a group has no ready endpoint, the other groups share its traffic.
//
// The weights are exact to 1 % of a group's share, unless a group has so many endpoints and
// such a small share that its endpoints would need weights less than 1/65535 of others.
func Divide(weights []int64, groups [][]*api.EndpointSlice) {
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
		ready, sum, total := make([]int64, len(groups)), int64(0), int64(shares)
		for i := range groups {
			for e := range endpoints(groups[i], family) {
				if e.Drain = e.Drain || weights[i] == 0; e.Ready && !e.Drain {
					ready[i]++
				}
			}
			if ready[i] > 0 {
				sum += weights[i]
			}
		}
		for i, n := range ready {
			if n > 0 { // each endpoint has a weight of at least 1
				total = max(total, (n*sum+weights[i]-1)/weights[i])
			}
		}
		for i, n := range ready {
			share := weights[i] * total / max(sum, 1)
			for e := range endpoints(groups[i], family) {
				if e.Ready && !e.Drain {
					e.Weight = int32(min(max(share/n, 1), 65535))
					share, n = share-share/n, n-1
				}
			}
		}
	}
}

// endpoints yields the endpoints of a family.
func endpoints(group []*api.EndpointSlice, family api.Family) func(yield func(*api.SliceEndpoint) bool) {
	return func(yield func(*api.SliceEndpoint) bool) {
		for _, slice := range group {
			for i := range slice.Endpoints {
				if slice.Family == family && !yield(&slice.Endpoints[i]) {
					return
				}
			}
		}
	}
}
