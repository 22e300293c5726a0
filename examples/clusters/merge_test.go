// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// snapshot returns a cluster with one service. The service has an endpoint with these
// ports. The endpoint and its hints are on node n1, in both clusters.
func snapshot(ip string, ready bool, ports ...string) *cluster.Snapshot {
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		slice := &api.EndpointSlice{
			Namespace: "ns", Name: "web-1", ServiceName: "web", Family: api.IPv4,
			Endpoints: []api.SliceEndpoint{{
				Addr: netip.MustParseAddr(ip), Details: &api.EndpointDetails{NodeName: "n1", Hints: &api.Hints{ForNodes: []string{"n1"}}},
				Conditions: api.Conditions{Ready: ready, Serving: ready},
			}},
		}
		service := &api.Service{
			Namespace: "ns", Name: "web", Type: api.ClusterIP, IPFamilies: []api.Family{api.IPv4},
			IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.1"))},
		}
		for i, name := range []string{"http", "dns"} {
			service.Ports = append(service.Ports, api.PortMapping{Name: name, Protocol: api.TCP, Port: int32(i + 80)})
		}
		for _, name := range ports {
			slice.Ports = append(slice.Ports, api.EndpointPort{Name: name, Protocol: api.TCP, Port: 8080})
		}
		tx.SetService(service)
		tx.SetSlice(slice)
	})
	return state.Snapshot()
}

func TestEachPortPrefersThisCluster(t *testing.T) {
	empty := cluster.New(cluster.Options{}).Snapshot()
	stale := cluster.New(cluster.Options{})
	stale.Update(func(tx *cluster.Tx) {
		other, _ := snapshot("10.2.0.1", true, "http", "dns").States.Get(types.NamespacedName{Namespace: "ns", Name: "web"})
		tx.SetService(other.Service)
		tx.SetSlice(other.Slices[0])
		tx.SetStale(true)
	})
	for name, test := range map[string]struct {
		forget bool
		in     []*cluster.Snapshot
		want   []string
	}{
		"all ports":                        {in: []*cluster.Snapshot{snapshot("10.1.0.1", true, "http", "dns"), snapshot("10.2.0.1", true, "http", "dns")}, want: []string{"http 10.1.0.1 local", "dns 10.1.0.1 local"}},
		"one port":                         {in: []*cluster.Snapshot{snapshot("10.1.0.1", true, "http"), snapshot("10.2.0.1", true, "http", "dns")}, want: []string{"http 10.1.0.1 local", "dns 10.2.0.1"}},
		"no ready endpoint here":           {in: []*cluster.Snapshot{snapshot("10.1.0.1", false, "http", "dns"), snapshot("10.2.0.1", true, "http", "dns")}, want: []string{"http 10.2.0.1", "dns 10.2.0.1"}},
		"two other clusters":               {in: []*cluster.Snapshot{snapshot("10.1.0.1", false), snapshot("10.2.0.1", true, "http"), snapshot("10.3.0.1", true, "http")}, want: []string{"http 10.2.0.1 10.3.0.1", "dns"}},
		"a cluster that is not read yet":   {in: []*cluster.Snapshot{snapshot("10.1.0.1", true, "http"), nil}, want: []string{"http 10.1.0.1 local", "dns"}},
		"a cluster without the service":    {in: []*cluster.Snapshot{snapshot("10.1.0.1", true, "http"), empty}, want: []string{"http 10.1.0.1 local", "dns"}},
		"the service is only elsewhere":    {in: []*cluster.Snapshot{empty, snapshot("10.2.0.1", true, "http")}, want: nil},
		"a stale cluster":                  {in: []*cluster.Snapshot{snapshot("10.1.0.1", true, "http"), stale.Snapshot()}, want: []string{"http 10.1.0.1 local", "dns 10.2.0.1"}},
		"a stale cluster that is omitted":  {forget: true, in: []*cluster.Snapshot{snapshot("10.1.0.1", true, "http"), stale.Snapshot()}, want: []string{"http 10.1.0.1 local", "dns"}},
		"this cluster is stale, and stays": {forget: true, in: []*cluster.Snapshot{stale.Snapshot(), empty}, want: []string{"http 10.2.0.1 local", "dns 10.2.0.1 local"}},
	} {
		t.Run(name, func(t *testing.T) {
			service, list := merger{test.forget}.merge(types.NamespacedName{Namespace: "ns", Name: "web"}, test.in)
			slices.SortFunc(list, func(a, b *api.EndpointSlice) int { return slices.Compare([]byte(a.Name), []byte(b.Name)) })
			var got []string
			if view := nodeview.View(&api.ServiceState{Service: service, Slices: list}, &api.Node{Name: "n1"}); view != nil {
				for f := range nodeview.Frontends(view) {
					line := f.ServicePort.Name
					for _, e := range f.Elsewhere.Endpoints {
						line += fmt.Sprint(" ", e.Addr, map[bool]string{true: " local"}[e.Local])
					}
					got = append(got, line)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
