// SPDX-License-Identifier: Apache-2.0

package program

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"
)

func TestFlagsOfNFTables(t *testing.T) {
	pods := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd01::/48")}
	for name, test := range map[string]struct {
		args []string
		want nftables.Options
	}{
		"by default only necessary connections are masqueraded": {nil, nftables.Options{Options: backends.Options{Sysctls: backends.SetSysctls, MasqueradeMark: 1 << 13}, DNATPriority: -100, SNATPriority: 100}},
		"with a pod network, sources outside it are masqueraded, as by kube-proxy": {
			[]string{"--cluster-cidr=10.1.2.3/16,fd01::/48"},
			nftables.Options{Options: backends.Options{Sysctls: backends.SetSysctls, MasqueradeMark: 1 << 13, ClusterCIDRs: pods, MasqueradeOutsiders: true}, DNATPriority: -100, SNATPriority: 100},
		},
		"masquerading of outside sources disabled": {
			[]string{"--pod-interfaces=cni0,veth*", "--masquerade-outside=false"},
			nftables.Options{Options: backends.Options{Sysctls: backends.SetSysctls, MasqueradeMark: 1 << 13, PodInterfaces: []string{"cni0", "veth*"}}, DNATPriority: -100, SNATPriority: 100},
		},
		"the node's pod CIDRs as the pod network": {
			[]string{"--node-pod-cidrs"},
			nftables.Options{Options: backends.Options{Sysctls: backends.SetSysctls, MasqueradeMark: 1 << 13, NodePodCIDRs: true, MasqueradeOutsiders: true}, DNATPriority: -100, SNATPriority: 100},
		},
		"all other flags": {
			[]string{"--service-cidr=10.1.2.3/16,fd01::/48", "--instance=x", "--masquerade-all", "--masquerade-bit=15", "--dnat-priority=-110", "--snat-priority=90", "--accept-unknown-ports", "--drop-invalid", "--sysctls=ignore"},
			nftables.Options{Options: backends.Options{Instance: "x", MasqueradeAll: true, MasqueradeMark: 1 << 15, AcceptUnknownPorts: true, Sysctls: backends.IgnoreSysctls}, ServiceCIDRs: pods, DNATPriority: -110, SNATPriority: 90, DropInvalid: true},
		},
	} {
		f := nftablesFlags{nodeFlags: nodeFlags{checks: newHealthChecks()}}
		testFlags(t, name, test.args, NFTables(), f.register, f.complete, test.want)
	}
}

// TestHelpOfNodePortAddresses checks that the help offers localhost only for backends that
// serve node ports at loopback addresses.
func TestHelpOfNodePortAddresses(t *testing.T) {
	kernel, user := pflag.NewFlagSet("", 0), pflag.NewFlagSet("", 0)
	(&nodeFlags{checks: newHealthChecks()}).register(kernel)
	userspaceFlags(user, &userspace.Options{}, newHealthChecks())
	for flags, want := range map[*pflag.FlagSet]bool{kernel: false, user: true} {
		if usage := flags.Lookup("node-port-addresses").Usage; strings.Contains(usage, "localhost") != want {
			t.Errorf("the help is %q, want localhost: %t", usage, want)
		}
	}
}

func TestInvalidFlagsOfNFTables(t *testing.T) {
	testInvalidFlags(t, NFTables,
		"--node-port-addresses=eth0", "--cluster-cidr=10.1.0.0", "--masquerade-bit=32", "--masquerade-bit=14", "--dnat-priority=0", "--snat-priority=-200", "--sysctls=maybe", "--instance=a b",
		"--node-port-addresses=127.0.0.0/8", "--conntrack-min=-1",
	)
}

func TestLoopbackAddressesAfterASpaceAreRefused(t *testing.T) {
	const item = "127.0.0.0/8"
	if _, err := configured(t, NFTables(), "--node-port-addresses=10.0.0.0/8, "+item); err == nil || !strings.Contains(err.Error(), item) {
		t.Errorf("error %v, want one that names %s", err, item)
	}
}

func TestHealthChecksCanBeLeftOut(t *testing.T) {
	if others := mustConfigure(t, NFTables(), "--no-health-checks").Parts().Beside; len(others) > 0 {
		t.Errorf("unexpected companions %v of the backend", others)
	}
}

func TestNFTablesMetrics(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	flows, table, checks := newFlowMetrics(), newNFTablesMetrics(nil), newHealthChecks()
	registry.MustRegister(slices.Concat(checks.collectors(), flows.collectors(), table.collectors())...)
	flows.observe(5, 3, time.Millisecond, nil)
	flows.observe(1, 0, time.Millisecond, errors.New("no permission"))
	o := backends.Observer(table)
	o.Holds("elements", 9)
	o.Holds("elements", 7)
	o.Wrote(100, nil)
	o.Wrote(100, errors.New("the map is full"))
	o.Wrote(100, nil)
	o.Drifted(true)
	o.Drifted(true)
	o.Drifted(false)
	got := map[string]float64{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	want := map[string]float64{
		"kpng_conntrack_entries_deleted_total": 3, "kpng_conntrack_entries_seen_total": 6, "kpng_conntrack_errors_total": 1, "kpng_conntrack_duration_seconds": 2,
		"kpng_healthcheck_faults_total": 0, "kpng_healthcheck_ports_failing": 0, "kpng_healthcheck_ports_open": 0,
		"kpng_nftables_drift_found_total": 2, "kpng_nftables_drift_repaired_total": 1, "kpng_nftables_elements": 7,
		"kpng_nftables_transaction_errors_total": 1, "kpng_nftables_transactions_total": 3,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
}
