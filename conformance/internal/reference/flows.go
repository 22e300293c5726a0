// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// flowCleaner deletes stale UDP flows from connection tracking.
type flowCleaner struct {
	// frontends has each frontend of the last Sync.
	frontends map[netip.AddrPort]nodeview.Existing
}

func (f *flowCleaner) reconcile(opts *Options, services []*api.View) error {
	nodes, err := nodePortAddrs(opts.NodePortCIDRs)
	if err != nil {
		return err
	}
	old := f.frontends
	f.frontends = map[netip.AddrPort]nodeview.Existing{}
	for _, view := range services {
		for fe := range nodeview.Frontends(view) {
			if fe.Protocol != api.UDP && opts.Fault != ForgetsFlows {
				continue
			}
			for at := range fe.At(nodes) {
				f.frontends[at] = fe.Existing
			}
		}
	}
	var removed []netip.AddrPort // all their flows are stale
	for at := range old {
		if _, still := f.frontends[at]; !still {
			f.frontends[at] = nodeview.Existing{}
			removed = append(removed, at)
		}
	}
	for _, family := range flowFamilies(f.frontends) {
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, staleFilter{f, opts.Fault == ForgetsFlows}); err != nil {
			return fmt.Errorf("delete flows: %w", err)
		}
	}
	for _, at := range removed {
		delete(f.frontends, at)
	}
	return nil
}

// flowFamilies yields the families that have a frontend. To list the flows of a family,
// the kernel reads its whole table of flows, with those of all network namespaces.
func flowFamilies(frontends map[netip.AddrPort]nodeview.Existing) iter.Seq2[api.Family, netlink.InetFamily] {
	families := map[api.Family]netlink.InetFamily{}
	for at := range frontends {
		if at.Addr().Is6() {
			families[api.IPv6] = unix.AF_INET6
		} else {
			families[api.IPv4] = unix.AF_INET
		}
	}
	return maps.All(families)
}

// staleFilter selects the flows whose endpoint was removed.
type staleFilter struct {
	*flowCleaner
	all bool
}

func (s staleFilter) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	if flow.Forward.Protocol != unix.IPPROTO_UDP && !s.all {
		return false
	}
	to, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	by, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
	existing, ours := s.frontends[netip.AddrPortFrom(to.Unmap(), flow.Forward.DstPort)]
	return ours && (s.all || !existing.Has(netip.AddrPortFrom(by.Unmap(), flow.Reverse.SrcPort)))
}
