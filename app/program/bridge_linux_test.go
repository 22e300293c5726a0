// SPDX-License-Identifier: Apache-2.0

package program

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/netnstest"
)

func TestBridgesThatBreakServicesAreFound(t *testing.T) {
	call4, call6 := "net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"
	for name, test := range map[string]struct {
		pods     int
		addrs    []string
		settings []string
		want     []brokenBridge
	}{
		"packets between pods skip netfilter": {
			2, []string{"10.1.0.1/24", "fd01::1/64"}, []string{"bridge/bridge-nf-call-iptables=0", "bridge/bridge-nf-call-ip6tables=0"},
			[]brokenBridge{{"cni0", call4}, {"cni0", call6}},
		},
		"IPv6 packets between pods skip netfilter": {
			2, []string{"10.1.0.1/24", "fd01::1/64"}, []string{"bridge/bridge-nf-call-iptables=1", "bridge/bridge-nf-call-ip6tables=0"},
			[]brokenBridge{{"cni0", call6}},
		},
		"pods of a family that the bridge does not route": {
			2, []string{"10.1.0.1/24"}, []string{"bridge/bridge-nf-call-iptables=1", "bridge/bridge-nf-call-ip6tables=0"}, nil,
		},
		"a single pod": {
			1, []string{"10.1.0.1/24"}, []string{"bridge/bridge-nf-call-iptables=0"}, nil,
		},
		"a bridge that routes nothing": {
			2, nil, []string{"bridge/bridge-nf-call-iptables=0"}, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := netnstest.New(t)
			n.Set(t, test.settings...)
			n.Run(t, "ip", "link", "add", "cni0", "type", "bridge")
			for _, addr := range test.addrs {
				n.Run(t, "ip", "addr", "add", addr, "dev", "cni0")
			}
			for _, port := range []string{"veth1", "veth2"}[:test.pods] {
				n.Run(t, "ip", "link", "add", port, "type", "veth", "peer", "name", port+"p")
				n.Run(t, "ip", "link", "set", port, "master", "cni0")
			}
			var got []brokenBridge
			if err := n.Do(func() (err error) { got, err = findBrokenBridges(); return err }); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(brokenBridge{})); diff != "" {
				t.Errorf("bridges (-want +got):\n%s", diff)
			}
		})
	}
}
