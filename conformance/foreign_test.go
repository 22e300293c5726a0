// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/conformance/internal/world"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// TestInventoryHasObjectsOfAllDataplanes checks that the inventory has each kind of
// object that a proxy may leave on the node.
func TestInventoryHasObjectsOfAllDataplanes(t *testing.T) {
	netnstest.NeedRoot(t)
	w, err := world.New(world.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	k := &kit{world: w, site: Site{host: w.Node}}
	inventory := func() string {
		t.Helper()
		text, err := k.inventory()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	run := func(command string) {
		t.Helper()
		fields := strings.Fields(command)
		if _, err := k.command("", fields[0], fields[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	before := inventory()
	for _, c := range []struct{ create, remove string }{
		{"nft add table ip6 left", "nft delete table ip6 left"},
		{"iptables-legacy -t nat -A OUTPUT -p tcp --dport 1 -j ACCEPT", "iptables-legacy -t nat -F OUTPUT"},
		{"ip6tables-legacy -N LEFT", "ip6tables-legacy -X LEFT"},
		{"ipset create LEFT hash:ip", "ipset destroy LEFT"},
		{"ip route add local 192.0.2.77 dev lo", "ip route del local 192.0.2.77 dev lo"},
	} {
		run(c.create)
		if inventory() == before {
			t.Errorf("the inventory does not change after %s", c.create)
		}
		run(c.remove)
		if diff := cmp.Diff(before, inventory()); diff != "" {
			t.Errorf("the inventory differs after %s (-want +got):\n%s", c.remove, diff)
		}
	}
}

func TestInventoryHasVirtualServers(t *testing.T) {
	const header = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
`
	if got := virtualServers(header); got != "" {
		t.Errorf("without virtual servers: %q", got)
	}
	const want = `virtual server: TCP 0A600001:0050 rr
virtual server: -> 0A010001:1F90 Masq 1
`
	got := virtualServers(header + "TCP  0A600001:0050 rr  \n  -> 0A010001:1F90      Masq    1      7          9         \n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("virtual servers (-want +got):\n%s", diff)
	}
}
