// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/iptables"
)

func TestFlagsOfIPTables(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want iptables.Options
	}{
		"by default only necessary connections are masqueraded": {nil, iptables.Options{Options: backends.Options{MasqueradeMark: 1 << 13, Sysctls: backends.SetSysctls}, Flavour: "detect"}},
		"with a pod network, sources outside it are masqueraded, as by kube-proxy": {
			[]string{"--cluster-cidr=10.1.2.3/16"},
			iptables.Options{Options: backends.Options{MasqueradeMark: 1 << 13, Sysctls: backends.SetSysctls, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, MasqueradeOutsiders: true}, Flavour: "detect"},
		},
		"all other flags": {
			[]string{"--instance=x", "--iptables-flavour=legacy", "--without-ipset", "--iptables-lock-wait=9s", "--node-pod-cidrs", "--pod-interfaces=cni0,veth*", "--masquerade-outside=false", "--masquerade-all", "--masquerade-bit=15", "--accept-unknown-ports", "--conntrack-tcp-be-liberal"},
			iptables.Options{Options: backends.Options{Instance: "x", Sysctls: backends.SetSysctls, NodePodCIDRs: true, PodInterfaces: []string{"cni0", "veth*"}, MasqueradeAll: true, MasqueradeMark: 1 << 15, AcceptUnknownPorts: true}, Flavour: "legacy", WithoutIPSet: true, LockWait: 9 * time.Second, AcceptInvalid: true},
		},
	} {
		f := iptablesFlags{}
		testFlags(t, name, test.args, IPTables(), f.register, f.complete, test.want)
	}
}

func TestInvalidFlagsOfIPTables(t *testing.T) {
	testInvalidFlags(t, IPTables,
		"--node-port-addresses=eth0", "--cluster-cidr=10.1.0.0", "--masquerade-bit=32", "--masquerade-bit=14", "--iptables-flavour=xtables", "--sysctls=maybe", "--instance=toolong",
		"--conntrack-min=-1", "--iptables-lock-wait=1ms",
	)
}
