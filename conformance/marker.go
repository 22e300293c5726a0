// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// The marker is a service that gets a new port and a new endpoint in each publication.
// Proxies watch Services and EndpointSlices separately. So when a connection to the new
// port reaches the new endpoint, both changes have arrived. Some proxies program services
// in the order of their names, so the marker's name sorts last.
const (
	markerNamespace = "kpng-conformance"
	markerName      = "zz-marker"
	markerNumber    = 250
	markerNodePort  = 30000 // used while the proxy serves node ports on localhost
)

func (k *kit) markerPort() int32      { return int32(1000 + k.marker%10000) }
func (k *kit) markerPod() *world.Host { return k.world.Local[k.marker%2] }

// addMarker appends the marker to objects, with a new port and a new endpoint.
func (k *kit) addMarker(objects *Objects) {
	k.marker++
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: markerNamespace, Name: markerName}}
	service.Spec.Type = corev1.ServiceTypeClusterIP
	service.Spec.SessionAffinity = corev1.ServiceAffinityNone
	service.Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: k.markerPort(), TargetPort: intstr.FromInt32(int32(world.PodPorts[0]))}}
	if k.localhost {
		service.Spec.Type, service.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, markerNodePort
		service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	policy, stack := corev1.ServiceInternalTrafficPolicyCluster, corev1.IPFamilyPolicySingleStack
	service.Spec.InternalTrafficPolicy = &policy
	for _, family := range k.families() {
		service.Spec.IPFamilies = append(service.Spec.IPFamilies, corev1.IPFamily(family.String()))
		service.Spec.ClusterIPs = append(service.Spec.ClusterIPs, number(world.ServiceCIDRs[family], markerNumber).String())
		objects.Slices = append(objects.Slices, k.markerSlice(family))
	}
	if len(service.Spec.IPFamilies) == 2 {
		stack = corev1.IPFamilyPolicyRequireDualStack
	}
	service.Spec.IPFamilyPolicy = &stack
	service.Spec.ClusterIP = service.Spec.ClusterIPs[0]
	objects.Services = append(objects.Services, service)
}

func (k *kit) markerSlice(family api.Family) *discoveryv1.EndpointSlice {
	name, protocol, port := "", corev1.ProtocolTCP, int32(world.PodPorts[0])
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: markerNamespace, Name: markerName + "-" + suffix(family),
			Labels: map[string]string{discoveryv1.LabelServiceName: markerName},
		},
		AddressType: discoveryv1.AddressType(family.String()),
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{k.markerPod().Addr(family).String()}, NodeName: &nodeNames[0]}},
	}
}

// awaitMarker waits until the last published marker answers.
func (k *kit) awaitMarker(ctx context.Context) error {
	var addrs []netip.AddrPort
	for _, family := range k.families() {
		addrs = append(addrs, netip.AddrPortFrom(number(world.ServiceCIDRs[family], markerNumber), uint16(k.markerPort())))
		if k.localhost { // another part of the proxy may serve node ports on localhost
			addrs = append(addrs, netip.AddrPortFrom(loopback(family), markerNodePort))
		}
	}
	var ended <-chan struct{}
	process, ok := k.process.(*commandProcess)
	if ok {
		ended = process.done
	}
	for _, to := range addrs {
		for {
			try, cancel := context.WithTimeout(ctx, time.Second)
			answer, err := k.world.Node.Ask(try, api.TCP, netip.Addr{}, to)
			cancel()
			if err == nil && answer.Name == k.markerPod().Name {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("the proxy has not programmed the published objects: marker %s: answer %v, error %v", to, answer, err)
			case <-ended:
				return errEnded(process.err)
			case <-time.After(2 * time.Millisecond):
			}
		}
	}
	return nil
}

// number returns the address that is n addresses after the first address of cidr.
func number(cidr netip.Prefix, n int) netip.Addr {
	bytes := cidr.Addr().AsSlice()
	for i := len(bytes) - 1; n > 0; i-- {
		n += int(bytes[i])
		bytes[i] = byte(n)
		n >>= 8
	}
	addr, _ := netip.AddrFromSlice(bytes)
	return addr
}

func suffix(family api.Family) string {
	return map[api.Family]string{api.IPv4: "v4", api.IPv6: "v6"}[family]
}
