// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// forwardingNode returns a node that forwards packets between two other namespaces.
func forwardingNode(t *testing.T) (node, a, b *netnstest.Namespace) {
	node, a, b = netnstest.New(t), netnstest.New(t), netnstest.New(t)
	node.Set(t, "ipv4/ip_forward=1")
	node.Set(t, "ipv6/conf/all/forwarding=1")
	for i, peer := range []*netnstest.Namespace{a, b} {
		name := fmt.Sprint("pod", i)
		node.Join(t, name, peer, "eth0")
		for j, text := range []string{"10.2.%d.%d/24", "fd02:%d::%d/64"} {
			node.Add(t, name, fmt.Sprintf(text, i, 1))
			peer.Add(t, "eth0", fmt.Sprintf(text, i, 2))
			gateway, _, _ := strings.Cut(fmt.Sprintf(text, i, 1), "/")
			peer.Route(t, []string{"0.0.0.0/0", "::/0"}[j], gateway, "eth0")
		}
	}
	return node, a, b
}

func TestInvalidPacketsAreDropped(t *testing.T) {
	for _, v := range variants {
		for _, accept := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, AcceptInvalid %t", v, accept), func(t *testing.T) {
				node, from, to := forwardingNode(t)
				mustSync(t, start(t, node, v, func(o *options) { o.AcceptInvalid = accept }), pass())
				for _, address := range []string{"10.2.1.2", "fd02:1::2"} {
					if passed := backendtest.InvalidPacketPasses(t, from, to, address); passed != accept {
						t.Errorf("an invalid packet to %s passes: %t", address, passed)
					}
				}
			})
		}
	}
}

// TestSourceRangesDoNotDependOnOtherNATRules adds a rule of another program before the
// jump of the backend. The rule translates the packets that the source ranges exclude.
func TestSourceRangesDoNotDependOnOtherNATRules(t *testing.T) {
	eachVariant(t, func(t *testing.T, _ *netnstest.Namespace, v variant) {
		node, from, to := forwardingNode(t)
		netnstest.Listen(t, to.Do, ":8080", func(net.Conn) {})
		mustSync(t, start(t, node, v), pass(view("ranges", "10.96.0.1 fd00:96::1", "10.1.0.1 fd00::1", loadBalancer, sourceRanges)))
		node.Run(t, programName(v.flavour, api.IPv4, ""), "-t", "nat", "-I", "PREROUTING", "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", "10.2.1.2:8080")
		node.Run(t, programName(v.flavour, api.IPv6, ""), "-t", "nat", "-I", "PREROUTING", "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", "[fd02:1::2]:8080")
		for address, want := range map[string]bool{"203.0.113.1:80": false, "203.0.113.9:80": true, "[2001:db8:1::1]:80": false, "[2001:db8:1::9]:80": true} {
			backendtest.CheckConnect(t, from, address, want)
		}
	})
}

func TestTheNodeIsRefusedAtItsOwnClusterIPs(t *testing.T) {
	eachVariant(t, func(t *testing.T, ns *netnstest.Namespace, v variant) {
		b := start(t, ns, v)
		backendtest.RefusedAtOwnClusterIPs(t, ns, node, func(view *api.View) { mustSync(t, b, pass(view)) })
	})
}
