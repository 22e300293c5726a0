// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/remote"
	"github.com/prometheus/client_golang/prometheus"
)

// serverStats are the values of one scrape.
type serverStats struct {
	transport.Stats
	behind        int
	behindSeconds float64
}

// newServerCollector returns a collector of the server's statistics. The function "behind"
// is that of a status page.
func newServerCollector(s *remote.Server, behind func() (streams int, seconds float64)) prometheus.Collector {
	stats := func() serverStats {
		streams, seconds := behind()
		return serverStats{s.Stats(), streams, seconds}
	}
	metric := func(kind prometheus.ValueType, name, help string, of func(serverStats) float64) serverMetric {
		return serverMetric{prometheus.NewDesc(prometheus.BuildFQName("kpng", "server", name), help, nil, nil), kind, of}
	}
	return &serverCollector{stats, []serverMetric{
		metric(prometheus.GaugeValue, "streams", "Open streams.",
			func(s serverStats) float64 { return float64(s.Streams) }),
		metric(prometheus.GaugeValue, "streams_behind", "Open streams whose clients do not have all changes.",
			func(s serverStats) float64 { return float64(s.behind) }),
		metric(prometheus.GaugeValue, "behind_seconds", "Age of the oldest change that a client with an open stream lacks.",
			func(s serverStats) float64 { return s.behindSeconds }),
		metric(prometheus.CounterValue, "views_total", "Service views computed and marshalled.",
			func(s serverStats) float64 { return float64(s.Views) }),
		metric(prometheus.CounterValue, "values_total", "Services and endpoints marshalled, each once for all clients.",
			func(s serverStats) float64 { return float64(s.Values) }),
		metric(prometheus.CounterValue, "sent_bytes_total", "Bytes of sent messages, without framing and encryption.",
			func(s serverStats) float64 { return float64(s.Bytes) }),
		metric(prometheus.CounterValue, "refused_total", "Connections and streams refused because of a limit.",
			func(s serverStats) float64 { return float64(s.Refused) }),
		metric(prometheus.CounterValue, "stalled_total", "Connections closed because the client stopped reading.",
			func(s serverStats) float64 { return float64(s.Stalled) }),
	}}
}

// serverCollector reads the statistics only once for all metrics of a scrape.
type serverCollector struct {
	stats   func() serverStats
	metrics []serverMetric
}

type serverMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(serverStats) float64
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
