// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// PortTraffic has the decisions that all frontends of one service port and family share.
// See [PortTraffics].
type PortTraffic struct {
	// ServicePort is the service port, or nil for an all-ports service.
	ServicePort *api.PortMapping
	Family      api.Family
	// Internal applies to cluster IPs, and External to all other frontends. InternalLocal
	// and ExternalLocal report whether the Local list is used. Otherwise, the Cluster list
	// is used.
	Internal, External           Traffic
	InternalLocal, ExternalLocal bool
	// ShortCircuit applies to traffic from this node to external frontends. It always uses
	// the Cluster list.
	ShortCircuit Traffic
}

// PortTraffics yields the decisions for each service port and family that can have
// frontends, in the order of [Frontends]. Its cost does not depend on the number of
// addresses. If view is nil, it yields nothing.
func PortTraffics(view *api.View) iter.Seq[PortTraffic] {
	return func(yield func(PortTraffic) bool) {
		if view == nil || wholeAddress(view.Service) && !view.Service.AllPorts {
			return
		}
		lists, pol, served := newPortLists(view), policiesOf(view.Service), view.Service.Families()
		for _, port := range servedPorts(nil, view.Service) {
			for _, family := range [...]api.Family{api.IPv4, api.IPv6} {
				if !slices.Contains(served, family) {
					continue
				}
				lists.prepare(port, family)
				t := PortTraffic{
					ServicePort: port, Family: family,
					Internal: lists.traffic(lists.internal), InternalLocal: pol.internalLocal,
					External: lists.traffic(lists.external), ExternalLocal: pol.externalLocal,
					ShortCircuit: lists.traffic(lists.shortCircuit),
				}
				if !yield(t) {
					return
				}
			}
		}
	}
}
