// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"k8s.io/apimachinery/pkg/types"
)

// manyPorts returns a service with the given numbers of ports and endpoints. Half of the
// endpoints are in an EndpointSlice that has only every other port. Each port has another
// target port, and another service owns half of the ports.
func manyPorts(ports, endpoints int) *api.ServiceState {
	addr := netip.MustParseAddr("10.96.0.1")
	svc := &api.Service{Namespace: "default", Name: "web", Type: api.NodePort, IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(addr)}}
	s := &api.ServiceState{Service: svc, Slices: []*api.EndpointSlice{
		{Namespace: "default", Name: "web-1", ServiceName: "web", Family: api.IPv4},
		{Namespace: "default", Name: "web-2", ServiceName: "web", Family: api.IPv4},
	}}
	for i := range ports {
		name, port := fmt.Sprint("p", i), int32(1+i)
		svc.Ports = append(svc.Ports, api.PortMapping{Name: name, Protocol: api.TCP, Port: port, NodePort: port, TargetPortName: name})
		for n, slice := range s.Slices {
			if n == 0 || i%2 == 0 {
				slice.Ports = append(slice.Ports, api.EndpointPort{Name: name, Protocol: api.TCP, Port: port})
			}
		}
		if i%2 == 0 {
			s.Lost = append(s.Lost, api.LostClaim{Claim: api.Claim{IP: addr, Protocol: api.TCP, Port: port}, Winner: types.NamespacedName{Name: "older"}})
		}
	}
	for i := range endpoints {
		slice := s.Slices[i%2]
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), Conditions: api.Conditions{Ready: true, Serving: true}})
	}
	return s
}

// frontendsOf computes the view and all decisions of package nodeview about it. It returns
// the number of these decisions.
func frontendsOf(s *api.ServiceState) (n int) {
	view := View(s, nil)
	for range Frontends(view) {
		n++
	}
	for c := range Classes(view) {
		for range c.Existing.All() {
			n++
		}
	}
	for range Hairpins(view) {
		n++
	}
	return n
}

// manyAddresses returns a service. The argument addrs is the number of its load-balancer
// IPs, and the argument ranges is the number of its source ranges.
func manyAddresses(addrs, ranges int) *api.ServiceState {
	svc := &api.Service{Namespace: "default", Name: "web", Type: api.LoadBalancer, IPFamilies: []api.Family{api.IPv4}, Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80}}}
	svc.IPs.LoadBalancerIPs = apitest.IPs("203.0.0.0", addrs)
	admitted := api.SourceRanges{TargetIPs: svc.IPs.LoadBalancerIPs}
	for i := range ranges {
		admitted.Prefixes = append(admitted.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	svc.SourceRanges = []api.SourceRanges{admitted}
	return &api.ServiceState{Service: svc}
}

// TestCostGrowsWithSize measures several times, and fails if eight times as many objects
// take more than 40 times as long in every measurement. With quadratic time, they would
// take 64 times as long. Other programs may disturb some of the measurements.
func TestCostGrowsWithSize(t *testing.T) {
	for _, test := range []struct {
		name  string
		state func(n int) *api.ServiceState
		n     int
	}{
		{"ports", func(n int) *api.ServiceState { return manyPorts(n, 8) }, 500},
		{"ports without endpoints", func(n int) *api.ServiceState { return manyPorts(n, 0) }, 500},
		{"load-balancer IPs and source ranges", func(n int) *api.ServiceState { return manyAddresses(n, n) }, 500},
	} {
		t.Run(test.name, func(t *testing.T) {
			few, many := test.state(test.n), test.state(8*test.n)
			measure := func(s *api.ServiceState) time.Duration {
				begin := time.Now()
				frontendsOf(s)
				return time.Since(begin)
			}
			a, b := time.Hour, time.Hour
			for range 10 {
				a = min(a, measure(few))
			}
			for range 100 {
				if b = min(b, measure(many)); b < 40*a {
					return
				}
			}
			t.Errorf("%d take %v, %d take %v", test.n, a, 8*test.n, b)
		})
	}
}

// TestClassesDoNotReadAddresses checks that Classes takes no memory for addresses with source
// ranges.
func TestClassesDoNotReadAddresses(t *testing.T) {
	allocs := func(addrs int) float64 {
		view := View(manyAddresses(addrs, 1), nil)
		return testing.AllocsPerRun(10, func() {
			for range Classes(view) {
			}
		})
	}
	if few, many := allocs(1), allocs(1000); many != few {
		t.Errorf("%v allocations for one address, %v for 1,000", few, many)
	}
}

func BenchmarkManyPorts(b *testing.B) {
	for _, ports := range []int{250, 500, 1000, 2000, 4000} {
		b.Run(fmt.Sprint(ports, " ports, 50 endpoints"), func(b *testing.B) {
			s := manyPorts(ports, 50)
			for b.Loop() {
				frontendsOf(s)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*ports*50), "ns/port/endpoint")
		})
	}
}
