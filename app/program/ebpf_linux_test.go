// SPDX-License-Identifier: Apache-2.0

package program

import (
	"errors"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestFlagsOfEBPF(t *testing.T) {
	defaults := ebpf.Options{BPFFS: "/sys/fs/bpf", Annotation: "kpng.io/ebpf", MaxFrontends: 262144, MaxEndpoints: 1048576, MaxMembers: 262144, MaxClients: 65536}
	for name, test := range map[string]struct {
		args []string
		want ebpf.Options
	}{
		"defaults": {nil, defaults},
		"all flags": {
			[]string{
				"--instance=x", "--cgroup=/c", "--bpffs=/b", "--host-network-only", "--ebpf-annotation=example.com/a",
				"--max-frontends=1", "--max-endpoints=2", "--max-members=3", "--max-clients=4",
			},
			ebpf.Options{Options: backends.Options{Instance: "x"}, Cgroup: "/c", BPFFS: "/b", HostNetworkOnly: true, Annotation: "example.com/a", MaxFrontends: 1, MaxEndpoints: 2, MaxMembers: 3, MaxClients: 4},
		},
	} {
		f := ebpfFlags{nftablesFlags: nftablesFlags{nodeFlags: nodeFlags{checks: newHealthChecks()}}}
		options := func() (ebpf.Options, error) { return f.options(), nil }
		testFlags(t, name, test.args, EBPF(), f.register, options, test.want)
	}
}

func TestInvalidFlagsOfEBPF(t *testing.T) {
	testInvalidFlags(t, EBPF, "--masquerade-all", "--instance=a.b", "--max-clients=-1", "--masquerade-bit=32")
}

type fakeCounts struct {
	translated, left map[string]uint64
	err              error
}

func (c *fakeCounts) Counts() (translated, left map[string]uint64, err error) {
	return c.translated, c.left, c.err
}

func TestMetricsOfEBPF(t *testing.T) {
	m := newEBPFMetrics(ebpf.Options{MaxFrontends: 10, MaxEndpoints: 20, MaxMembers: 4})
	counts := &fakeCounts{err: errors.New("not started")}
	registry := prometheus.NewRegistry()
	registry.MustRegister(m.collectors()...)
	registry.MustRegister(ebpfCounts{counts})
	m.Holds("frontends", 9)
	m.Holds("frontends", 1)
	m.Holds("endpoints", 2)
	m.Holds("members", 3)
	m.Holds("services_left", 4)
	const gauges = `
# HELP kpng_ebpf_endpoints Endpoints of all frontends in the eBPF maps together.
# TYPE kpng_ebpf_endpoints gauge
kpng_ebpf_endpoints 2
# HELP kpng_ebpf_frontends Cluster IPs and ports in the eBPF maps.
# TYPE kpng_ebpf_frontends gauge
kpng_ebpf_frontends 1
# HELP kpng_ebpf_map_fill_ratio Used part of each eBPF map.
# TYPE kpng_ebpf_map_fill_ratio gauge
kpng_ebpf_map_fill_ratio{map="endpoints"} 0.1
kpng_ebpf_map_fill_ratio{map="frontends"} 0.1
kpng_ebpf_map_fill_ratio{map="members"} 0.75
# HELP kpng_ebpf_members Endpoints of UDP ports and of services with session affinity in the eBPF maps.
# TYPE kpng_ebpf_members gauge
kpng_ebpf_members 3
# HELP kpng_ebpf_services_left Services that do not fit into the eBPF maps and are handled without eBPF.
# TYPE kpng_ebpf_services_left gauge
kpng_ebpf_services_left 4
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(gauges)); err != nil {
		t.Error("before the start:", err)
	}
	*counts = fakeCounts{translated: map[string]uint64{"connect4": 5}, left: map[string]uint64{"no_memory": 6}}
	const counters = `
# HELP kpng_ebpf_left_total Connections and datagrams to frontends in the eBPF maps that the programs left to nftables, by reason.
# TYPE kpng_ebpf_left_total counter
kpng_ebpf_left_total{reason="no_memory"} 6
# HELP kpng_ebpf_translated_total Addresses that the eBPF programs replaced, by hook.
# TYPE kpng_ebpf_translated_total counter
kpng_ebpf_translated_total{hook="connect4"} 5
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(gauges+counters)); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
}
