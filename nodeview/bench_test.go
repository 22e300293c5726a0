// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
)

// benchState returns a service with one named port and n ready endpoints on n nodes. The
// EndpointSlices are unsorted and have at most 100 endpoints each.
func benchState(n int) *api.ServiceState {
	s := &api.ServiceState{Service: &api.Service{
		Namespace: "default", Name: "web", Type: api.ClusterIP,
		IPs:        api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.1"))},
		IPFamilies: []api.Family{api.IPv4},
		Ports:      []api.PortMapping{{Name: "http", Protocol: api.TCP, Port: 80, TargetPort: 8080}},
	}}
	var slice *api.EndpointSlice
	for i, v := range rand.New(rand.NewPCG(1, 2)).Perm(n) {
		if i%100 == 0 {
			slice = &api.EndpointSlice{
				Namespace: "default", Name: fmt.Sprintf("web-%03d", i/100), ServiceName: "web", Family: api.IPv4,
				Ports: []api.EndpointPort{{Name: "http", Protocol: api.TCP, Port: 8080}},
			}
			s.Slices = append(s.Slices, slice)
		}
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{
			Addr:       netip.AddrFrom4([4]byte{10, 1, byte(v >> 8), byte(v)}),
			Details:    &api.EndpointDetails{NodeName: fmt.Sprint("node-", v), Zone: "z1"},
			Conditions: api.Conditions{Ready: true, Serving: true},
		})
	}
	return s
}

func BenchmarkView(b *testing.B) {
	node := &api.Node{Name: "node-7", Labels: map[string]string{"topology.kubernetes.io/zone": "z1"}}
	for _, n := range []int{1, 10, 100, 1000, 10000} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			s := benchState(n)
			b.ReportAllocs()
			for b.Loop() {
				View(s, node)
			}
		})
	}
}

func BenchmarkFrontends(b *testing.B) {
	for _, n := range []int{1, 10, 100, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			view := View(benchState(n), nil)
			b.ReportAllocs()
			for b.Loop() {
				for f := range Frontends(view) {
					_ = f
				}
			}
		})
	}
}
