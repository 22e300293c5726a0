// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// nftablesOf returns what a command line makes.
func nftablesOf(args ...string) (nftables.Options, *nodeProxy, error) {
	var f nftablesFlags
	cmd := &cobra.Command{Use: "nftables", RunE: func(*cobra.Command, []string) error { return nil }, SilenceErrors: true, SilenceUsage: true}
	f.register(cmd)
	cmd.SetArgs(args)
	if err := cmd.Execute(); err != nil {
		return nftables.Options{}, nil, err
	}
	opts, err := f.complete()
	if err != nil {
		return opts, nil, err
	}
	p, err := f.sink()
	return opts, p, err
}

func TestFlagsOfNFTables(t *testing.T) {
	pods := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd01::/48")}
	for name, test := range map[string]struct {
		args []string
		want nftables.Options
	}{
		"by default nothing is masqueraded that need not be": {nil, nftables.Options{MasqueradeMark: 1 << 13, DNATPriority: -100, SNATPriority: 100, NFT: "nft"}},
		"with a pod network, outsiders are masqueraded as by kube-proxy": {
			[]string{"--cluster-cidr=10.1.2.3/16,fd01::/48"},
			nftables.Options{MasqueradeMark: 1 << 13, DNATPriority: -100, SNATPriority: 100, NFT: "nft", ClusterCIDRs: pods, MasqueradeOutsiders: true},
		},
		"unless that is turned off": {
			[]string{"--pod-interfaces=cni0,veth*", "--masquerade-outside=false"},
			nftables.Options{MasqueradeMark: 1 << 13, DNATPriority: -100, SNATPriority: 100, NFT: "nft", PodInterfaces: []string{"cni0", "veth*"}},
		},
		"everything else": {
			[]string{"--instance=x", "--masquerade-all", "--masquerade-bit=15", "--dnat-priority=-110", "--snat-priority=90", "--accept-unknown-ports", "--sysctls=set", "--nft=/bin/nft"},
			nftables.Options{Instance: "x", MasqueradeAll: true, MasqueradeMark: 1 << 15, DNATPriority: -110, SNATPriority: 90, AcceptUnknownPorts: true, Sysctls: nftables.SetSysctls, NFT: "/bin/nft"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, p, err := nftablesOf(test.args...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if len(p.Beside(nil)) != 1 {
				t.Error("health checks are not answered")
			}
			if _, ok := any(p).(sink.Cleaner); !ok {
				t.Error("there is no way to clean up")
			}
		})
	}
}

func TestFlagsOfNFTablesThatMakeNoSense(t *testing.T) {
	for _, arg := range []string{
		"--node-port-addresses=eth0", "--cluster-cidr=10.1.0.0", "--masquerade-bit=32", "--masquerade-bit=14", "--dnat-priority=0", "--snat-priority=-200", "--sysctls=maybe", "--instance=a b",
	} {
		_, _, err := nftablesOf(arg)
		if err == nil {
			t.Errorf("%s is accepted", arg)
		} else if value := strings.SplitN(arg, "=", 2)[1]; !strings.Contains(err.Error(), value) && arg != "--masquerade-bit=14" {
			t.Errorf("the error about %s does not say what is wrong: %v", arg, err)
		}
	}
}

func TestHealthChecksCanBeLeftOut(t *testing.T) {
	_, p, err := nftablesOf("--no-health-checks")
	if err != nil {
		t.Fatal(err)
	}
	if beside := p.Beside(nil); len(beside) > 0 {
		t.Errorf("there is %v beside the backend", beside)
	}
}
