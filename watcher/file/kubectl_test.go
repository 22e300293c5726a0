// SPDX-License-Identifier: Apache-2.0

package file

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/apimachinery/pkg/types"
)

// testdata/kubectl.* are the output of kubectl get services,endpointslices,nodes, as YAML
// and as JSON. The Node object has a field that no release of Kubernetes has.
func TestKubectlOutputIsRead(t *testing.T) {
	opt := cmpopts.EquateComparable(netip.Addr{})
	optPrefix := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	addr := netip.MustParseAddr
	ports := []api.EndpointPort{
		{Name: "http", Protocol: api.TCP, Port: 8080, AppProtocol: "kubernetes.io/h2c"},
		{Name: "dns", Protocol: api.UDP, Port: 5353},
	}
	trigger := time.Date(2026, 3, 1, 9, 31, 0, 0, time.UTC)
	ready := api.Conditions{Ready: true, Serving: true}
	zoneA, zoneB := &api.Hints{ForZones: []string{"zone-a"}}, &api.Hints{ForZones: []string{"zone-b"}}
	want := &manifests{
		files: 1,
		services: []*api.Service{{
			Namespace: "prod", Name: "shop", Type: api.LoadBalancer,
			UID: "0b0e7f5c-9a57-4d8f-8d0d-3a4f8f1c5a11", Created: time.Date(2026, 3, 1, 9, 30, 12, 0, time.UTC),
			IPs: api.ServiceIPs{
				ClusterIPs:      api.NewIPSet(addr("10.96.113.7"), addr("fd00:10:96::71a7")),
				LoadBalancerIPs: api.NewIPSet(addr("198.51.100.7")),
			},
			IPFamilies: []api.Family{api.IPv4, api.IPv6},
			Ports: []api.PortMapping{
				{Name: "http", Protocol: api.TCP, Port: 80, NodePort: 30080, TargetPortName: "web", AppProtocol: "kubernetes.io/h2c"},
				{Name: "dns", Protocol: api.UDP, Port: 53, NodePort: 30053, TargetPort: 5353},
			},
			ExternalTrafficToLocal: true,
			LoadBalancerClass:      "example.com/lb",
			HealthCheckNodePort:    31822,
			SourceRanges: []api.SourceRanges{{
				TargetIPs: api.NewIPSet(addr("198.51.100.7")),
				Prefixes:  []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")},
			}},
			AffinitySeconds: 10800,
		}},
		slices: []*api.EndpointSlice{{
			Namespace: "prod", Name: "shop-x4k01", ServiceName: "shop", Family: api.IPv4, Ports: ports, TriggerTime: trigger,
			Endpoints: []api.SliceEndpoint{
				{Addr: addr("10.244.1.5"), Details: &api.EndpointDetails{NodeName: "worker-1", Zone: "zone-a", Hints: zoneA}, Conditions: ready},
				{Addr: addr("10.244.2.9"), Details: &api.EndpointDetails{NodeName: "worker-2", Zone: "zone-b", Hints: zoneB}, Conditions: api.Conditions{Serving: true, Terminating: true}},
			},
		}, {
			Namespace: "prod", Name: "shop-x4k02", ServiceName: "shop", Family: api.IPv6, Ports: ports, TriggerTime: trigger,
			Endpoints: []api.SliceEndpoint{
				{Addr: addr("fd00:10:244:1::5"), Details: &api.EndpointDetails{NodeName: "worker-1", Zone: "zone-a", Hints: zoneA}, Conditions: ready},
			},
		}},
		nodes: []*api.Node{{
			Name: "worker-1", UID: "aa0e7f5c-9a57-4d8f-8d0d-3a4f8f1c5abb",
			Labels: map[string]string{"kubernetes.io/arch": "amd64", "kubernetes.io/hostname": "worker-1", "topology.kubernetes.io/zone": "zone-a"},
			Addresses: []api.NodeAddress{
				{Type: "InternalIP", IP: addr("192.0.2.11")},
				{Type: "InternalIP", IP: addr("2001:db8::11")},
			},
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")},
			Taints:   []api.Taint{{Key: "example.com/spot", Value: "true", Effect: "PreferNoSchedule"}},
		}},
	}
	for _, path := range []string{"testdata/kubectl.yaml", "testdata/kubectl.json"} {
		t.Run(path, func(t *testing.T) {
			got, err := load(t.Context(), path, watcher.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if len(got.warnings) != 1 || !strings.HasSuffix(got.warnings[0], `document 1 (line 1): items[3]: Node worker-1: unknown field "status.declaredThingOfTheFuture" ignored`) {
				t.Errorf("warnings: %v", got.warnings)
			}
			got.warnings = nil
			if diff := cmp.Diff(want, got, opt, optPrefix, cmp.AllowUnexported(manifests{})); diff != "" {
				t.Errorf("manifests (-want +got):\n%s", diff)
			}

			kept, err := load(t.Context(), path, watcher.Options{KeepTargets: true, KeepSliceLabels: []string{"a*"}})
			if err != nil {
				t.Fatal(err)
			}
			for i, pods := range [][]string{{"shop-1024415", "shop-1024429"}, {"shop-fd001024415"}} {
				slice := kept.slices[i]
				if diff := cmp.Diff(map[string]string{"app": "shop"}, slice.Labels); diff != "" {
					t.Errorf("labels of slice %s (-want +got):\n%s", slice.Name, diff)
				}
				for n, pod := range pods {
					if diff := cmp.Diff(&types.NamespacedName{Namespace: "prod", Name: pod}, slice.Endpoints[n].Details.Target); diff != "" {
						t.Errorf("endpoint %d of slice %s (-want +got):\n%s", n, slice.Name, diff)
					}
				}
			}
		})
	}
}

// If a service has no selector, its slices need no proxy label, except slices of the
// EndpointSlice controller.
func TestUnlabelledSlicesFollowTheirService(t *testing.T) {
	const text = `apiVersion: v1
kind: List
items:
- {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, metadata: {name: hand, labels: {kubernetes.io/service-name: made}}}
- {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, metadata: {name: auto, labels: {kubernetes.io/service-name: selected}}}
- {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, metadata: {name: other, labels: {kubernetes.io/service-name: other}}}
- {apiVersion: v1, kind: Service, metadata: {name: made, labels: {service.kubernetes.io/service-proxy-name: me}}, spec: {clusterIP: None}}
- {apiVersion: v1, kind: Service, metadata: {name: selected, labels: {service.kubernetes.io/service-proxy-name: me}}, spec: {clusterIP: None, selector: {app: a}}}
- {apiVersion: v1, kind: Service, metadata: {name: other}, spec: {clusterIP: None}}
`
	dir := write(t, map[string]string{"m.yaml": text})
	m, err := load(t.Context(), dir, watcher.Options{ServiceProxyName: "me"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"service default/made", "service default/selected", "slice default/hand"}, names(m)); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	want := []string{"m.yaml: document 1 (line 1): items[1]: EndpointSlice default/auto: ignored, because it lacks the label service.kubernetes.io/service-proxy-name: me of its service"}
	if diff := cmp.Diff(want, warnings(m, dir)); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}
