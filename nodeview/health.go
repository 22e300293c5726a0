// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

// HealthCheckPort returns the node port on which load balancers ask whether
// this node has endpoints of svc, 0 if there is none. Only services of type
// LoadBalancer with externalTrafficPolicy Local have one.
func HealthCheckPort(svc *api.Service) int32 {
	if svc.Type != api.LoadBalancer || !externalPolicyLocal(svc) {
		return 0
	}
	return svc.HealthCheckNodePort
}

// ReadyLocal returns what the health-check node port answers about a family:
// how many distinct addresses the ready endpoints on this node have.
func ReadyLocal(se *api.ServiceEndpoints, family api.Family) int {
	n := 0
	var last netip.Addr
	for i := range se.Endpoints {
		e := &se.Endpoints[i]
		if !e.Local || !e.Ready || api.FamilyOf(e.Addr) != family || e.Addr == last {
			continue
		}
		n++
		last = e.Addr
	}
	return n
}
