// SPDX-License-Identifier: Apache-2.0

// Package collector shows what a [remote.Server] does as Prometheus metrics.
package collector

import (
	"github.com/kpng-project/kpng/remote"
	"github.com/prometheus/client_golang/prometheus"
)

// New returns a collector of the server's statistics, for the caller to register.
func New(s *remote.Server) prometheus.Collector {
	metric := func(kind prometheus.ValueType, name, help string, of func(remote.Stats) float64) serverMetric {
		return serverMetric{prometheus.NewDesc(prometheus.BuildFQName("kpng", "server", name), help, nil, nil), kind, of}
	}
	return &serverCollector{s.Stats, []serverMetric{
		metric(prometheus.GaugeValue, "streams", "Streams that are open.",
			func(s remote.Stats) float64 { return float64(s.Streams) }),
		metric(prometheus.CounterValue, "views_total", "Views of services that were computed and marshalled.",
			func(s remote.Stats) float64 { return float64(s.Views) }),
		metric(prometheus.CounterValue, "values_total", "Services and endpoints that were marshalled, for however many clients.",
			func(s remote.Stats) float64 { return float64(s.Values) }),
		metric(prometheus.CounterValue, "sent_bytes_total", "Bytes of messages that were sent, without framing and encryption.",
			func(s remote.Stats) float64 { return float64(s.Bytes) }),
		metric(prometheus.CounterValue, "refused_total", "Connections and streams that a limit did not admit.",
			func(s remote.Stats) float64 { return float64(s.Refused) }),
		metric(prometheus.CounterValue, "stalled_total", "Connections that were closed because the client took nothing.",
			func(s remote.Stats) float64 { return float64(s.Stalled) }),
	}}
}

// serverCollector reads the statistics once for each collection.
type serverCollector struct {
	stats   func() remote.Stats
	metrics []serverMetric
}

type serverMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(remote.Stats) float64
}

// Describe implements prometheus.Collector.
func (c *serverCollector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		to <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *serverCollector) Collect(to chan<- prometheus.Metric) {
	stats := c.stats()
	for _, m := range c.metrics {
		to <- prometheus.MustNewConstMetric(m.desc, m.kind, m.of(stats))
	}
}
