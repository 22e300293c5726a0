// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"k8s.io/apimachinery/pkg/types"
)

// PortStats has the statistics of a service port. Counting begins when the port is added.
type PortStats struct {
	Service  types.NamespacedName
	Protocol api.Protocol
	Port     int32
	// Connections is the number of TCP connections and UDP clients so far.
	Connections int64
	// Active is the number of current TCP connections and UDP clients.
	Active int64
	// DialFailures is the number of failed attempts to reach an endpoint.
	DialFailures int64
	// BytesToEndpoints and BytesFromEndpoints are numbers of payload bytes.
	BytesToEndpoints, BytesFromEndpoints int64
}

// Stats returns the current statistics of all ports, sorted by service, protocol and
// port. It is safe for concurrent use.
func (b *Backend) Stats() iter.Seq[PortStats] {
	var all []PortStats
	for _, p := range b.served.list() {
		all = append(all, PortStats{
			Service: p.service, Protocol: p.protocol, Port: p.number,
			Connections:        p.counters.connections.Load(),
			Active:             p.counters.active.Load(),
			DialFailures:       p.counters.dialFailures.Load(),
			BytesToEndpoints:   p.counters.bytesToEndpoints.Load(),
			BytesFromEndpoints: p.counters.bytesFromEndpoints.Load(),
		})
	}
	slices.SortFunc(all, func(a, b PortStats) int {
		return cmp.Or(ordering.Keys(a.Service, b.Service), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	return slices.Values(all)
}
