// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
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

// frontendsOf computes the view and its frontends, and returns how many there are.
func frontendsOf(s *api.ServiceState) (n int) {
	for range Frontends(View(s, nil)) {
		n++
	}
	return n
}

// TestCostGrowsWithPorts fails if eight times as many ports always take more than 40 times
// as long. Quadratic time would be 64 times as long. Other programs may disturb some of the
// measurements.
func TestCostGrowsWithPorts(t *testing.T) {
	few, many := manyPorts(500, 8), manyPorts(4000, 8)
	measure := func(s *api.ServiceState) time.Duration {
		begin := time.Now()
		if n, ports := frontendsOf(s), len(s.Service.Ports); n != ports+ports/2 {
			t.Fatalf("%d ports have %d frontends", ports, n)
		}
		return time.Since(begin)
	}
	a, b := time.Hour, time.Hour
	for range 10 {
		a = min(a, measure(few))
	}
	for range 10 {
		if b = min(b, measure(many)); b < 40*a {
			return
		}
	}
	t.Errorf("500 ports take %v, 4,000 ports %v", a, b)
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
