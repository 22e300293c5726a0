// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
)

// skeleton contains the first commands of every script. Flushing a table removes its
// rules and keeps its chains. Packets that must be masqueraded carry the mark 0x2000,
// because kube-proxy uses 0x4000, and old kubelets drop packets with 0x8000.
const skeleton = `add table inet %[1]s
add chain inet %[1]s prerouting { type nat hook prerouting priority -100; }
add chain inet %[1]s output { type nat hook output priority -100; }
add chain inet %[1]s postrouting { type nat hook postrouting priority 100; }
flush table inet %[1]s
add rule inet %[1]s postrouting meta mark and 0x2000 != 0 meta mark set meta mark xor 0x2000 masquerade
`

// script is a list of nft commands for one table.
type script struct {
	strings.Builder
	table string
}

// rule adds a rule to a chain.
func (s *script) rule(chain string, words ...any) {
	fmt.Fprintf(s, "add rule inet %s %s %s", s.table, chain, fmt.Sprintln(words...))
}

// rules returns the script that writes the table for services. Chain
// prerouting has the rules for traffic from other machines and from pods. Chain output
// has the rules for traffic of the node itself.
func (b *backend) rules(node *api.Node, services []*api.View) string {
	s := &script{table: b.table}
	fmt.Fprintf(s, skeleton, b.table)
	nodeAddrs := nodeaddr.OfNode(node)
	var clusterIPs []netip.Addr
	for _, view := range services {
		for f := range nodeview.Frontends(view) {
			for _, match := range b.matches(&f) {
				s.sources(match, &f, nodeAddrs)
				s.traffic("prerouting", match, f.Elsewhere, f.Masquerade == nodeview.MasqueradeAll)
				s.traffic("output", match, f.Node, f.Masquerade != nodeview.MasqueradeIfConfigured)
			}
			if f.Kind == nodeview.ClusterIP {
				clusterIPs = append(clusterIPs, f.Addr)
			}
		}
		for i := range view.Endpoints {
			s.hairpin(view.Endpoints[i].Addr)
		}
	}
	for _, addr := range clusterIPs { // reject the unused ports of cluster IPs
		for _, chain := range []string{"prerouting", "output"} {
			s.reject(chain, fmt.Sprintf("%s daddr %s", ip(addr), addr))
		}
	}
	return s.String()
}

// matches returns nft expressions that match packets to a frontend. For a node
// port, it returns one expression for each network in nodePorts. For any other frontend,
// it returns a single expression.
func (b *backend) matches(f *nodeview.Frontend) []string {
	port := ""
	if f.Port != 0 { // 0 means every protocol and port (all-ports services)
		port = fmt.Sprintf(" meta l4proto %s th dport %d", strings.ToLower(f.Protocol.String()), f.Port)
	}
	if f.Kind != nodeview.NodePort {
		return []string{fmt.Sprintf("%s daddr %s%s", ip(f.Addr), f.Addr, port)}
	}
	var matches []string
	for _, network := range b.nodePorts {
		if api.FamilyOf(network.Addr()) == f.Family {
			matches = append(matches, fmt.Sprintf("%s daddr %s fib daddr type local%s", ip(network.Addr()), network, port))
		}
	}
	return matches
}

// sources adds rules that drop packets to a frontend if their source is not
// admitted.
func (s *script) sources(match string, f *nodeview.Frontend, nodeAddrs []netip.Addr) {
	if !f.Sources.Restricted {
		return
	}
	except := ""
	var admitted []string
	for _, p := range f.Sources.Prefixes(nodeAddrs) {
		admitted = append(admitted, p.String())
	}
	if len(admitted) > 0 {
		except = fmt.Sprintf("%s saddr != { %s }", ip(f.Addr), strings.Join(admitted, ", "))
	}
	s.rule("prerouting", match, except, "drop")
	s.rule("output", match, except, "drop")
}

// traffic adds the rules for one kind of traffic to a frontend.
func (s *script) traffic(chain, match string, t nodeview.Traffic, masquerade bool) {
	switch t.Verdict {
	case nodeview.Drop:
		s.rule(chain, match, "drop")
	case nodeview.Reject:
		s.reject(chain, match)
	case nodeview.Forward:
		mark := ""
		if masquerade {
			mark = "meta mark set meta mark or 0x2000"
		}
		for i, endpoint := range t.Endpoints {
			// The last rule matches all packets that reach it. The rule before it matches
			// one packet in two, and so on. So each endpoint gets the same share.
			s.rule(chain, match, oneIn(len(t.Endpoints)-i), mark, "dnat", ip(endpoint.Addr), "to", target(endpoint))
		}
	}
}

func (s *script) reject(chain, match string) {
	s.rule(chain, match, "meta l4proto tcp reject with tcp reset")
	s.rule(chain, match, "meta l4proto != tcp reject")
}

// hairpin adds a rule that masquerades connections of an endpoint to itself.
func (s *script) hairpin(addr netip.Addr) {
	s.rule("postrouting", "ct status dnat", ip(addr), "saddr", addr, ip(addr), "daddr", addr, "masquerade")
}

// oneIn returns an expression that matches one in n packets at random.
func oneIn(n int) string {
	if n == 1 {
		return ""
	}
	return fmt.Sprintf("numgen random mod %d == 0", n)
}

// target returns the address of an endpoint, with the port if the frontend has a port.
func target(t nodeview.Target) string {
	if t.Port == 0 {
		return t.Addr.String()
	}
	return netip.AddrPortFrom(t.Addr, uint16(t.Port)).String()
}

// ip returns nft's name for the family of an address.
func ip(addr netip.Addr) string {
	if addr.Is4() {
		return "ip"
	}
	return "ip6"
}
