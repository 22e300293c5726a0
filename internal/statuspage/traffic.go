// SPDX-License-Identifier: Apache-2.0

package statuspage

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/internal/report"
	"k8s.io/apimachinery/pkg/types"
)

// traffic returns the traffic of the selected services by service port or, if byEndpoint, by
// service port and endpoint, in this order.
func (h *Handler) traffic(ctx context.Context, byEndpoint bool, selected func(types.NamespacedName) bool) (map[types.NamespacedName][]report.Traffic, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	type id struct {
		service types.NamespacedName
		of      report.TrafficID
	}
	sums := map[id]*report.Traffic{}
	err := h.Traffic(ctx, func(service types.NamespacedName, t report.Traffic) bool {
		if !selected(service) {
			return true
		}
		if !byEndpoint {
			t.Endpoint = netip.AddrPort{}
		}
		if sum := sums[id{service, t.TrafficID}]; sum != nil {
			sum.Add(&t)
		} else {
			sums[id{service, t.TrafficID}] = &t
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	all := map[types.NamespacedName][]report.Traffic{}
	for id, sum := range sums {
		all[id.service] = append(all[id.service], *sum)
	}
	for _, list := range all {
		slices.SortFunc(list, func(a, b report.Traffic) int { return a.Compare(b.TrafficID) })
	}
	return all, nil
}
