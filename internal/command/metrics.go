// SPDX-License-Identifier: Apache-2.0

package command

import "github.com/prometheus/client_golang/prometheus"

// SourceMetrics returns a collector of the state of a program's source. The function state
// reports whether the source has delivered the whole state once, whether it has lost its
// connection for more than three minutes, and how many services are refused or have
// invalid fields. The caller registers the collector.
func SourceMetrics(state func() (synced, stale bool, refused int)) prometheus.Collector {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("kpng_source_"+name, help, nil, nil)
	}
	return &sourceCollector{
		state:   state,
		synced:  desc("synced", "1 if the source has delivered the whole state once."),
		stale:   desc("stale", "1 if the source has had no connection for more than three minutes."),
		refused: desc("services_refused", "Services that are too large, or have invalid fields."),
	}
}

type sourceCollector struct {
	state                  func() (synced, stale bool, refused int)
	synced, stale, refused *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *sourceCollector) Describe(to chan<- *prometheus.Desc) {
	to <- c.synced
	to <- c.stale
	to <- c.refused
}

// Collect implements prometheus.Collector.
func (c *sourceCollector) Collect(to chan<- prometheus.Metric) {
	synced, stale, refused := c.state()
	to <- prometheus.MustNewConstMetric(c.synced, prometheus.GaugeValue, number(synced))
	to <- prometheus.MustNewConstMetric(c.stale, prometheus.GaugeValue, number(stale))
	to <- prometheus.MustNewConstMetric(c.refused, prometheus.GaugeValue, float64(refused))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
