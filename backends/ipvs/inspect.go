// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/nodeview"
)

// Inspect implements [backends.Inspector]. Its lines are the virtual server and its endpoints.
// An endpoint of weight 0 only has existing connections. If IPVS cannot serve the service, a
// line says why, and the description of the backend nftables follows.
func (b *backend) Inspect(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, view *api.View) (string, error) {
	var out strings.Builder
	if isUnsuitable(view) {
		fmt.Fprintf(&out, "not served by IPVS: %s\n", unsuitable(view.Service))
		d, err := b.rest.new(nil)
		if err != nil {
			return "", err
		}
		text, err := d.(backends.Inspector).Inspect(ctx, addr, protocol, port, view)
		return out.String() + text, err
	}
	id := serverID{netip.AddrPortFrom(addr, uint16(port)), protocol}
	wanted := map[netip.AddrPort]bool{}
	for f := range nodeview.Frontends(view) {
		here := f.Addr == addr || f.Kind == nodeview.NodePort && f.Family == api.FamilyOf(addr)
		if here && f.Protocol == protocol && f.Port == port {
			for _, t := range f.Elsewhere.Endpoints {
				wanted[t.AddrPort()] = true
			}
		}
	}
	c := &conn{netNS: b.opts.NetNS}
	defer c.close()
	s, err := c.read(id)
	if err != nil {
		return "", err
	}
	if s == nil {
		fmt.Fprintf(&out, "there is no virtual server %s\n", id)
		s = &server{}
	} else {
		fmt.Fprintf(&out, "virtual server %s scheduler %s\n", id, s.scheduler)
	}
	for _, at := range slices.SortedFunc(maps.Keys(s.destinations), netip.AddrPort.Compare) {
		to, sign := s.destinations[at], " "
		if view != nil && to.weight > 0 && !wanted[at] {
			sign = "+"
		}
		if to.weight > 0 {
			delete(wanted, at)
		}
		fmt.Fprintf(&out, "%s endpoint %s weight %d connections %d\n", sign, at, to.weight, to.connections)
	}
	for _, at := range slices.SortedFunc(maps.Keys(wanted), netip.AddrPort.Compare) {
		fmt.Fprintf(&out, "- endpoint %s\n", at)
	}
	return out.String(), nil
}
