// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
)

// nodeMetrics are the metrics of the parts of a node. A metric is exported only if its
// part has an observer.
type nodeMetrics struct {
	backends     map[string]*backendMetrics
	conntrack    *conntrackMetrics
	healthChecks *healthCheckMetrics
}

func newNodeMetrics(kubeProxy bool) *nodeMetrics {
	return &nodeMetrics{newBackendMetrics(kubeProxy), newConntrackMetrics(kubeProxy), newHealthCheckMetrics()}
}

func (m *nodeMetrics) register(r prometheus.Registerer) {
	for _, b := range m.backends {
		r.MustRegister(&b.exported)
	}
	r.MustRegister(&m.conntrack.exported, &m.healthChecks.exported)
}

// exported is a collector of metrics. It exports a metric after the first use of the
// metric.
type exported struct {
	used    atomic.Bool
	metrics []prometheus.Collector
}

// Describe implements prometheus.Collector.
func (e *exported) Describe(to chan<- *prometheus.Desc) {
	for _, c := range e.metrics {
		c.Describe(to)
	}
}

// Collect implements prometheus.Collector.
func (e *exported) Collect(to chan<- prometheus.Metric) {
	if !e.used.Load() {
		return
	}
	for _, c := range e.metrics {
		c.Collect(to)
	}
}

// gauge, counter and histogram add a metric. The namespace is kpng or kubeproxy.
func (e *exported) gauge(subsystem, name, help string) prometheus.Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "kpng", Subsystem: subsystem, Name: name, Help: help})
	e.metrics = append(e.metrics, g)
	return g
}

func (e *exported) counter(namespace, subsystem, name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help})
	e.metrics = append(e.metrics, c)
	return c
}

func (e *exported) histogram(namespace, name, help string) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Subsystem: "conntrack", Name: name, Help: help, Buckets: syncBuckets})
	e.metrics = append(e.metrics, h)
	return h
}

// asInKubeProxy is the help of metrics with kube-proxy's names.
const asInKubeProxy = "As in kube-proxy."

// backendMetrics are the metrics of one kind of backend. Fields without a value are ignored.
type backendMetrics struct {
	exported
	writes, failed, kubeProxyFailed, size, drifted, repaired prometheus.Counter
	holds                                                    map[string]prometheus.Gauge
	fill                                                     *prometheus.GaugeVec
}

func newBackendMetrics(kubeProxy bool) map[string]*backendMetrics {
	all := map[string]*backendMetrics{}
	add := func(name string, holds map[string]string) *backendMetrics {
		b := &backendMetrics{holds: map[string]prometheus.Gauge{}}
		for kind, help := range holds {
			b.holds[kind] = b.gauge(name, kind, help)
		}
		all[name] = b
		return b
	}
	drift := func(b *backendMetrics, name, what string) {
		b.drifted = b.counter("kpng", name, "drift_found_total", "Times that a change of the "+what+" by another program was found.")
		b.repaired = b.counter("kpng", name, "drift_repaired_total", "Times that a change of the "+what+" by another program was repaired.")
	}

	b := add("nftables", map[string]string{"elements": "Elements of the maps and sets of the table."})
	b.writes = b.counter("kpng", "nftables", "transactions_total", "Attempts to change the table in a transaction.")
	b.failed = b.counter("kpng", "nftables", "transaction_errors_total", "Attempts to change the table that failed, also if a retry succeeded.")
	drift(b, "nftables", "table")
	if kubeProxy {
		b.kubeProxyFailed = b.counter("kubeproxy", "", "sync_proxy_rules_nftables_sync_failures_total", asInKubeProxy)
	}

	b = add("iptables", map[string]string{"chains": "Chains of this instance, in both IP families."})
	b.writes = b.counter("kpng", "iptables", "restores_total", "Runs of iptables-restore.")
	b.failed = b.counter("kpng", "iptables", "restore_errors_total", "Runs of iptables-restore that failed.")
	b.size = b.counter("kpng", "iptables", "lines_written_total", "Lines of input for iptables-restore.")
	b.drifted = b.counter("kpng", "iptables", "drift_found_total", "Times that a change of the rules by another program was found.")
	if kubeProxy {
		b.kubeProxyFailed = b.counter("kubeproxy", "", "sync_proxy_rules_iptables_restore_failures_total", asInKubeProxy)
	}

	b = add("ipvs", map[string]string{"servers": "Servers of IPVS.", "elements": "Elements of the nftables table."})
	b.writes = b.counter("kpng", "ipvs", "transactions_total", "Attempts to change the nftables table in a transaction.")
	b.failed = b.counter("kpng", "ipvs", "transaction_errors_total", "Attempts to change the nftables table that failed.")
	drift(b, "ipvs", "dataplane")

	b = add("ovs", map[string]string{"flows": "Flows of this instance.", "groups": "Groups of this instance."})
	b.writes = b.counter("kpng", "ovs", "bundles_total", "Bundles of changes that were sent to the switch.")
	b.failed = b.counter("kpng", "ovs", "bundle_errors_total", "Bundles of changes that failed.")
	b.size = b.counter("kpng", "ovs", "messages_total", "Messages of these bundles.")
	drift(b, "ovs", "flows or groups")

	b = add("ebpf", map[string]string{
		"frontends":     "Cluster IPs and ports in the eBPF maps.",
		"endpoints":     "Endpoints of all frontends in the eBPF maps together.",
		"members":       "Endpoints of UDP ports and of services with session affinity in the eBPF maps.",
		"services_left": "Services that do not fit into the eBPF maps, or need more than their share, and are left to nftables.",
	})
	b.fill = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "kpng", Subsystem: "ebpf", Name: "map_fill_ratio", Help: "Used part of each eBPF map (frontends, endpoints, members), from 0 to 1.",
	}, []string{"map"})
	b.metrics = append(b.metrics, b.fill)

	add("hns", map[string]string{"endpoints": "Endpoints that HNS has for kpng.", "load_balancers": "Load balancers that HNS has for kpng."})
	return all
}

// Backend returns an observer of a backend. The name is one of nftables, iptables, ipvs,
// ovs, ebpf, and hns for the backend kernelspace. For other names, Backend returns nil. All
// observers with the same name update the same metrics.
func (m *Metrics) Backend(name string) backends.Observer {
	b := m.node.backends[name]
	if b == nil {
		return nil
	}
	b.used.Store(true)
	return &backendObserver{b, map[string]int{}}
}

// backendObserver is the observer of one backend.
type backendObserver struct {
	*backendMetrics
	held map[string]int // the last arguments of Holds
}

// Wrote implements backends.Observer.
func (o *backendObserver) Wrote(size int, err error) {
	inc(o.writes)
	if o.size != nil {
		o.size.Add(float64(size))
	}
	if err != nil {
		inc(o.failed)
		inc(o.kubeProxyFailed)
	}
}

// Holds implements backends.Observer. If the kind is "max_" and the name of another kind,
// n is the largest possible number of that other kind.
func (o *backendObserver) Holds(kind string, n int) {
	if g := o.holds[kind]; g != nil {
		g.Add(float64(n - o.held[kind]))
	}
	o.held[kind] = n
	if size := o.held["max_"+kind]; size > 0 && o.fill != nil {
		o.fill.WithLabelValues(kind).Set(float64(n) / float64(size))
	}
}

// Drifted implements backends.Observer.
func (o *backendObserver) Drifted(now bool) {
	if now {
		inc(o.drifted)
	} else {
		inc(o.repaired)
	}
}

func inc(c prometheus.Counter) {
	if c != nil {
		c.Inc()
	}
}

type conntrackMetrics struct {
	exported
	seen, errors prometheus.Counter
	// The second counter and histogram have kube-proxy's names.
	deleted  []prometheus.Counter
	duration []prometheus.Histogram
}

func newConntrackMetrics(kubeProxy bool) *conntrackMetrics {
	m := &conntrackMetrics{}
	m.seen = m.counter("kpng", "conntrack", "entries_seen_total", "Connections that the kernel listed in searches for stale connections.")
	m.errors = m.counter("kpng", "conntrack", "errors_total", "Searches for stale connections that failed and are repeated.")
	m.deleted = append(m.deleted, m.counter("kpng", "conntrack", "entries_deleted_total", "Stale connections that were deleted."))
	m.duration = append(m.duration, m.histogram("kpng", "duration_seconds", "Duration of a search for stale connections."))
	if kubeProxy {
		m.deleted = append(m.deleted, m.counter("kubeproxy", "conntrack", "reconciler_deleted_entries_total", asInKubeProxy))
		m.duration = append(m.duration, m.histogram("kubeproxy", "reconciler_sync_duration_seconds", asInKubeProxy))
	}
	return m
}

// Conntrack returns an observer of the deletion of stale connections. The observer is
// called after each search for such connections.
func (m *Metrics) Conntrack() func(seen, deleted int, took time.Duration, err error) {
	c := m.node.conntrack
	c.used.Store(true)
	return func(seen, deleted int, took time.Duration, err error) {
		c.seen.Add(float64(seen))
		for _, counter := range c.deleted {
			counter.Add(float64(deleted))
		}
		for _, histogram := range c.duration {
			histogram.Observe(took.Seconds())
		}
		if err != nil {
			c.errors.Inc()
		}
	}
}

type healthCheckMetrics struct {
	exported
	open, failing prometheus.Gauge
	faults        prometheus.Counter
}

func newHealthCheckMetrics() *healthCheckMetrics {
	m := &healthCheckMetrics{}
	m.open = m.gauge("healthcheck", "ports_open", "Open health-check node ports, counted for each node address.")
	m.failing = m.gauge("healthcheck", "ports_failing", "Health-check node ports that cannot be opened, counted for each node address.")
	m.faults = m.counter("kpng", "healthcheck", "faults_total", "Times that a health-check node port could not be opened for a new reason.")
	return m
}

// HealthChecks returns observers of health-check node ports. The function ports is called
// when the number of open or failing ports changes. The function failed is called when a
// port cannot be opened.
func (m *Metrics) HealthChecks() (ports func(open, failing int), failed func(types.NamespacedName, netip.AddrPort, error)) {
	h := m.node.healthChecks
	h.used.Store(true)
	var lastOpen, lastFailing int
	ports = func(open, failing int) {
		h.open.Add(float64(open - lastOpen))
		h.failing.Add(float64(failing - lastFailing))
		lastOpen, lastFailing = open, failing
	}
	return ports, func(types.NamespacedName, netip.AddrPort, error) { h.faults.Inc() }
}
