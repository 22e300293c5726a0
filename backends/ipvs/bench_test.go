// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

// BenchmarkEndpointChange measures the first pass over services with ten endpoints each,
// and then the change of one endpoint. The time of the change must not depend on the
// number of services. The benchmark needs a kernel with IPVS, see TestConformance.
func BenchmarkEndpointChange(b *testing.B) {
	for _, services := range []int{100, 1000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			n := newNode(b)
			var views []*api.View
			for i := range services {
				views = append(views, numbered(i, 10))
			}
			n.mustPass(views...)
			fewer, all := numbered(0, 9), views[0]
			for b.Loop() {
				for _, v := range []*api.View{fewer, all} {
					if err := n.deliver(&sink.Changes{}, v); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(2*b.N), "µs/change")
		})
	}
}

// numbered returns the view of the service web-<number>. The argument endpoints is the
// number of its endpoints.
func numbered(number, endpoints int) *api.View {
	var addrs []string
	for i := range endpoints {
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, 1 + byte(i), byte(number >> 8), byte(number)}).String())
	}
	return view(addrs, func(s *api.Service) {
		s.Name = fmt.Sprintf("web-%d", number)
		s.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, 96, byte(number >> 8), byte(number)}))
	})
}
