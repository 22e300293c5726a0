// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"net"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestDeletedConnections(t *testing.T) {
	after := view(endpoint("11.0.2.2", true), endpoint("1100::202", true))
	after.Draining = []api.Endpoint{endpoint("11.0.2.3", true)}
	serving, gone, filtered := newDataplane(), newDataplane(), newDataplane()
	filtered.stale[netip.MustParseAddr("10.0.0.55")] = true
	filtered.pods[netip.MustParseAddr("10.0.0.55")] = "11.0.2.2"
	serving.Plan(after, func(o object, value string) {
		if o.part == flowPart {
			serving.pods[o.ip] = value
		}
	})
	for _, ip := range []string{"10.0.0.55", "1000::55"} {
		serving.stale[netip.MustParseAddr(ip)], gone.stale[netip.MustParseAddr(ip)] = false, false
	}

	for _, test := range []struct {
		name      string
		dataplane *dataplane
		protocol  uint8
		to, pod   string
		want      bool
	}{
		{"UDP to a serving pod", serving, unix.IPPROTO_UDP, "10.0.0.55", "11.0.2.2", false},
		{"UDP to a draining pod", serving, unix.IPPROTO_UDP, "10.0.0.55", "11.0.2.3", false},
		{"UDP to a removed pod", serving, unix.IPPROTO_UDP, "10.0.0.55", "11.0.2.4", true},
		{"UDP that bypassed the service", serving, unix.IPPROTO_UDP, "10.0.0.55", "10.0.0.55", true},
		{"a ping to a removed pod", serving, unix.IPPROTO_ICMPV6, "1000::55", "1100::204", true},
		{"IPv6 to a serving pod", serving, unix.IPPROTO_UDP, "1000::55", "1100::202", false},
		{"TCP to a removed pod", serving, unix.IPPROTO_TCP, "10.0.0.55", "11.0.2.4", false},
		{"SCTP to a removed pod", serving, unix.IPPROTO_SCTP, "10.0.0.55", "11.0.2.4", false},
		{"UDP to an unrelated address", serving, unix.IPPROTO_UDP, "10.0.0.56", "11.0.2.4", false},
		{"UDP to an external IP that has not changed", &dataplane{}, unix.IPPROTO_UDP, "10.0.0.55", "11.0.2.4", false},
		{"UDP to a serving pod after a change of the filter", filtered, unix.IPPROTO_UDP, "10.0.0.55", "11.0.2.2", true},
		{"TCP to a serving pod after a change of the filter", filtered, unix.IPPROTO_TCP, "10.0.0.55", "11.0.2.2", false},
		{"UDP to a deleted service", gone, unix.IPPROTO_UDP, "10.0.0.55", "11.0.2.2", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			flow := &netlink.ConntrackFlow{}
			flow.Forward.Protocol = test.protocol
			flow.Forward.DstIP = net.IP(netip.MustParseAddr(test.to).AsSlice())
			flow.Reverse.SrcIP = net.ParseIP(test.pod) // the kernel may return an IPv4 address in 16 bytes
			if got := test.dataplane.MatchConntrackFlow(flow); got != test.want {
				t.Errorf("deleted: %t, want %t", got, test.want)
			}
		})
	}
}
