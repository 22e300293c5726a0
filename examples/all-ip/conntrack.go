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

// flows has the pods that connections to an external IP may go to on.
//
// Rules decide about the first packet of a connection. Where there is no
// connection, as with UDP or pings, one that the kernel tracks lasts as long as
// packets follow each other, and leads on to a pod that is gone. Such entries
// are deleted, for the next packet to be a first one. TCP and SCTP notice by
// themselves.
type flows map[netip.Addr][]netip.Addr

// add makes the external IPs of before and after known, and lets connections go
// on to the pods that serve after, draining ones included.
func (f flows) add(before, after *api.ServiceEndpoints) {
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

// addAddressesOf makes those external IPs of a state known that are not yet.
func (f flows) addAddressesOf(s state) {
	for e := range s {
		if e.set == hairpin {
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

// forgetOthers deletes what the kernel tracks to external IPs in f, but does not
// go to one of the pods there.
func (f flows) forgetOthers() error {
	if len(f) == 0 {
		return nil
	}
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, f); err != nil {
			return fmt.Errorf("deleting connection-tracking entries: %w", err)
		}
	}
	return nil
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter: it reports whether
// to delete an entry.
func (f flows) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	if p := flow.Forward.Protocol; p == unix.IPPROTO_TCP || p == unix.IPPROTO_SCTP {
		return false
	}
	ip, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	pods, known := f[ip.Unmap()]
	pod, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
	return known && !slices.Contains(pods, pod.Unmap())
}
