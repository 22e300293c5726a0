// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
)

// kubeProxyMetrics carry kube-proxy's names and meaning, as far as they apply
// to a proxy that does not rewrite its rules as a whole.
type kubeProxyMetrics struct {
	duration, full, partial prometheus.Histogram
	programming             prometheus.Histogram
	lastQueued, last        prometheus.Gauge
	changes                 prometheus.Counter
	pending                 prometheus.Gauge
}

func newKubeProxyMetrics() *kubeProxyMetrics {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "kubeproxy", Name: name, Help: help, Buckets: buckets})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "kubeproxy", Name: name, Help: help})
	}
	return &kubeProxyMetrics{
		duration:    histogram("sync_proxy_rules_duration_seconds", "How long a sync took.", syncBuckets),
		full:        histogram("sync_full_proxy_rules_duration_seconds", "How long a full sync took.", syncBuckets),
		partial:     histogram("sync_partial_proxy_rules_duration_seconds", "How long a partial sync took.", syncBuckets),
		programming: histogram("network_programming_duration_seconds", "Time from an endpoint change to its being programmed.", programmingBuckets),
		lastQueued:  gauge("sync_proxy_rules_last_queued_timestamp_seconds", "When a sync was last queued."),
		last:        gauge("sync_proxy_rules_last_timestamp_seconds", "When a sync last succeeded."),
		changes: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: "sync_proxy_rules_service_changes_total", Help: "Changes of services, their endpoints included.",
		}),
		pending: gauge("sync_proxy_rules_service_changes_pending", "Changes of services, their endpoints included, that wait for a sync."),
	}
}

func (m *kubeProxyMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.duration, m.full, m.partial, m.programming, m.lastQueued, m.last, m.changes, m.pending}
}

func (m *kubeProxyMetrics) synced(r sink.SyncResult) {
	m.duration.Observe(r.Duration.Seconds())
	switch {
	case r.Passed:
		m.full.Observe(r.PassDuration.Seconds())
	case !r.InPass:
		m.partial.Observe(r.Duration.Seconds())
	}
	m.changes.Add(float64(r.Services))
	if r.Err == nil {
		m.last.SetToCurrentTime()
	}
}
