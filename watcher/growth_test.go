// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// large returns a service and an EndpointSlice with this number of ports and external IPs.
func large(n int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for i := range n {
		name, port := fmt.Sprint("p", i), int32(1+i)
		service.Spec.Ports = append(service.Spec.Ports, corev1.ServicePort{Name: name, Port: port})
		service.Spec.ExternalIPs = append(service.Spec.ExternalIPs, fmt.Sprintf("10.0.%d.%d", i>>8, i&255))
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port})
	}
	return service, slice
}

// TestConversionTimeGrowsWithObjects measures several times, and fails if 16 times as
// many ports and external IPs take more than 120 times as long in each measurement.
// Quadratic time would be 256 times as long. Other programs may disturb some of the
// measurements.
func TestConversionTimeGrowsWithObjects(t *testing.T) {
	c := newConverter(t, Options{})
	measure := func(n int) func() time.Duration {
		service, slice := large(n)
		return func() time.Duration {
			begin := time.Now()
			s, problems := c.Service(service)
			e, more := c.EndpointSlice(slice)
			if len(s.Ports) != n || len(e.Ports) != n || s.IPs.ExternalIPs.Len() != n || len(problems)+len(more) > 0 {
				t.Fatalf("converted %d and %d ports and %d external IPs of %d", len(s.Ports), len(e.Ports), s.IPs.ExternalIPs.Len(), n)
			}
			return time.Since(begin)
		}
	}
	few, many := measure(1000), measure(16_000)
	a, b := time.Hour, time.Hour
	for range 10 {
		a = min(a, few())
	}
	for range 10 {
		if b = min(b, many()); b < 120*a {
			return
		}
	}
	t.Errorf("1,000 ports take %v, 16,000 ports %v", a, b)
}

func BenchmarkLargeObjects(b *testing.B) {
	for _, n := range []int{5000, 10000, 20000} {
		b.Run(fmt.Sprint(n, " ports"), func(b *testing.B) {
			c := newConverter(b, Options{})
			service, slice := large(n)
			for b.Loop() {
				c.Service(service)
				c.EndpointSlice(slice)
			}
		})
	}
}
