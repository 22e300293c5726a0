// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func exampleService() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: labels("app", "web"),
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			ClusterIP:  "10.96.0.1",
			ClusterIPs: []string{"10.96.0.1"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Selector:   map[string]string{"app": "web"},
			Ports:      []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}
}

// exampleSlice returns an EndpointSlice as the EndpointSlice controller would write it.
// The n endpoints have different nodes, and have zones, conditions and hints.
func exampleSlice(n int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  labels(discoveryv1.LabelServiceName, "web", "app", "web"),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr("http"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr(int32(8080))}},
	}
	for i := range n {
		zone := fmt.Sprintf("zone-%d", i%3)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr(true), Serving: ptr(true), Terminating: ptr(false)},
			NodeName:   ptr(fmt.Sprintf("node-%d.example.com", i)),
			Zone:       ptr(zone),
			Hints:      &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}},
		})
	}
	return s
}

func BenchmarkService(b *testing.B) {
	c, in := newConverter(b, Options{}), exampleService()
	b.ReportAllocs()
	for b.Loop() {
		c.Service(in)
	}
}

func BenchmarkEndpointSlice(b *testing.B) {
	for _, n := range []int{1, 10, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			c, in := newConverter(b, Options{}), exampleSlice(n)
			b.ReportAllocs()
			for b.Loop() {
				c.EndpointSlice(in)
			}
		})
	}
}

// BenchmarkRetained reports the memory of converted objects after the API objects are
// freed.
func BenchmarkRetained(b *testing.B) {
	const slices, endpoints = 1000, 100
	for b.Loop() {
		c := newConverter(b, Options{})
		var before, after runtime.MemStats
		kept := make([]*api.EndpointSlice, 0, slices)
		runtime.GC()
		runtime.ReadMemStats(&before)
		for range slices {
			s, _ := c.EndpointSlice(exampleSlice(endpoints))
			kept = append(kept, s)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(kept)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/(slices*endpoints), "retained-B/endpoint")
	}
}
