// SPDX-License-Identifier: Apache-2.0

// Package healthport defines the purpose and the answers of a health-check node port.
package healthport

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

// Of returns the node port on which load balancers check whether this node has endpoints
// of svc. It returns 0 if svc has no such port. Only services of type LoadBalancer with
// externalTrafficPolicy Local have such a port.
func Of(svc *api.Service) int32 {
	if svc.Type != api.LoadBalancer || !svc.ExternalTrafficToLocal {
		return 0
	}
	return svc.HealthCheckNodePort
}

// Ready returns the number of distinct addresses of ready endpoints on this node. The
// health-check node port reports this number for each family.
func Ready(view *api.View, family api.Family) int {
	n := 0
	var last netip.Addr
	for i := range view.Endpoints {
		e := &view.Endpoints[i]
		if e.Local && e.Ready && api.FamilyOf(e.Addr) == family && e.Addr != last {
			n++
			last = e.Addr
		}
	}
	return n
}
