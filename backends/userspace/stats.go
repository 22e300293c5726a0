// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// PortStats is what a port of a service has done since the Backend first served
// it.
type PortStats struct {
	Service  types.NamespacedName
	Protocol api.Protocol
	Port     int32
	// Connections are the TCP connections and UDP clients that came.
	Connections int64
	// Active are those of them that have not ended.
	Active int64
	// DialFailures counts how often an endpoint did not take a connection, or was
	// not there for a datagram.
	DialFailures int64
	// BytesToEndpoints and BytesFromEndpoints are the bytes that were moved, those
	// of headers not counted.
	BytesToEndpoints, BytesFromEndpoints int64
}

// Stats yields what each port of each service has done, in order of service,
// protocol and port. It may be called at any time.
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
