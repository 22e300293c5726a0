// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Connections counts what package backends/conntrack does. It is a collector for
// the caller to register.
type Connections struct {
	Collectors
	seen, ended, errors prometheus.Counter
	duration            prometheus.Histogram
}

// NewConnections returns the metrics of connection tracking.
func NewConnections() *Connections {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kpng", Subsystem: "conntrack", Name: name, Help: help})
	}
	c := &Connections{
		seen:   counter("entries_seen_total", "Connections that the kernel told of as stale connections were looked for."),
		ended:  counter("entries_ended_total", "Stale connections that were ended."),
		errors: counter("errors_total", "Looks for stale connections that failed and are made again."),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "kpng", Subsystem: "conntrack", Name: "duration_seconds", Help: "How long a look for stale connections took.", Buckets: syncBuckets,
		}),
	}
	c.Collectors = Collectors{c.seen, c.ended, c.errors, c.duration}
	return c
}

// Looked counts one look at the table of connections.
func (c *Connections) Looked(seen, ended int, took time.Duration, err error) {
	c.seen.Add(float64(seen))
	c.ended.Add(float64(ended))
	c.duration.Observe(took.Seconds())
	if err != nil {
		c.errors.Inc()
	}
}

// NFTables counts what package backends/nftables does; its methods are for an
// Observer there. How long syncs take is among the metrics of sinks. It is a
// collector for the caller to register.
type NFTables struct {
	Collectors
	elements                               prometheus.Gauge
	transactions, refused, drifted, mended prometheus.Counter
}

// NewNFTables returns the metrics of the nftables backend.
func NewNFTables() *NFTables {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kpng", Subsystem: "nftables", Name: name, Help: help})
	}
	n := &NFTables{
		elements: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "kpng", Subsystem: "nftables", Name: "elements", Help: "Elements of the maps and sets of the table.",
		}),
		transactions: counter("transactions_total", "Attempts to change the table in a transaction."),
		refused:      counter("transaction_errors_total", "Attempts to change the table that failed, and so changed nothing, or had no answer."),
		drifted:      counter("drift_found_total", "Times that the table was not as it was left, as somebody else had changed it."),
		mended:       counter("drift_mended_total", "Times that the table was made again what it should be, after somebody else had changed it."),
	}
	n.Collectors = Collectors{n.elements, n.transactions, n.refused, n.drifted, n.mended}
	return n
}

// Transacted counts an attempt at a transaction.
func (n *NFTables) Transacted(err error) {
	n.transactions.Inc()
	if err != nil {
		n.refused.Inc()
	}
}

// Holds says how many elements the table has.
func (n *NFTables) Holds(elements int) { n.elements.Set(float64(elements)) }

// Drifted counts that somebody else changed the table, and Mended that this was
// put right.
func (n *NFTables) Drifted() { n.drifted.Inc() }

// Mended: see Drifted.
func (n *NFTables) Mended() { n.mended.Inc() }

// HealthChecks counts what package backends/healthcheck does. It is a collector
// for the caller to register.
type HealthChecks struct {
	Collectors
	open, failing prometheus.Gauge
	faults        prometheus.Counter
}

// NewHealthChecks returns the metrics of health-check node ports.
func NewHealthChecks() *HealthChecks {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "kpng", Subsystem: "healthcheck", Name: name, Help: help})
	}
	h := &HealthChecks{
		open:    gauge("ports_open", "Health-check node ports that are listened on, once for each node address."),
		failing: gauge("ports_failing", "Health-check node ports that cannot be listened on, once for each node address."),
		faults: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "kpng", Subsystem: "healthcheck", Name: "faults_total", Help: "Times that a health-check node port could not be listened on, for a new reason.",
		}),
	}
	h.Collectors = Collectors{h.open, h.failing, h.faults}
	return h
}

// Ports says how many ports are open and how many fail.
func (h *HealthChecks) Ports(open, failing int) {
	h.open.Set(float64(open))
	h.failing.Set(float64(failing))
}

// Fault counts a port that cannot be opened.
func (h *HealthChecks) Fault() { h.faults.Inc() }

// Collectors are several that are one.
type Collectors []prometheus.Collector

// Describe implements prometheus.Collector.
func (c Collectors) Describe(to chan<- *prometheus.Desc) {
	for _, part := range c {
		part.Describe(to)
	}
}

// Collect implements prometheus.Collector.
func (c Collectors) Collect(to chan<- prometheus.Metric) {
	for _, part := range c {
		part.Collect(to)
	}
}
