// SPDX-License-Identifier: Apache-2.0

package program

import (
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/prometheus/client_golang/prometheus"
)

// addLocalhost adds the sink for node ports at loopback addresses to the parts of a backend,
// if such addresses are selected.
func addLocalhost(parts *command.Parts, node *nodesinks.Node) error {
	localhost, err := node.Localhost()
	if localhost == nil || err != nil {
		return err
	}
	parts.Beside["localhost"] = localhost
	parts.Collectors = append(parts.Collectors, newPortMetrics("localhost", localhost.(portStats)), &localhostTotals{
		listenerTotals: localhost.(listenerTotals),
		listeners:      prometheus.NewDesc("kpng_localhost_listeners", "Open listeners for node ports at loopback addresses.", familyLabel, nil),
		failures:       prometheus.NewDesc("kpng_localhost_listener_failures_total", "Times that a listener for a node port at a loopback address could not be opened.", familyLabel, nil),
		accepted:       prometheus.NewDesc("kpng_localhost_accepted_total", "TCP connections and UDP clients that came to node ports at loopback addresses.", nil, nil),
	})
	parts.KubeProxy = append(parts.KubeProxy, &localhostTotals{
		listenerTotals: localhost.(listenerTotals),
		listeners:      prometheus.NewDesc("kubeproxy_nftables_localhost_nodeport_listeners", asInKubeProxy, familyLabel, nil),
		failures:       prometheus.NewDesc("kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total", asInKubeProxy, familyLabel, nil),
		accepted:       prometheus.NewDesc("kubeproxy_iptables_localhost_nodeports_accepted_packets_total", asInKubeProxy, nil, nil),
	})
	return nil
}

var familyLabel = []string{"ip_family"}

// listenerTotals is implemented by the dataplane of package userspace.
type listenerTotals interface {
	Totals(func(family api.Family, listeners, failures int64)) (accepted int64)
}

// localhostTotals collects totals of node ports at loopback addresses.
type localhostTotals struct {
	listenerTotals
	listeners, failures, accepted *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *localhostTotals) Describe(to chan<- *prometheus.Desc) {
	to <- c.listeners
	to <- c.failures
	to <- c.accepted
}

// Collect implements prometheus.Collector.
func (c *localhostTotals) Collect(to chan<- prometheus.Metric) {
	accepted := c.Totals(func(family api.Family, listeners, failures int64) {
		to <- prometheus.MustNewConstMetric(c.listeners, prometheus.GaugeValue, float64(listeners), family.String())
		to <- prometheus.MustNewConstMetric(c.failures, prometheus.CounterValue, float64(failures), family.String())
	})
	to <- prometheus.MustNewConstMetric(c.accepted, prometheus.CounterValue, float64(accepted))
}
