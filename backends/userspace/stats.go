// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// PortStats are the statistics of a service port since the Backend first had it.
type PortStats struct {
	Service  types.NamespacedName
	Protocol api.Protocol
	Port     int32
	// Connections counts TCP connections and UDP clients.
	Connections int64
	// Active is the number of TCP connections and UDP clients that have not ended.
	Active int64
	// DialFailures counts failed attempts to send a connection or a datagram to an endpoint.
	DialFailures int64
	// BytesToEndpoints and BytesFromEndpoints count payload bytes.
	BytesToEndpoints, BytesFromEndpoints int64
}

// Stats yields the statistics of each port, ordered by service, protocol and port. It is
// safe for concurrent use.
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
		return cmp.Or(api.CompareKeys(a.Service, b.Service), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	return slices.Values(all)
}
