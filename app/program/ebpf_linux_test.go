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
				"--instance=x", "--cgroup=/c", "--bpffs=/b", "--host-network-only", "--exclude-cgroups=/a,b/c", "--tcp-only", "--ebpf-annotation=example.com/a",
				"--max-frontends=1", "--max-endpoints=2", "--max-members=3", "--max-clients=4",
			},
			ebpf.Options{Options: backends.Options{Instance: "x"}, Cgroup: "/c", BPFFS: "/b", HostNetworkOnly: true, ExcludedCgroups: []string{"/a", "b/c"}, TCPOnly: true, Annotation: "example.com/a", MaxFrontends: 1, MaxEndpoints: 2, MaxMembers: 3, MaxClients: 4},
		},
	} {
		f := ebpfFlags{}
		options := func() (ebpf.Options, error) { return f.options(), nil }
		testFlags(t, name, test.args, EBPF(), f.register, options, test.want)
	}
}

func TestInvalidFlagsOfEBPF(t *testing.T) {
	testInvalidFlags(t, EBPF, "--masquerade-all", "--instance=a.b", "--max-clients=-1", "--exclude-cgroups=../a", "--exclude-pods=a b", "--masquerade-bit=32")
}

type fakeCounts struct {
	translated, left map[string]uint64
	err              error
}

func (c *fakeCounts) Counts() (translated, left map[string]uint64, err error) {
	return c.translated, c.left, c.err
}

func TestCountsOfEBPF(t *testing.T) {
	counts := &fakeCounts{err: errors.New("not started")}
	registry := prometheus.NewRegistry()
	registry.MustRegister(ebpfCounts{counts})
	if err := testutil.GatherAndCompare(registry, strings.NewReader("")); err != nil {
		t.Error("before the start:", err)
	}
	*counts = fakeCounts{translated: map[string]uint64{"connect4": 5}, left: map[string]uint64{"no_memory": 6}}
	const want = `
# HELP kpng_ebpf_left_total Connections and datagrams to frontends in the eBPF maps that the programs left to nftables, by reason: excluded (process or pod), list_changed (at that moment), bound_port (the socket had a port before it connected), no_endpoint (only existing sockets may use the endpoints), no_memory (no room for the socket, or the service has its share of clients), ambiguous (a UDP answer could have a wrong source), abandoned (kpng did not run for ten minutes, or an error paused the programs).
# TYPE kpng_ebpf_left_total counter
kpng_ebpf_left_total{reason="no_memory"} 6
# HELP kpng_ebpf_translated_total Addresses that the eBPF programs replaced, by hook: connect and sendmsg replace a service by an endpoint, recvmsg and getpeername an endpoint by a service.
# TYPE kpng_ebpf_translated_total counter
kpng_ebpf_translated_total{hook="connect4"} 5
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
}
