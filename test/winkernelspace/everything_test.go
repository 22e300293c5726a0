// SPDX-License-Identifier: Apache-2.0

//go:build linux

package winkernelspace

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// everything tests a service with every feature. First it uses an overlay network of the
// latest Windows, and repeats the test with several sets of quirks of the simulated HNS.
// Then it uses kpng.exe on a bridge network of an early Windows.
func (w *world) everything() {
	w.Helper()
	clusterIPs, nodePort := w.createEverything()
	direct := []string{"--kubeconfig", w.kubeconfig, "--service-proxy-name", w.namespace}
	for _, name := range slices.Sorted(maps.Keys(fakehns.AllQuirks())) {
		w.overlay(name, fakehns.AllQuirks()[name], direct, clusterIPs[0], nodePort)
	}

	w.process.Kill(w.T)
	w.hns.resetTo(server2019)
	w.network(hns.Network{})
	w.exe = w.wine.Build(w.T, "./cmd/kpng")
	w.startProxy(append([]string{"kube", "to-local", "kernelspace", "--keep-annotations", "preserve-destination"}, direct...)...)
	w.await("an early Windows has all features that it supports", dump(
		"endpoint [10.1.1.1 fd00:1::1]",
		"endpoint [10.2.0.1] remote mac 02-11-0a-02-00-01 named kpng-10.2.0.1",
		"load balancer "+clusterIPs[0]+" source 192.168.0.1 protocol 6 port 80->8080 to 10.1.1.1 10.2.0.1",
		"load balancer 198.51.100.1 source 192.168.0.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1 10.2.0.1",
		"load balancer 203.0.113.1 DSR source 192.168.0.1 protocol 6 port 80->8080 UseMux PreserveDIP VIPExternalIP to 10.1.1.1",
		fmt.Sprintf("load balancer node port source 192.168.0.1 protocol 6 port %d->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1", nodePort),
	))
}

// overlay tests the service on an overlay network of the latest Windows.
func (w *world) overlay(name string, quirks fakehns.Quirks, direct []string, clusterIP string, nodePort int32) {
	w.Helper()
	w.process.Kill(w.T)
	w.hns.resetTo(latest)
	w.hns.hns.SetQuirks(quirks)
	w.network(hns.Network{Overlay: true, RemoteSubnets: []hns.RemoteSubnet{
		{Prefix: netip.MustParsePrefix("10.2.0.0/16"), Provider: netip.MustParseAddr("192.168.0.2")},
		{Prefix: netip.MustParsePrefix("fd00:2::/64"), Provider: netip.MustParseAddr("192.168.0.2")},
	}})
	args := append(slices.Clip(direct), "--enable-dsr", "--source-vip", "10.1.1.250,fd00:1::250", "--host-mac", "00-15-5d-00-00-99")
	w.startProxy(args...)
	vipEndpoint := func(ip string) string {
		return "endpoint [" + ip + "] remote mac 00-15-5d-00-00-99 at 192.168.0.1 named kpng-" + ip
	}
	want := []string{
		"endpoint [10.1.1.1 fd00:1::1]",
		"endpoint [10.1.1.250] named kpng-source-vip",
		"endpoint [10.2.0.1] remote mac 02-11-0a-02-00-01 at 192.168.0.2 named kpng-10.2.0.1",
		vipEndpoint(clusterIP),
		"load balancer " + clusterIP + " DSR source 10.1.1.250 protocol 6 port 80->8080 per client to 10.1.1.1 10.2.0.1",
		"load balancer 198.51.100.1 source 10.1.1.250 protocol 6 port 80->8080 VIPExternalIP per client to 10.1.1.1 10.2.0.1",
		"load balancer 203.0.113.1 DSR source 10.1.1.250 protocol 6 port 80->8080 UseMux PreserveDIP VIPExternalIP per client to 10.1.1.1",
		fmt.Sprintf("load balancer node port source 10.1.1.250 protocol 6 port %d->8080 LocalRoutedVIP VIPExternalIP per client to 10.1.1.1", nodePort),
	}
	w.await("an overlay network has all features, HNS "+name, dump(want...))

	// A new process of the proxy must change none of the existing objects in HNS, because
	// these objects are correct. The process checks them before it adds the objects of a new
	// service. So the test creates a service and waits for the objects of this service.
	w.process.Kill(w.T)
	w.hns.functions()
	w.create(0)
	w.startProxy(args...)
	added := w.services[0].clusterIP
	w.await("a restart changes nothing on an overlay network, HNS "+name, dump(append(want,
		"endpoint [10.2.0.2] remote mac 02-11-0a-02-00-02 at 192.168.0.2 named kpng-10.2.0.2",
		vipEndpoint(added),
		"load balancer "+added+" DSR source 10.1.1.250 protocol 6 port 80->8080 to 10.1.1.1 10.2.0.1 10.2.0.2")...))
	calls := w.hns.functions()
	if calls["CreateEndpoint"] != 2 || calls["CreateLoadBalancer"] != 1 || calls["ModifyLoadBalancer"]+calls["DeleteLoadBalancer"]+calls["DeleteEndpoint"] != 0 {
		w.Errorf("HNS %s: calls for one more service after the restart: %v", name, calls)
	}
	w.remove(0)
	w.await("the service is deleted, HNS "+name, dump(want...))
}

// network creates a network in HNS, and a pod with an IPv4 and an IPv6 address.
func (w *world) network(n hns.Network) {
	w.Helper()
	n.Name = "pods"
	id := w.hns.hns.AddNetwork(n)
	if _, err := w.hns.hns.CreateEndpoint(hns.Endpoint{
		Network: id, Addrs: []netip.Addr{netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd00:1::1")}, MAC: "00-15-5D-00-00-01",
	}); err != nil {
		w.Fatal(err)
	}
}

// dump returns the given lines, sorted and joined like the result of the method Dump of
// the simulated HNS.
func dump(lines ...string) string {
	slices.Sort(lines)
	return strings.Join(append(lines, ""), "\n")
}

// createEverything creates a service with all kinds of frontends, with session affinity
// and with preserve-destination.
func (w *world) createEverything() (clusterIPs []string, nodePort int32) {
	w.Helper()
	dualStack := corev1.IPFamilyPolicyRequireDualStack
	services := w.client.CoreV1().Services(w.namespace)
	made, err := services.Create(w.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: "everything", Labels: map[string]string{"service.kubernetes.io/service-proxy-name": w.namespace},
			Annotations: map[string]string{"preserve-destination": "true"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &dualStack,
			IPFamilies:  []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			ExternalIPs: []string{"198.51.100.1"}, SessionAffinity: corev1.ServiceAffinityClientIP,
			Ports: []corev1.ServicePort{{Port: 80}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	made.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
	if _, err := services.UpdateStatus(w.Context(), made, metav1.UpdateOptions{}); err != nil {
		w.Fatal(err)
	}
	port, elsewhere := int32(8080), "elsewhere"
	for family, at := range map[discoveryv1.AddressType][]string{
		discoveryv1.AddressTypeIPv4: {"10.1.1.1", "10.2.0.1"}, discoveryv1.AddressTypeIPv6: {"fd00:1::1", "fd00:2::1"},
	} {
		if _, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).Create(w.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "everything-" + strings.ToLower(string(family)), Labels: map[string]string{
				discoveryv1.LabelServiceName: "everything", "service.kubernetes.io/service-proxy-name": w.namespace,
			}},
			AddressType: family, Ports: []discoveryv1.EndpointPort{{Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: at[:1], NodeName: &w.namespace}, {Addresses: at[1:], NodeName: &elsewhere}},
		}, metav1.CreateOptions{}); err != nil {
			w.Fatal(err)
		}
	}
	return made.Spec.ClusterIPs, made.Spec.Ports[0].NodePort
}
