// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/remote"
	"github.com/prometheus/client_golang/prometheus"
)

// newServerCollector returns a collector of the server's statistics.
func newServerCollector(s *remote.Server) prometheus.Collector {
	metric := func(kind prometheus.ValueType, name, help string, of func(transport.Stats) float64) serverMetric {
		return serverMetric{prometheus.NewDesc(prometheus.BuildFQName("kpng", "server", name), help, nil, nil), kind, of}
	}
	return &serverCollector{s.Stats, []serverMetric{
		metric(prometheus.GaugeValue, "streams", "Open streams.",
			func(s transport.Stats) float64 { return float64(s.Streams) }),
		metric(prometheus.CounterValue, "views_total", "Service views computed and marshalled.",
			func(s transport.Stats) float64 { return float64(s.Views) }),
		metric(prometheus.CounterValue, "values_total", "Services and endpoints marshalled, each once for all clients.",
			func(s transport.Stats) float64 { return float64(s.Values) }),
		metric(prometheus.CounterValue, "sent_bytes_total", "Bytes of sent messages, without framing and encryption.",
			func(s transport.Stats) float64 { return float64(s.Bytes) }),
		metric(prometheus.CounterValue, "refused_total", "Connections and streams refused because of a limit.",
			func(s transport.Stats) float64 { return float64(s.Refused) }),
		metric(prometheus.CounterValue, "stalled_total", "Connections closed because the client stopped reading.",
			func(s transport.Stats) float64 { return float64(s.Stalled) }),
	}}
}

// serverCollector reads the statistics only once for all metrics of a scrape.
type serverCollector struct {
	stats   func() transport.Stats
	metrics []serverMetric
}

type serverMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(transport.Stats) float64
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
