// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// wideView returns the view of a service with ports, external IPs and endpoints.
func wideView(ports, externalIPs, endpoints int) *api.View {
	var portWords, endpointWords []string
	for i := range ports {
		portWords = append(portWords, fmt.Sprintf("p%d=%d>8080", i, 1000+i))
	}
	for i := range endpoints {
		endpointWords = append(endpointWords, fmt.Sprintf("10.1.%d.%d@elsewhere", i>>8, i&255))
	}
	svc := sinktest.Service("wide", strings.Join(portWords, " "))
	svc.IPFamilies = []api.Family{api.IPv4}
	svc.IPs.ExternalIPs = apitest.IPs("198.18.0.0", externalIPs)
	return sinktest.View(sinktest.Node("here"), svc, strings.Join(endpointWords, " "))
}

// TestFrontendsShareEndpoints plans a service whose frontends all have the same endpoints.
func TestFrontendsShareEndpoints(t *testing.T) {
	policies, _, err := plan(wideView(10, 20, 30), &environment{network: &hns.Network{}, maxBalancers: 200})
	if err != nil || len(policies) != 200 {
		t.Fatalf("%d load balancers, error %v, want 200", len(policies), err)
	}
	for i := range policies {
		if len(policies[i].endpoints) != 30 || &policies[i].endpoints[0] != &policies[0].endpoints[0] {
			t.Fatalf("%s has %d endpoints of its own, want the list of the first frontend", policies[i].frontend, len(policies[i].endpoints))
		}
	}
	if _, _, err := plan(wideView(10, 21, 30), &environment{network: &hns.Network{}, maxBalancers: 200}); err == nil {
		t.Error("a service with more frontends is not refused")
	}
}

func TestTunnels(t *testing.T) {
	network := &hns.Network{Overlay: true}
	for i := range 1000 {
		network.RemoteSubnets = append(network.RemoteSubnets, hns.RemoteSubnet{
			Prefix:   netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24),
			Provider: netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}),
		})
	}
	tunnels := newTunnels(network)
	if len(tunnels.lengths) != 1 {
		t.Errorf("a search tries the prefix lengths %v, want one length", tunnels.lengths)
	}
	for addr, want := range map[string]string{
		"10.1.2.3": "192.168.1.2", "192.168.3.231": "192.168.3.231", "10.4.0.1": "invalid IP", "fd00::1": "invalid IP",
	} {
		if got := tunnels.provider(netip.MustParseAddr(addr)).String(); got != want {
			t.Errorf("the tunnel to %s ends at %s, want %s", addr, got, want)
		}
	}
}
