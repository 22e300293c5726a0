// SPDX-License-Identifier: Apache-2.0

package statuspage

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/report"
	"k8s.io/apimachinery/pkg/types"
)

// maxTrafficAge is the maximum age of traffic that one page of a list has read and later pages
// use.
const maxTrafficAge = 10 * time.Second

// pageTraffic is the traffic of all services by service port. The next pages of a list use
// it.
type pageTraffic struct {
	sync.Mutex
	read     time.Time
	services map[types.NamespacedName][]report.Traffic
}

// trafficOfPage returns the traffic of all services by service port. The first page of a
// list reads the dataplane. Other pages usually do not, because reading takes long with
// many services.
func (h *Handler) trafficOfPage(ctx context.Context, isFirst, isLast bool) (map[types.NamespacedName][]report.Traffic, error) {
	h.pages.Lock()
	defer h.pages.Unlock()
	all := h.pages.services
	if isFirst || all == nil || time.Since(h.pages.read) > maxTrafficAge {
		var err error
		if all, err = h.traffic(ctx, false, func(types.NamespacedName) bool { return true }); err != nil {
			return nil, err
		}
		h.pages.read = time.Now()
	}
	h.pages.services = all
	if isLast {
		h.pages.services = nil
	}
	return all, nil
}

// TrafficOf returns a function for the field Handler.Traffic. The function reads this
// counter.
func TrafficOf(c backends.Counter) func(context.Context, func(types.NamespacedName, report.Traffic) bool) error {
	return func(ctx context.Context, yield func(types.NamespacedName, report.Traffic) bool) error {
		return c.Stats(ctx, func(s backends.Stats) bool {
			t := report.Traffic{
				TrafficID:   report.TrafficID{Port: s.Port, Endpoint: s.Endpoint},
				Connections: s.Connections, Active: s.Active, FromClients: s.FromClients, ToClients: s.ToClients,
			}
			if s.Protocol != 0 {
				t.Protocol = s.Protocol.String()
			}
			return yield(s.Service, t)
		})
	}
}

// traffic returns the traffic of each port of the selected services, sorted by port. If
// byEndpoint is true, it returns the traffic of each endpoint of each port, sorted by
// port and endpoint.
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
