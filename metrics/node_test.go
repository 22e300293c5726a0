// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/node"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"
)

var _ node.Metrics = (*metrics.Metrics)(nil)

// exported returns all metrics of the registry except the metrics of sinks. For histograms,
// the value is the number of observations.
func exported(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			if !strings.HasPrefix(name, "kpng_sink_") && !strings.HasPrefix(name, "kubeproxy_sync_") && !strings.HasPrefix(name, "kubeproxy_network_") || strings.HasSuffix(name, "_failures_total") {
				got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return got
}

// TestMetricsOfBackends makes the observers of two backends of each kind.
func TestMetricsOfBackends(t *testing.T) {
	for name, test := range map[string]struct {
		holds map[string]int
		want  map[string]float64
	}{
		"nftables": {map[string]int{"elements": 7}, map[string]float64{
			"kpng_nftables_elements": 14, "kpng_nftables_transactions_total": 4, "kpng_nftables_transaction_errors_total": 2,
			"kpng_nftables_drift_found_total": 2, "kpng_nftables_drift_repaired_total": 2,
			"kubeproxy_sync_proxy_rules_nftables_sync_failures_total": 2,
		}},
		"iptables": {map[string]int{"chains": 7}, map[string]float64{
			"kpng_iptables_chains": 14, "kpng_iptables_restores_total": 4, "kpng_iptables_restore_errors_total": 2,
			"kpng_iptables_lines_written_total": 30, "kpng_iptables_drift_found_total": 2,
			"kubeproxy_sync_proxy_rules_iptables_restore_failures_total": 2,
		}},
		"ipvs": {map[string]int{"servers": 7, "elements": 5}, map[string]float64{
			"kpng_ipvs_servers": 14, "kpng_ipvs_elements": 10, "kpng_ipvs_transactions_total": 4, "kpng_ipvs_transaction_errors_total": 2,
			"kpng_ipvs_drift_found_total": 2, "kpng_ipvs_drift_repaired_total": 2,
		}},
		"ovs": {map[string]int{"flows": 7, "groups": 5}, map[string]float64{
			"kpng_ovs_flows": 14, "kpng_ovs_groups": 10, "kpng_ovs_bundles_total": 4, "kpng_ovs_bundle_errors_total": 2, "kpng_ovs_messages_total": 30,
			"kpng_ovs_drift_found_total": 2, "kpng_ovs_drift_repaired_total": 2,
		}},
		"ebpf": {map[string]int{"max_frontends": 10, "max_endpoints": 20, "max_members": 4, "frontends": 1, "endpoints": 2, "members": 3, "services_left": 4}, map[string]float64{
			"kpng_ebpf_frontends": 2, "kpng_ebpf_endpoints": 4, "kpng_ebpf_members": 6, "kpng_ebpf_services_left": 8,
			"kpng_ebpf_map_fill_ratio frontends": 0.1, "kpng_ebpf_map_fill_ratio endpoints": 0.1, "kpng_ebpf_map_fill_ratio members": 0.75,
		}},
		"hns": {map[string]int{"endpoints": 7, "load_balancers": 5}, map[string]float64{"kpng_hns_endpoints": 14, "kpng_hns_load_balancers": 10}},
	} {
		registry := prometheus.NewPedanticRegistry()
		m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
		if err != nil {
			t.Fatal(err)
		}
		if got := exported(t, registry); len(got) > 0 {
			t.Errorf("%s: metrics without an observer: %v", name, got)
		}
		for range 2 {
			o := m.Backend(name)
			for kind := range test.holds {
				o.Holds(kind, 3)
			}
			for kind, n := range test.holds {
				if strings.HasPrefix(kind, "max_") {
					o.Holds(kind, n)
				}
			}
			for kind, n := range test.holds {
				o.Holds(kind, n)
			}
			o.Wrote(10, nil)
			o.Wrote(5, errors.New("refused"))
			o.Drifted(true)
			o.Drifted(false)
		}
		if diff := cmp.Diff(test.want, exported(t, registry)); diff != "" {
			t.Errorf("%s: metrics (-want +got):\n%s", name, diff)
		}
		if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
			t.Errorf("%s: problems %v, error %v", name, problems, err)
		}
	}
}

func TestOtherBackendsHaveNoMetrics(t *testing.T) {
	m, err := metrics.New(prometheus.NewRegistry(), metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if o := m.Backend("mine"); o != nil {
		t.Errorf("observer %v", o)
	}
}

func TestMetricsOfTheNode(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	flows := m.Conntrack()
	flows(5, 3, time.Millisecond, nil)
	flows(1, 0, time.Millisecond, errors.New("no permission"))
	ports, failed := m.HealthChecks()
	ports(4, 1)
	ports(3, 2)
	other, _ := m.HealthChecks()
	other(1, 0)
	failed(types.NamespacedName{}, netip.AddrPort{}, errors.New("in use"))
	want := map[string]float64{
		"kpng_conntrack_entries_deleted_total": 3, "kpng_conntrack_entries_seen_total": 6, "kpng_conntrack_errors_total": 1, "kpng_conntrack_duration_seconds": 2,
		"kubeproxy_conntrack_reconciler_deleted_entries_total": 3, "kubeproxy_conntrack_reconciler_sync_duration_seconds": 2,
		"kpng_healthcheck_faults_total": 1, "kpng_healthcheck_ports_failing": 2, "kpng_healthcheck_ports_open": 4,
	}
	if diff := cmp.Diff(want, exported(t, registry)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
