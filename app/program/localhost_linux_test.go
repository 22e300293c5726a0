// SPDX-License-Identifier: Apache-2.0

package program

import (
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// TestLocalhostNodePortsRunBesideBackends checks that a backend gets the sink "localhost" if
// loopback addresses are selected.
func TestLocalhostNodePortsRunBesideBackends(t *testing.T) {
	for name, backend := range map[string]struct {
		make  func() sink.Sink
		flags []string
	}{
		"nftables": {make: NFTables}, "iptables": {make: IPTables}, "ipvs": {make: IPVS}, "ovs": {OVS, []string{"--bridge=br0"}},
	} {
		for selection, want := range map[string]bool{
			"": false, "all": false, "0.0.0.0/0": false,
			"localhost": true, "primary, localhost": true, "10.0.0.0/8,127.0.0.1/32": true, "::1/128": true,
		} {
			flags := slices.Clone(backend.flags)
			if selection != "" {
				flags = append(flags, "--node-port-addresses="+selection)
			}
			if _, ok := mustConfigure(t, backend.make(), flags...).Parts().Beside["localhost"]; ok != want {
				t.Errorf("%s with the node-port addresses %q: localhost %t, want %t", name, selection, ok, want)
			}
		}
	}
	if len(mustConfigure(t, Userspace(), "--add-addresses=false", "--node-port-addresses=localhost").Parts().Beside) != 1 {
		t.Error("the backend userspace has a further sink, although it serves loopback addresses itself")
	}
}

type fixedTotals struct{}

func (fixedTotals) Totals(f func(family api.Family, listeners, failures int64)) int64 {
	f(api.IPv4, 3, 1)
	f(api.IPv6, 2, 0)
	return 7
}

// TestMetricsOfLocalhostNodePorts checks that the metrics exist under kpng's and under
// kube-proxy's names.
func TestMetricsOfLocalhostNodePorts(t *testing.T) {
	parts := mustConfigure(t, NFTables(), "--node-port-addresses=localhost").Parts()
	of := func(c any) *localhostTotals {
		l, ok := c.(*localhostTotals)
		if !ok {
			t.Fatalf("a collector is a %T", c)
		}
		l.listenerTotals = fixedTotals{}
		return l
	}
	for c, want := range map[*localhostTotals]string{
		of(parts.Collectors[1]): `# HELP kpng_localhost_accepted_total TCP connections and UDP clients that came to node ports at loopback addresses.
# TYPE kpng_localhost_accepted_total counter
kpng_localhost_accepted_total 7
# HELP kpng_localhost_listener_failures_total Times that a listener for a node port at a loopback address could not be opened.
# TYPE kpng_localhost_listener_failures_total counter
kpng_localhost_listener_failures_total{ip_family="IPv4"} 1
kpng_localhost_listener_failures_total{ip_family="IPv6"} 0
# HELP kpng_localhost_listeners Open listeners for node ports at loopback addresses.
# TYPE kpng_localhost_listeners gauge
kpng_localhost_listeners{ip_family="IPv4"} 3
kpng_localhost_listeners{ip_family="IPv6"} 2
`,
		of(parts.KubeProxy[0]): `# HELP kubeproxy_iptables_localhost_nodeports_accepted_packets_total As in kube-proxy.
# TYPE kubeproxy_iptables_localhost_nodeports_accepted_packets_total counter
kubeproxy_iptables_localhost_nodeports_accepted_packets_total 7
# HELP kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total As in kube-proxy.
# TYPE kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total counter
kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total{ip_family="IPv4"} 1
kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total{ip_family="IPv6"} 0
# HELP kubeproxy_nftables_localhost_nodeport_listeners As in kube-proxy.
# TYPE kubeproxy_nftables_localhost_nodeport_listeners gauge
kubeproxy_nftables_localhost_nodeport_listeners{ip_family="IPv4"} 3
kubeproxy_nftables_localhost_nodeport_listeners{ip_family="IPv6"} 2
`} {
		if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
	}
}
