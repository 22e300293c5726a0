// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"time"

	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/prometheus/client_golang/prometheus"
)

// KernelspaceCollector shows what a backend for Windows' Host Networking Service
// (HNS) does: what it holds there, its calls, their failures and how long they
// took. How long syncs take is among the metrics of sinks.
type KernelspaceCollector struct {
	Collectors
	endpoints, balancers prometheus.Gauge
	calls                *prometheus.HistogramVec
	failures             *prometheus.CounterVec
}

var _ prometheus.Collector = &KernelspaceCollector{}

// NewKernelspaceCollector returns a collector of what its Observer is told.
func NewKernelspaceCollector() *KernelspaceCollector {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "kpng", Subsystem: "hns", Name: name, Help: help}
	}
	c := &KernelspaceCollector{
		endpoints: prometheus.NewGauge(prometheus.GaugeOpts(opts("endpoints", "Endpoints that HNS has for kpng."))),
		balancers: prometheus.NewGauge(prometheus.GaugeOpts(opts("load_balancers", "Load balancers that HNS has for kpng."))),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "kpng", Subsystem: "hns", Name: "call_duration_seconds", Buckets: syncBuckets,
			Help: "How long a call of HNS took, by call (CreateLoadBalancer, …); a listing is one call.",
		}, []string{"call"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts(opts("call_failures_total", "Calls of HNS that failed, by call.")), []string{"call"}),
	}
	c.Collectors = Collectors{c.endpoints, c.balancers, c.calls, c.failures}
	return c
}

// Observer returns the observer to give to the backend.
func (c *KernelspaceCollector) Observer() kernelspace.Observer {
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
