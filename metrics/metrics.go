// SPDX-License-Identifier: Apache-2.0

// Package metrics exports Prometheus metrics of kpng. Its collectors get their values
// from the hooks in sink.Observer. New registers the collectors only with the caller's
// registry.
//
//	registry := prometheus.NewRegistry()
//	m, err := metrics.New(registry, metrics.Options{})
//	…
//	sink.Run(ctx, source, s, sink.Options{Name: "nftables", Observer: m.Sink("nftables")})
//
// Names begin with kpng_. A program can also export metrics with kube-proxy's names, so
// that dashboards and alerts for kube-proxy continue to work.
package metrics

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Options selects the metrics.
type Options struct {
	// KubeProxy adds metrics with kube-proxy's names (kubeproxy_…). These metrics have no
	// label for the sink. They belong to the first sink for which Metrics.Sink is called.
	// Default: false.
	KubeProxy bool
}

// Metrics holds the collectors. It is safe for concurrent use.
type Metrics struct {
	sinks     *sinkMetrics
	kubeProxy atomic.Pointer[series] // the first call of Sink takes the series and leaves nil
	node      *nodeMetrics
}

// New registers the collectors with r. If r is nil or already has metrics with the same
// names, New returns an error and registers nothing.
func New(r prometheus.Registerer, opts Options) (*Metrics, error) {
	if r == nil {
		return nil, errors.New("register kpng's metrics: the registry is nil")
	}
	all := prometheus.NewRegistry() // a single collector, so that r accepts or rejects all metrics together
	m := &Metrics{sinks: newSinkMetrics(all), node: newNodeMetrics(opts.KubeProxy)}
	m.node.register(all)
	if opts.KubeProxy {
		m.kubeProxy.Store(newKubeProxySeries(promauto.With(all)))
	}
	if err := r.Register(all); err != nil {
		return nil, fmt.Errorf("register kpng's metrics: %w", err)
	}
	return m, nil
}

// Sink returns the observer for the driver of the named sink.
func (m *Metrics) Sink(name string) sink.Observer {
	own := m.sinks.of(name)
	all := []*series{&own.series}
	if s := m.kubeProxy.Swap(nil); s != nil {
		all = append(all, s)
	}
	return sink.Observer{
		Queued: func(at time.Time) {
			for _, s := range all {
				s.lastQueued.Set(float64(at.UnixNano()) / 1e9)
			}
		},
		Pending: func(services int) {
			for _, s := range all {
				s.pending.Set(float64(services))
				s.fresh.pending(services)
			}
		},
		Synced: func(r sink.SyncResult) {
			for _, s := range all {
				s.synced(r)
			}
			own.countFailures(r)
		},
		Applied: func(latency time.Duration) {
			for _, s := range all {
				s.programming.Observe(latency.Seconds())
			}
		},
		Verified: func(err error) {
			if err != nil {
				own.verifiedBad.Inc()
			} else {
				own.verifiedOK.Inc()
			}
		},
	}
}

// series has the metrics of one sink that also exist in kube-proxy.
type series struct {
	full, partial, programming prometheus.Observer
	lastQueued, pending        prometheus.Gauge
	fresh                      *freshness
	changes                    prometheus.Counter
	duration                   prometheus.Observer // time per Sync; nil in kpng's metrics
}

func (s *series) synced(r sink.SyncResult) {
	if s.duration != nil {
		s.duration.Observe(r.Duration.Seconds())
	}
	switch {
	case r.Passed:
		s.full.Observe(time.Since(r.PassStart).Seconds())
	case r.PassStart.IsZero():
		s.partial.Observe(r.Duration.Seconds())
	}
	s.changes.Add(float64(r.Services))
	s.fresh.synced(r.Err)
}

// syncBuckets are kube-proxy's buckets: 1 ms to 16 s.
var syncBuckets = prometheus.ExponentialBuckets(0.001, 2, 15)

// programmingBuckets are kube-proxy's buckets for the network programming latency SLI:
// 0.25 s to 5 min.
var programmingBuckets = slices.Concat(
	prometheus.LinearBuckets(0.25, 0.25, 2),
	prometheus.LinearBuckets(1, 1, 59),
	prometheus.LinearBuckets(60, 5, 12),
	prometheus.LinearBuckets(120, 30, 7),
)

// newKubeProxySeries returns metrics with kube-proxy's names and meaning. It omits those
// metrics of kube-proxy that make no sense with incremental updates.
func newKubeProxySeries(f promauto.Factory) *series {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return f.NewHistogram(prometheus.HistogramOpts{Namespace: "kubeproxy", Name: name, Help: help, Buckets: buckets})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Namespace: "kubeproxy", Name: name, Help: help})
	}
	fresh := &freshness{}
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "kubeproxy", Name: "sync_proxy_rules_last_timestamp_seconds", Help: freshHelp,
	}, fresh.seconds)
	return &series{
		duration:    histogram("sync_proxy_rules_duration_seconds", "Duration of a sync.", syncBuckets),
		full:        histogram("sync_full_proxy_rules_duration_seconds", "Duration of a full sync.", syncBuckets),
		partial:     histogram("sync_partial_proxy_rules_duration_seconds", "Duration of a partial sync.", syncBuckets),
		programming: histogram("network_programming_duration_seconds", "Time from an endpoint change until it is programmed.", programmingBuckets),
		lastQueued:  gauge("sync_proxy_rules_last_queued_timestamp_seconds", "Time when a sync was last queued."),
		fresh:       fresh,
		changes: f.NewCounter(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: "sync_proxy_rules_service_changes_total", Help: "Changes of services, including their endpoints.",
		}),
		pending: gauge("sync_proxy_rules_service_changes_pending", "Changes of services, including their endpoints, that wait for a sync."),
	}
}

// sinkMetrics are kpng's own metrics, with one series for each sink.
type sinkMetrics struct {
	duration, programming        *prometheus.HistogramVec
	errors, changes, verified    *prometheus.CounterVec
	lastQueued, pending, failing *prometheus.GaugeVec
	fresh                        *freshnessVec
}

const freshHelp = "Last time when everything was programmed: now, if nothing waits or fails."

func newSinkMetrics(r prometheus.Registerer) *sinkMetrics {
	f := promauto.With(r)
	fresh := &freshnessVec{
		desc:  prometheus.NewDesc("kpng_sink_sync_last_timestamp_seconds", freshHelp, []string{"sink"}, nil),
		sinks: map[string]*freshness{},
	}
	r.MustRegister(fresh)
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "kpng", Subsystem: "sink", Name: name, Help: help}
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return f.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kpng", Subsystem: "sink", Name: name, Help: help, Buckets: buckets}, labels)
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts(opts(name, help)), []string{"sink"})
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts(opts(name, help)), labels)
	}
	return &sinkMetrics{
		duration:    histogram("sync_duration_seconds", "Duration of a whole pass (full) or of a sync of changes (partial).", syncBuckets, "sink", "type"),
		errors:      counter("sync_errors_total", "Syncs with failures, by kind (all: nothing was acknowledged; some: some services failed).", "sink", "kind"),
		programming: histogram("network_programming_duration_seconds", "Time from the oldest endpoint change of a service until it is programmed.", programmingBuckets, "sink"),
		lastQueued:  gauge("sync_last_queued_timestamp_seconds", "Time when changes last began to wait."),
		fresh:       fresh,
		changes:     counter("service_changes_total", "Services delivered to the sink.", "sink"),
		pending:     gauge("service_changes_pending", "Services that wait for a delivery or a retry."),
		failing:     gauge("services_failing", "Services whose last sync failed."),
		verified:    counter("verify_total", "Verifications of the dataplane, by result (ok or error).", "sink", "result"),
	}
}

type sinkSeries struct {
	series
	failedAll, failedSome   prometheus.Counter
	failing                 prometheus.Gauge
	verifiedOK, verifiedBad prometheus.Counter
}

func (m *sinkMetrics) of(sink string) *sinkSeries {
	return &sinkSeries{
		series: series{
			full: m.duration.WithLabelValues(sink, "full"), partial: m.duration.WithLabelValues(sink, "partial"),
			programming: m.programming.WithLabelValues(sink),
			lastQueued:  m.lastQueued.WithLabelValues(sink), pending: m.pending.WithLabelValues(sink),
			fresh:   m.fresh.of(sink),
			changes: m.changes.WithLabelValues(sink),
		},
		failedAll: m.errors.WithLabelValues(sink, "all"), failedSome: m.errors.WithLabelValues(sink, "some"),
		failing:    m.failing.WithLabelValues(sink),
		verifiedOK: m.verified.WithLabelValues(sink, "ok"), verifiedBad: m.verified.WithLabelValues(sink, "error"),
	}
}

func (s *sinkSeries) countFailures(r sink.SyncResult) {
	s.failing.Set(float64(r.Failing))
	if _, some := sink.Acknowledged(r.Err); r.Err != nil && some {
		s.failedSome.Inc()
	} else if r.Err != nil {
		s.failedAll.Inc()
	}
}
