// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
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
		f := nftablesFlags{}
		testFlags(t, name, test.args, NFTables(), f.register, f.complete, test.want)
	}
}

func TestInvalidFlagsOfNFTables(t *testing.T) {
	testInvalidFlags(t, NFTables,
		"--service-cidr=10.1.0.0", "--service-cidr=auto,10.1.0.0/16", "--node-port-addresses=eth0", "--cluster-cidr=10.1.0.0", "--masquerade-bit=32", "--masquerade-bit=14", "--dnat-priority=0", "--snat-priority=-200", "--sysctls=maybe", "--instance=a b",
		"--conntrack-min=-1",
	)
}

func TestHealthChecksCanBeLeftOut(t *testing.T) {
	if others := mustConfigure(t, NFTables(), "--no-health-checks").Parts().Beside; len(others) > 0 {
		t.Errorf("unexpected companions %v of the backend", others)
	}
}
