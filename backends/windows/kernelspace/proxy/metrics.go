// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"time"

	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/metrics"
	"github.com/prometheus/client_golang/prometheus"
)

// hnsMetrics shows what a backend for Windows' Host Networking Service
// (HNS) does: what it holds there, its calls, their failures and how long they
// took. How long syncs take is among the metrics of sinks.
type hnsMetrics struct {
	metrics.Collectors
	endpoints, balancers prometheus.Gauge
	calls                *prometheus.HistogramVec
	failures             *prometheus.CounterVec
}

// newHNSMetrics returns a collector of what its observer is told.
func newHNSMetrics() *hnsMetrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "kpng", Subsystem: "hns", Name: name, Help: help}
	}
	c := &hnsMetrics{
		endpoints: prometheus.NewGauge(prometheus.GaugeOpts(opts("endpoints", "Endpoints that HNS has for kpng."))),
		balancers: prometheus.NewGauge(prometheus.GaugeOpts(opts("load_balancers", "Load balancers that HNS has for kpng."))),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "kpng", Subsystem: "hns", Name: "call_duration_seconds", Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
			Help: "How long a call of HNS took, by call (CreateLoadBalancer, …); a listing is one call.",
		}, []string{"call"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts(opts("call_failures_total", "Calls of HNS that failed, by call.")), []string{"call"}),
	}
	c.Collectors = metrics.Collectors{c.endpoints, c.balancers, c.calls, c.failures}
	return c
}

// observer returns the observer to give to the backend.
func (c *hnsMetrics) observer() kernelspace.Observer {
	return kernelspace.Observer{
		Called: func(call string, took time.Duration, err error) {
			c.calls.WithLabelValues(call).Observe(took.Seconds())
			if err != nil {
				c.failures.WithLabelValues(call).Inc()
			}
		},
		Holds: func(endpoints, loadBalancers int) {
			c.endpoints.Set(float64(endpoints))
			c.balancers.Set(float64(loadBalancers))
		},
	}
}
