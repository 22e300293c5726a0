// SPDX-License-Identifier: Apache-2.0

// Package collector shows what a userspace backend does as Prometheus metrics.
// It is apart from the backend, so that who embeds that links no Prometheus.
package collector

import (
	"iter"
	"strconv"

	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/prometheus/client_golang/prometheus"
)

// New returns a collector of what stats yields, for the caller to register. Each
// metric has the labels namespace, service, protocol and port.
func New(stats func() iter.Seq[userspace.PortStats]) prometheus.Collector {
	describe := func(kind prometheus.ValueType, name, help string, of func(*userspace.PortStats) int64) metric {
		return metric{prometheus.NewDesc(prometheus.BuildFQName("kpng", "userspace", name), help, []string{"namespace", "service", "protocol", "port"}, nil), kind, of}
	}
	return &collector{stats, []metric{
		describe(prometheus.CounterValue, "connections_total", "TCP connections and UDP clients that came.",
			func(s *userspace.PortStats) int64 { return s.Connections }),
		describe(prometheus.GaugeValue, "connections_active", "TCP connections and UDP clients that have not ended.",
			func(s *userspace.PortStats) int64 { return s.Active }),
		describe(prometheus.CounterValue, "dial_failures_total", "Times that an endpoint did not take a connection or a datagram.",
			func(s *userspace.PortStats) int64 { return s.DialFailures }),
		describe(prometheus.CounterValue, "sent_bytes_total", "Bytes sent to endpoints.",
			func(s *userspace.PortStats) int64 { return s.BytesToEndpoints }),
		describe(prometheus.CounterValue, "received_bytes_total", "Bytes received from endpoints.",
			func(s *userspace.PortStats) int64 { return s.BytesFromEndpoints }),
	}}
}

type collector struct {
	stats   func() iter.Seq[userspace.PortStats]
	metrics []metric
}

type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*userspace.PortStats) int64
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		to <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	for s := range c.stats() {
		for _, m := range c.metrics {
			to <- prometheus.MustNewConstMetric(m.desc, m.kind, float64(m.of(&s)),
				s.Service.Namespace, s.Service.Name, s.Protocol.String(), strconv.Itoa(int(s.Port)))
		}
	}
}
