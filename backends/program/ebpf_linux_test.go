// SPDX-License-Identifier: Apache-2.0

package program

import (
	"testing"

	"github.com/google/go-cmp/cmp"
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
			ebpf.Options{
				Instance: "x", Cgroup: "/c", BPFFS: "/b", HostNetworkOnly: true, Annotation: "example.com/a",
				MaxFrontends: 1, MaxEndpoints: 2, MaxMembers: 3, MaxClients: 4,
			},
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

func TestMetricsOfEBPF(t *testing.T) {
	m := newEBPFMetrics()
	registry := prometheus.NewRegistry()
	registry.MustRegister(m.collectors()...)
	m.observe(ebpf.Usage{Frontends: 9})
	m.observe(ebpf.Usage{Frontends: 1, Endpoints: 2, Members: 3, ServicesLeft: 4})
	got := map[string]float64{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue()
	}
	want := map[string]float64{"kpng_ebpf_frontends": 1, "kpng_ebpf_endpoints": 2, "kpng_ebpf_members": 3, "kpng_ebpf_services_left": 4}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
}
