// SPDX-License-Identifier: Apache-2.0

package program

import (
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/netnstest"
	"k8s.io/klog/v2"
)

func TestLeftoversOfKubeProxyAreFound(t *testing.T) {
	const removeChains = "kube-proxy --cleanup"
	for name, test := range map[string]struct {
		left []string // commands
		want []leftover
	}{
		"no leftovers": {},
		"tables and chains of other owners": {left: []string{
			"nft add table inet kube-proxy-of-another", "nft add chain inet kube-proxy-of-another KUBE-SERVICES",
			"iptables-legacy -t nat -N KUBE-SERVICES-OF-ANOTHER", "iptables-nft -t nat -N KUBE-KUBELET-CANARY",
		}},
		"mode nftables": {
			left: []string{"nft add table ip kube-proxy", "nft add chain ip kube-proxy services", "nft add chain ip kube-proxy more", "nft add table ip6 kube-proxy", "nft add chain ip6 kube-proxy services"},
			want: []leftover{
				{"nftables table ip kube-proxy", "nft delete table ip kube-proxy"},
				{"nftables table ip6 kube-proxy", "nft delete table ip6 kube-proxy"},
			},
		},
		"mode iptables, with iptables-nft": {
			left: []string{"iptables-nft -t nat -N KUBE-SERVICES", "ip6tables-nft -t filter -N KUBE-SERVICES"},
			want: []leftover{
				{"chain KUBE-SERVICES of iptables-nft in table ip nat", removeChains},
				{"chain KUBE-SERVICES of iptables-nft in table ip6 filter", removeChains},
			},
		},
		"mode iptables, with iptables-legacy": {
			left: []string{"iptables-legacy -t nat -N KUBE-SERVICES"},
			want: []leftover{{"chain KUBE-SERVICES of iptables-legacy in table ip nat", removeChains}},
		},
		"mode ipvs": {
			left: []string{"ip link add kube-ipvs0 type bridge"},
			want: []leftover{{"interface kube-ipvs0", "ip link delete kube-ipvs0"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := netnstest.New(t)
			for _, command := range test.left {
				n.Run(t, strings.Fields(command)...)
			}
			var got []leftover
			if err := n.Do(func() (err error) { got, err = findLeftovers(t.Context()); return err }); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(leftover{})); diff != "" {
				t.Errorf("leftovers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestLeftoversAreLoggedWithHowToRemoveThem(t *testing.T) {
	n := netnstest.New(t)
	n.Run(t, "nft", "add table ip kube-proxy")
	n.Run(t, "nft", "add chain ip kube-proxy services")
	var logged []string
	log := funcr.New(func(_, line string) { logged = append(logged, line) }, funcr.Options{})
	if err := n.Do(func() error { reportLeftovers(klog.NewContext(t.Context(), log)); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(logged) != 1 || !strings.Contains(logged[0], "nft delete table ip kube-proxy") {
		t.Errorf("logged %q, want one line that names the table and how to delete it", logged)
	}
}
