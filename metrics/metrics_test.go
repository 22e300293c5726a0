// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"
)

func observe(o sink.Observer) {
	o.Queued(time.Unix(1000, 500_000_000))
	o.Pending(3)
	o.Synced(sink.SyncResult{PassStart: time.Now().Add(-50 * time.Millisecond), Passed: true, Services: 7, Duration: 30 * time.Millisecond})
	o.Synced(sink.SyncResult{Services: 2, Duration: 2 * time.Millisecond, Err: errors.New("all of it")})
	o.Synced(sink.SyncResult{Services: 2, Duration: 2 * time.Millisecond, Failing: 1,
		Err: &sink.Failed{types.NamespacedName{Namespace: "ns", Name: "a"}: errors.New("one of them")}})
	o.Applied(400 * time.Millisecond)
	o.Verified(nil)
	o.Verified(errors.New("differs"))
}

func TestSinkMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	observe(m.Sink("test"))

	want := `
# HELP kpng_sink_service_changes_pending Services that wait for a delivery or a retry.
# TYPE kpng_sink_service_changes_pending gauge
kpng_sink_service_changes_pending{sink="test"} 3
# HELP kpng_sink_service_changes_total Services delivered to the sink.
# TYPE kpng_sink_service_changes_total counter
kpng_sink_service_changes_total{sink="test"} 11
# HELP kpng_sink_services_failing Services whose last sync failed.
# TYPE kpng_sink_services_failing gauge
kpng_sink_services_failing{sink="test"} 1
# HELP kpng_sink_sync_errors_total Syncs with failures, by kind (all: nothing was acknowledged; some: some services failed).
# TYPE kpng_sink_sync_errors_total counter
kpng_sink_sync_errors_total{kind="all",sink="test"} 1
kpng_sink_sync_errors_total{kind="some",sink="test"} 1
# HELP kpng_sink_sync_last_queued_timestamp_seconds Time when changes last began to wait.
# TYPE kpng_sink_sync_last_queued_timestamp_seconds gauge
kpng_sink_sync_last_queued_timestamp_seconds{sink="test"} 1000.5
# HELP kpng_sink_verify_total Verifications of the dataplane, by result (ok or error).
# TYPE kpng_sink_verify_total counter
kpng_sink_verify_total{result="error",sink="test"} 1
kpng_sink_verify_total{result="ok",sink="test"} 1
# HELP kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds Time when a sync was last queued.
# TYPE kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds gauge
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds 1000.5
# HELP kubeproxy_sync_proxy_rules_service_changes_pending Changes of services, including their endpoints, that wait for a sync.
# TYPE kubeproxy_sync_proxy_rules_service_changes_pending gauge
kubeproxy_sync_proxy_rules_service_changes_pending 3
# HELP kubeproxy_sync_proxy_rules_service_changes_total Changes of services, including their endpoints.
# TYPE kubeproxy_sync_proxy_rules_service_changes_total counter
kubeproxy_sync_proxy_rules_service_changes_total 11
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want),
		"kpng_sink_service_changes_pending", "kpng_sink_service_changes_total", "kpng_sink_services_failing",
		"kpng_sink_sync_errors_total", "kpng_sink_sync_last_queued_timestamp_seconds", "kpng_sink_verify_total",
		"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "kubeproxy_sync_proxy_rules_service_changes_pending",
		"kubeproxy_sync_proxy_rules_service_changes_total"); err != nil {
		t.Error(err)
	}

	counts := map[string]uint64{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, series := range f.Metric {
			if h := series.GetHistogram(); h != nil {
				counts[f.GetName()] += h.GetSampleCount()
			}
		}
	}
	for name, want := range map[string]uint64{
		"kpng_sink_sync_duration_seconds":                  3,
		"kpng_sink_network_programming_duration_seconds":   1,
		"kubeproxy_sync_proxy_rules_duration_seconds":      3,
		"kubeproxy_sync_full_proxy_rules_duration_seconds": 1,
		"kubeproxy_network_programming_duration_seconds":   1,
	} {
		if counts[name] != want {
			t.Errorf("%s has %d observations, want %d", name, counts[name], want)
		}
	}
}

func TestKubeProxyNamesAreOptional(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	observe(m.Sink("test"))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) == 0 {
		t.Fatal("no metrics")
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "kpng_") {
			t.Errorf("metric %s", f.GetName())
		}
	}
}

func TestKubeProxyMetricsDescribeFirstSink(t *testing.T) {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	first, second := m.Sink("first"), m.Sink("second")
	first.Pending(3)
	second.Pending(7)
	if got := gauge(t, registry, "kubeproxy_sync_proxy_rules_service_changes_pending"); got != 3 {
		t.Errorf("%v changes are pending, want the 3 of the first sink", got)
	}
}

func TestNilRegistryIsAnError(t *testing.T) {
	if _, err := metrics.New(nil, metrics.Options{}); err == nil || !strings.Contains(err.Error(), "registry is nil") {
		t.Errorf("got %v", err)
	}
}

func TestRegistryWithSameNamesIsUnchanged(t *testing.T) {
	registry := prometheus.NewRegistry()
	if _, err := metrics.New(registry, metrics.Options{}); err != nil {
		t.Fatal(err)
	}
	if _, err := metrics.New(registry, metrics.Options{KubeProxy: true}); err == nil {
		t.Fatal("registered twice")
	}
	other := prometheus.NewRegistry()
	taken := prometheus.NewGauge(prometheus.GaugeOpts{Name: "kubeproxy_sync_proxy_rules_last_timestamp_seconds"})
	other.MustRegister(taken)
	if _, err := metrics.New(other, metrics.Options{KubeProxy: true}); err == nil {
		t.Fatal("a metric name was registered twice")
	}
	if n, err := testutil.GatherAndCount(other); n != 1 || err != nil {
		t.Errorf("%d metrics, error %v; want the one registered before", n, err)
	}
}

// gauge returns the value of a metric that has one series.
func gauge(t *testing.T, r *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// A change that does not affect this node must not count as queued, because kube-proxy's
// alerts compare the times of the last queued and the last successful sync.
func TestChangesInvisibleToThisNodeAreNotQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := prometheus.NewRegistry()
		m, err := metrics.New(r, metrics.Options{KubeProxy: true})
		if err != nil {
			t.Fatal(err)
		}
		src := sinkscript.NewSource()
		src.MarkSynced()
		ctx, cancel := context.WithCancel(t.Context())
		d := sink.NewDriver(src, sinktest.NewRecorder(t, nil), sink.Options{Observer: m.Sink("s")})
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		synctest.Wait()
		before := gauge(t, r, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds")
		time.Sleep(time.Minute)
		src.Fail(errors.New("no update")) // Next fails until Fail(nil) is called, so one update contains both SetNode calls
		src.SetNode(&api.Node{Name: "n"})
		src.SetNode(nil) // undoes the first SetNode, so the update is empty
		src.Fail(nil)
		time.Sleep(time.Minute)
		if after := gauge(t, r, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"); after != before || before == 0 {
			t.Errorf("last queued went from %v to %v", before, after)
		}
		src.SetNode(&api.Node{Name: "n"})
		synctest.Wait()
		if after := gauge(t, r, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"); after != before+120 {
			t.Errorf("last queued is %v, want two minutes after %v", after, before)
		}
		cancel()
		<-ended
	})
}

// A Sync acknowledges nothing if it returns a Failed error joined with another error.
func TestErrorsAreCountedByKind(t *testing.T) {
	r := prometheus.NewRegistry()
	m, err := metrics.New(r, metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	failed := &sink.Failed{types.NamespacedName{Namespace: "ns", Name: "a"}: errors.New("one of them")}
	m.Sink("s").Synced(sink.SyncResult{Err: errors.Join(failed, errors.New("the whole table is gone"))})
	want := `
# HELP kpng_sink_sync_errors_total Syncs with failures, by kind (all: nothing was acknowledged; some: some services failed).
# TYPE kpng_sink_sync_errors_total counter
kpng_sink_sync_errors_total{kind="all",sink="s"} 1
kpng_sink_sync_errors_total{kind="some",sink="s"} 0
`
	if err := testutil.GatherAndCompare(r, strings.NewReader(want), "kpng_sink_sync_errors_total"); err != nil {
		t.Error(err)
	}
}
