// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The type flows maps each external IP to the pods whose connection-tracking entries
// all-ip keeps.
//
// Rules apply only to the first packet of a connection. For UDP and pings, connection
// tracking keeps an entry as long as packets arrive, even if the pod was removed.
// Therefore all-ip deletes the entries of removed pods. The kernel then applies the rules
// to the next packet of the client. TCP and SCTP detect a removed pod themselves.
type flows map[netip.Addr][]netip.Addr

// The method add puts into f the external IPs that a service had before a change, and
// those that it has after the change. A connection to a pod may continue if, after the
// change, the pod is an endpoint on this node or a draining endpoint of the service.
func (f flows) add(before, after *api.View) {
	for frontend := range frontends(before) {
		if _, known := f[frontend.Addr]; !known {
			f[frontend.Addr] = nil
		}
	}
	for frontend := range frontends(after) {
		f[frontend.Addr] = localPods(&frontend)
		for i := range after.Draining {
			f[frontend.Addr] = append(f[frontend.Addr], after.Draining[i].Addr)
		}
	}
}

// addAddressesOf adds the external IPs in s to f. It keeps existing entries of f.
func (f flows) addAddressesOf(s state) {
	for e := range s {
		if e.set == hairpinSet {
			continue
		}
		size := 4
		if e.family == api.IPv6 {
			size = 16
		}
		ip, _ := netip.AddrFromSlice([]byte(e.key[:size]))
		if _, known := f[ip]; !known {
			f[ip] = nil
		}
	}
}

// forgetOthers deletes the connection-tracking entries of each external IP in f, except
// the entries of the pods that f has for this IP.
func (f flows) forgetOthers() error {
	if len(f) == 0 {
		return nil
	}
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, f); err != nil {
			return fmt.Errorf("delete connection-tracking entries: %w", err)
		}
	}
	return nil
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter. It reports whether to
// delete a connection-tracking entry.
func (f flows) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	if p := flow.Forward.Protocol; p == unix.IPPROTO_TCP || p == unix.IPPROTO_SCTP {
		return false
	}
	ip, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	pods, known := f[ip.Unmap()]
	pod, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
	return known && !slices.Contains(pods, pod.Unmap())
}
