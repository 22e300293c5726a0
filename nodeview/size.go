// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"iter"

	"github.com/kpng-project/kpng/api"
)

// Size estimates the number of elements that a backend may have to program for a service
// with the given number of endpoints: one for the service, its source ranges, and the
// frontends and endpoints of each port. It takes no time. So a program can decide when to
// compute a view, and when to program it.
func Size(svc *api.Service, endpoints int) int {
	ips := &svc.IPs
	addrs := ips.ClusterIPs.Len() + ips.LoadBalancerIPs.Len() + ips.ExternalIPs.Len()
	size := 1 + max(len(svc.Ports), 1)*(addrs+endpoints)
	for i := range svc.SourceRanges {
		size += len(svc.SourceRanges[i].Prefixes)
	}
	return size
}

// FrontendKeys yields the keys of the frontends of se, in the order of [Frontends]. Unlike
// Frontends, it takes no time for endpoints.
func FrontendKeys(se *api.ServiceEndpoints) iter.Seq[FrontendKey] {
	return func(yield func(FrontendKey) bool) {
		for s := range namedFrontends(se) {
			if s.Fault == 0 && !yield(s.FrontendKey) {
				return
			}
		}
	}
}

// SameFrontends reports whether two views of a service have the same frontends, apart from
// the endpoints. It may return false although they have. If one of the views is nil, it
// returns false.
func SameFrontends(a, b *api.ServiceEndpoints) bool {
	if a == nil || b == nil || len(a.Lost) != len(b.Lost) || !a.Service.Equal(b.Service) {
		return false
	}
	for i := range a.Lost {
		if a.Lost[i].Claim != b.Lost[i].Claim {
			return false
		}
	}
	return true
}
