// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// deleteFlows deletes connection-tracking entries of the IPs in d.stale. It keeps the
// entries of pods that d.pods has for the IP, unless the value in d.stale is true.
//
// Rules apply only to the first packet of a connection. For UDP and pings, connection
// tracking keeps an entry as long as packets arrive, even if the pod was removed.
// Therefore all-ip deletes the entries of removed pods, and those of IPs whose filter changed. The kernel then applies the rules
// to the next packet of the client. TCP and SCTP detect a removed pod themselves.
func (d *dataplane) deleteFlows() error {
	if len(d.stale) == 0 {
		return nil
	}
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, d); err != nil {
			clear(d.pods) // the next pass adds them, and checks all flows again
			return fmt.Errorf("delete connection-tracking entries: %w", err)
		}
	}
	clear(d.stale)
	return nil
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter. It reports whether to
// delete a connection-tracking entry.
func (d *dataplane) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	if p := flow.Forward.Protocol; p == unix.IPPROTO_TCP || p == unix.IPPROTO_SCTP {
		return false
	}
	ip, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	pod, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
	pods := strings.Fields(d.pods[ip.Unmap()])
	all, stale := d.stale[ip.Unmap()]
	return all || stale && !slices.Contains(pods, pod.Unmap().String())
}
