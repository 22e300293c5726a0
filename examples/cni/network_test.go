// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	corev1 "k8s.io/api/core/v1"
)

// TestRoutesFollowNodes checks that syncRoutes adds, replaces and deletes routes, keeps
// routes of other programs, and continues after a route that cannot be added.
func TestRoutesFollowNodes(t *testing.T) {
	ns := netnstest.New(t)
	ns.Run(t, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	ns.Run(t, "ip", "link", "set", "eth1", "up")
	ns.Run(t, "ip", "link", "set", "eth0", "up")
	ns.Run(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "eth0")
	ns.Run(t, "ip", "addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad")
	ns.Run(t, "ip", "route", "add", "10.9.0.0/24", "via", "192.0.2.9")
	for _, step := range []struct {
		wanted  map[string]string
		routes  string
		problem string
	}{
		{map[string]string{"10.1.0.0/24": "192.0.2.2", "2001:db8:1::/64": "2001:db8::2"},
			"10.1.0.0/24 via 192.0.2.2, 10.9.0.0/24 via 192.0.2.9, 2001:db8:1::/64 via 2001:db8::2", ""},
		{map[string]string{"10.1.0.0/24": "192.0.2.3", "2001:db8:1::/64": "2001:db8::3", "10.2.0.0/24": "198.51.100.1"},
			"10.1.0.0/24 via 192.0.2.3, 10.9.0.0/24 via 192.0.2.9, 2001:db8:1::/64 via 2001:db8::3", "route 10.2.0.0/24 to node address 198.51.100.1"},
		{nil, "10.9.0.0/24 via 192.0.2.9", ""},
	} {
		wanted := map[netip.Prefix]netip.Addr{}
		for dst, gateway := range step.wanted {
			wanted[netip.MustParsePrefix(dst)] = netip.MustParseAddr(gateway)
		}
		err := ns.Do(func() error { return syncRoutes(wanted) })
		if got := errorText(err); !strings.Contains(got, step.problem) || step.problem == "" && got != "" {
			t.Errorf("error %q, want %q", got, step.problem)
		}
		if got := gatewayRoutes(ns.Run(t, "ip", "-4", "route") + ns.Run(t, "ip", "-6", "route")); got != step.routes {
			t.Errorf("routes %s\nwant   %s", got, step.routes)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// gatewayRoutes returns the destinations and gateways in the output of ip route.
func gatewayRoutes(output string) string {
	var routes []string
	for line := range strings.Lines(output) {
		if words := strings.Fields(line); len(words) > 2 && words[1] == "via" {
			routes = append(routes, strings.Join(words[:3], " "))
		}
	}
	return strings.Join(routes, ", ")
}

func TestConfigurationHasThePodCIDRs(t *testing.T) {
	for _, plugin := range []string{"bridge", "ptp"} {
		file := filepath.Join(t.TempDir(), "10-kpng.conflist")
		c := cniConfig{file: file, plugin: plugin, mtu: 1400}
		if err := c.write([]netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("2001:db8:1::/64")}); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var list struct {
			Plugins []struct {
				Type string
				MTU  int
				IPAM struct{ Ranges [][]struct{ Subnet string } }
			}
		}
		if err := json.Unmarshal(content, &list); err != nil {
			t.Fatal(err)
		}
		pods := list.Plugins[0]
		if pods.Type != plugin || pods.MTU != 1400 || pods.IPAM.Ranges[0][0].Subnet != "10.1.0.0/24" || pods.IPAM.Ranges[1][0].Subnet != "2001:db8:1::/64" {
			t.Errorf("configuration %s", content)
		}
		if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 1 {
			t.Errorf("files %v, error %v; want the configuration only", left, err)
		}
	}
}

func TestInternalIPOfAFamily(t *testing.T) {
	node := &corev1.Node{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
		{Type: corev1.NodeHostName, Address: "node-1"},
		{Type: corev1.NodeExternalIP, Address: "198.51.100.1"},
		{Type: corev1.NodeInternalIP, Address: "2001:db8::1"},
		{Type: corev1.NodeInternalIP, Address: "192.0.2.1"},
	}}}
	for ipv4, want := range map[bool]string{true: "192.0.2.1", false: "2001:db8::1"} {
		if got, ok := internalIP(node, ipv4); !ok || got.String() != want {
			t.Errorf("address %v, want %s", got, want)
		}
	}
	if got, ok := internalIP(&corev1.Node{}, true); ok {
		t.Errorf("a node without addresses has %v", got)
	}
}
