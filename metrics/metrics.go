// SPDX-License-Identifier: Apache-2.0

// Package metrics shows what kpng does as Prometheus metrics. It turns the
// observer hooks of the other packages into collectors in a registry that the
// caller hands in; nothing is registered globally.
//
//	registry := prometheus.NewRegistry()
//	m, err := metrics.New(registry, metrics.Options{})
//	…
//	sink.Run(ctx, source, s, sink.Options{Name: "nftables", Observer: m.Sink("nftables")})
//
// Names begin with kpng_. A program that stands in for kube-proxy, whose
// dashboards and alerts should go on working, also gets kube-proxy's own names.
package metrics

import (
	"fmt"
	"slices"
	"time"

	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
)

// Options says which metrics there are.
type Options struct {
	// KubeProxy adds kube-proxy's names (kubeproxy_…) to kpng's own. They carry
	// no label for the sink: use it where one sink does kube-proxy's work.
	// Default: false.
	KubeProxy bool
}

// Metrics holds the collectors. It is safe for concurrent use.
type Metrics struct {
	sinks     sinkMetrics
	kubeProxy *kubeProxyMetrics // nil unless asked for
}

// New registers the collectors with r. It fails if r has collectors of these
// names already, and then leaves r as it was.
func New(r prometheus.Registerer, opts Options) (*Metrics, error) {
	m := &Metrics{sinks: newSinkMetrics()}
	collectors := m.sinks.collectors()
	if opts.KubeProxy {
		m.kubeProxy = newKubeProxyMetrics()
		collectors = append(collectors, m.kubeProxy.collectors()...)
	}
	if err := register(r, collectors...); err != nil {
		return nil, err
	}
	return m, nil
}

// register registers all collectors or none.
func register(r prometheus.Registerer, collectors ...prometheus.Collector) error {
	for i, c := range collectors {
		if err := r.Register(c); err != nil {
			for _, done := range collectors[:i] {
				r.Unregister(done)
			}
			return fmt.Errorf("registering kpng's metrics: %w", err)
		}
	}
	return nil
}

// Sink returns the observer for the driver of the named sink.
func (m *Metrics) Sink(name string) sink.Observer {
	s := m.sinks.of(name)
	k := m.kubeProxy
	return sink.Observer{
		Queued: func(at time.Time) {
			s.lastQueued.Set(seconds(at))
			if k != nil {
				k.lastQueued.Set(seconds(at))
			}
		},
		Pending: func(services int) {
			s.pending.Set(float64(services))
			if k != nil {
				k.pending.Set(float64(services))
			}
		},
		Synced: func(r sink.SyncResult) {
			s.synced(r)
			if k != nil {
				k.synced(r)
			}
		},
		Applied: func(latency time.Duration) {
			s.programming.Observe(latency.Seconds())
			if k != nil {
				k.programming.Observe(latency.Seconds())
			}
		},
		Verified: func(_ time.Duration, err error) { s.verified(err) },
	}
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// syncBuckets are kube-proxy's: 1 ms to 16 s.
var syncBuckets = prometheus.ExponentialBuckets(0.001, 2, 15)

// programmingBuckets are kube-proxy's, which the network programming latency
// SLI is computed from: 0.25 s to 5 min.
var programmingBuckets = slices.Concat(
	prometheus.LinearBuckets(0.25, 0.25, 2),
	prometheus.LinearBuckets(1, 1, 59),
	prometheus.LinearBuckets(60, 5, 12),
	prometheus.LinearBuckets(120, 30, 7),
)

// sinkMetrics are kpng's own, one series a sink.
type sinkMetrics struct {
	duration    *prometheus.HistogramVec
	errors      *prometheus.CounterVec
	programming *prometheus.HistogramVec
	lastQueued  *prometheus.GaugeVec
	lastSynced  *prometheus.GaugeVec
	changes     *prometheus.CounterVec
	pending     *prometheus.GaugeVec
	failing     *prometheus.GaugeVec
	verified    *prometheus.CounterVec
}

func newSinkMetrics() sinkMetrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "kpng", Subsystem: "sink", Name: name, Help: help}
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kpng", Subsystem: "sink", Name: name, Help: help, Buckets: buckets}, labels)
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts(opts(name, help)), []string{"sink"})
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), labels)
	}
	return sinkMetrics{
		duration:    histogram("sync_duration_seconds", "How long it took to deliver everything (full), or what changed (partial).", syncBuckets, "sink", "type"),
		errors:      counter("sync_errors_total", "Syncs that were not acknowledged as a whole, by kind (all: nothing was; some: some services were not).", "sink", "kind"),
		programming: histogram("network_programming_duration_seconds", "Time from the oldest endpoint change in a service to its being programmed.", programmingBuckets, "sink"),
		lastQueued:  gauge("sync_last_queued_timestamp_seconds", "When a change was last seen waiting."),
		lastSynced:  gauge("sync_last_timestamp_seconds", "When a sync was last acknowledged as a whole."),
		changes:     counter("service_changes_total", "Services that the sink was told to set or delete.", "sink"),
		pending:     gauge("service_changes_pending", "Services that wait to be told, or told again."),
		failing:     gauge("services_failing", "Services whose last sync failed."),
		verified:    counter("verify_total", "Verifications of the dataplane, by result (ok or error).", "sink", "result"),
	}
}

func (m *sinkMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.duration, m.errors, m.programming, m.lastQueued, m.lastSynced, m.changes, m.pending, m.failing, m.verified}
}

// sinkSeries are the series of one sink.
type sinkSeries struct {
	full, partial           prometheus.Observer
	failedAll, failedSome   prometheus.Counter
	programming             prometheus.Observer
	lastQueued, lastSynced  prometheus.Gauge
	changes                 prometheus.Counter
	pending, failing        prometheus.Gauge
	verifiedOK, verifiedBad prometheus.Counter
}

func (m *sinkMetrics) of(sink string) *sinkSeries {
	return &sinkSeries{
		full: m.duration.WithLabelValues(sink, "full"), partial: m.duration.WithLabelValues(sink, "partial"),
		failedAll: m.errors.WithLabelValues(sink, "all"), failedSome: m.errors.WithLabelValues(sink, "some"),
		programming: m.programming.WithLabelValues(sink),
		lastQueued:  m.lastQueued.WithLabelValues(sink), lastSynced: m.lastSynced.WithLabelValues(sink),
		changes: m.changes.WithLabelValues(sink),
		pending: m.pending.WithLabelValues(sink), failing: m.failing.WithLabelValues(sink),
		verifiedOK: m.verified.WithLabelValues(sink, "ok"), verifiedBad: m.verified.WithLabelValues(sink, "error"),
	}
}

func (s *sinkSeries) synced(r sink.SyncResult) {
	switch {
	case r.Passed:
		s.full.Observe(r.PassDuration.Seconds())
	case !r.InPass:
		s.partial.Observe(r.Duration.Seconds())
	}
	s.changes.Add(float64(r.Services))
	s.failing.Set(float64(r.Failing))
	switch {
	case r.Err == nil:
		s.lastSynced.SetToCurrentTime()
	default:
		if _, ok := sink.Acknowledged(r.Err); ok {
			s.failedSome.Inc()
		} else {
			s.failedAll.Inc()
		}
	}
}

func (s *sinkSeries) verified(err error) {
	if err != nil {
		s.verifiedBad.Inc()
	} else {
		s.verifiedOK.Inc()
	}
}
