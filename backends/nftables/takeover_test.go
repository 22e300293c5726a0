// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

// TestAnUpdateKeepsClientsAtTheirEndpoints replaces a table of the previous layout. The table
// has clients: the node, a pod, and a host outside. Each of them must stay at the endpoint
// that the old table has for it.
func TestAnUpdateKeepsClientsAtTheirEndpoints(t *testing.T) {
	w := newPacketWorld(t)
	runNFT(t, w.node, "", "-f", "testdata/layout-2.nft")
	all := batchOf(true,
		set(view("sticky", []string{"10.96.0.1", "fd00::1"}, []string{"!10.0.1.2", "!10.0.2.2", "!fd01:1::2", "!fd01:2::2"}, func(s *api.Service) {
			affine(s)
			s.Type, s.Ports[0].NodePort, s.ExternalTrafficToLocal = api.NodePort, 30001, true
		})),
		set(view("plain", []string{"10.96.0.2"}, webEndpoints, nil)),
		set(view("all", nil, webEndpoints, func(s *api.Service) {
			affine(s)
			s.IPs.Headless, s.AllPorts, s.IPs.ExternalIPs = true, true, api.NewIPSet(netip.MustParseAddr("203.0.113.6"))
		})))
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	mustSync(t, b, all)
	if tables := runNFT(t, w.node, "", "list", "tables"); tables != "table inet kpng2\n" {
		t.Fatalf("the tables are\n%s", tables)
	}
	t.Log(runNFT(t, w.node, "", "list", "map", "inet", "kpng2", "clients4"))
	for range 8 {
		for to, want := range map[string][2]string{ // answers to the outside client and to pod2
			"10.96.0.1:80":     {"pod2", "pod1"},
			"192.0.2.1:30001":  {"pod2", "pod1"},
			"[fd00::1]:80":     {"pod1", "pod1"},
			"203.0.113.6:8080": {"pod2", "pod1"},
		} {
			for i, from := range []string{"client", "pod2"} {
				ns := w.client
				if from == "pod2" {
					ns = w.pod2
				}
				answer, err := ask(ns, to, patience)
				if pod, _, _ := strings.Cut(answer, " "); err != nil || pod != want[i] {
					t.Fatalf("%s gets %q, %v from %s, want %s", from, answer, err, to, want[i])
				}
			}
		}
	}
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
}
