// SPDX-License-Identifier: Apache-2.0

package allip

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Each service has these external IPs, one of each family.
var externalIPs = []netip.Addr{netip.MustParseAddr("10.0.0.55"), netip.MustParseAddr("1000::55")}

// cluster is a namespace of an API server. The proxy and the node have the same name as
// the namespace.
type cluster struct {
	t      testing.TB
	client kubernetes.Interface
	name   string
}

func newCluster(t testing.TB, server *apiserver.Server) *cluster {
	t.Helper()
	c := &cluster{t, server.Client(), server.Namespace(t)}
	// A proxy is not ready before its Node exists.
	_, err := c.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.name}}, metav1.CreateOptions{})
	c.check(err)
	return c
}

// create creates a service for a proxy. The service has the external IPs and no
// endpoints.
func (c *cluster) create(name, proxy string) {
	c.t.Helper()
	dualStack := corev1.IPFamilyPolicyRequireDualStack
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{watcher.LabelServiceProxyName: proxy}},
		Spec: corev1.ServiceSpec{
			ClusterIP:      corev1.ClusterIPNone,
			IPFamilyPolicy: &dualStack,
			IPFamilies:     []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			// An all-ports service does not use its port, but the API requires one.
			Ports: []corev1.ServicePort{{Port: 6000}},
		},
	}
	for _, ip := range externalIPs {
		service.Spec.ExternalIPs = append(service.Spec.ExternalIPs, ip.String())
	}
	_, err := c.client.CoreV1().Services(c.name).Create(c.t.Context(), service, metav1.CreateOptions{})
	c.check(err)
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		_, err := c.client.DiscoveryV1().EndpointSlices(c.name).Create(c.t.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: sliceName(name, family), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: family,
		}, metav1.CreateOptions{})
		c.check(err)
	}
}

// lead replaces the endpoints of a service by the given pods. A pod with the suffix
// "@elsewhere" is on another node. A pod with "!" after its name is not ready.
func (c *cluster) lead(service string, pods ...string) {
	c.t.Helper()
	for i, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		slices := c.client.DiscoveryV1().EndpointSlices(c.name)
		slice, err := slices.Get(c.t.Context(), sliceName(service, family), metav1.GetOptions{})
		c.check(err)
		slice.Endpoints = nil
		for _, pod := range pods {
			node, ready := c.name, true
			if name, elsewhere := strings.CutSuffix(pod, "@elsewhere"); elsewhere {
				pod, node = name, "elsewhere"
			}
			if name, unready := strings.CutSuffix(pod, "!"); unready {
				pod, ready = name, false
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{podIPs[pod][i]},
				NodeName:   &node,
				Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &ready},
			})
		}
		_, err = slices.Update(c.t.Context(), slice, metav1.UpdateOptions{})
		c.check(err)
	}
}

// label assigns a service to a proxy.
func (c *cluster) label(service, proxy string) {
	c.t.Helper()
	services := c.client.CoreV1().Services(c.name)
	s, err := services.Get(c.t.Context(), service, metav1.GetOptions{})
	c.check(err)
	s.Labels[watcher.LabelServiceProxyName] = proxy
	_, err = services.Update(c.t.Context(), s, metav1.UpdateOptions{})
	c.check(err)
}

// remove deletes a service, but not its EndpointSlices.
func (c *cluster) remove(service string) {
	c.t.Helper()
	c.check(c.client.CoreV1().Services(c.name).Delete(c.t.Context(), service, metav1.DeleteOptions{}))
}

func (c *cluster) check(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func sliceName(service string, family discoveryv1.AddressType) string {
	return map[discoveryv1.AddressType]string{discoveryv1.AddressTypeIPv4: service + "-4", discoveryv1.AddressTypeIPv6: service + "-6"}[family]
}
