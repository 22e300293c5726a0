// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// group returns slices with n ready endpoints of a family, an endpoint that is not ready,
// and a draining endpoint.
func group(family api.Family, n int) (all []*api.EndpointSlice) {
	slice := &api.EndpointSlice{Family: family, Endpoints: []api.SliceEndpoint{{}, {Conditions: api.Conditions{Ready: true, Drain: true}}}}
	for range n {
		if len(slice.Endpoints) == 100 {
			all = append(all, slice)
			slice = &api.EndpointSlice{Family: family}
		}
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{Weight: 7, Conditions: api.Conditions{Ready: true}})
	}
	return append(all, slice)
}

func sumOf(group []*api.EndpointSlice, family api.Family) (sum int64) {
	for e := range endpoints(group, family) {
		if e.Ready && !e.Drain {
			sum += int64(e.Weight)
		}
	}
	return sum
}

func TestSharesDoNotDependOnNumbersOfEndpoints(t *testing.T) {
	for _, weights := range [][]int64{{1, 9}, {9, 1}, {1, 1}, {50, 950}, {1_000_000, 1_000_000}} {
		for _, counts := range [][]int{{1, 1}, {3, 7}, {1, 1000}, {1000, 1}, {997, 1009}} {
			t.Run(fmt.Sprint(weights, counts), func(t *testing.T) {
				groups := [][]*api.EndpointSlice{
					append(group(api.IPv4, counts[0]), group(api.IPv6, 5)...),
					append(group(api.IPv4, counts[1]), group(api.IPv6, 1)...),
				}
				divide(weights, groups)
				want := float64(weights[0]) / float64(weights[0]+weights[1])
				for _, family := range []api.Family{api.IPv4, api.IPv6} {
					a, b := sumOf(groups[0], family), sumOf(groups[1], family)
					got := float64(a) / float64(a+b)
					if math.Abs(got/want-1) > 0.01 {
						t.Errorf("%s: the first group has %v of the traffic, want %v", family, got, want)
					}
				}
				for i := range groups {
					smallest, largest := int32(math.MaxInt32), int32(0)
					for e := range endpoints(groups[i], api.IPv4) {
						if e.Ready && !e.Drain {
							smallest, largest = min(smallest, e.Weight), max(largest, e.Weight)
						}
					}
					if smallest < 1 || largest > 65535 || largest-smallest > 1 {
						t.Errorf("group %d has weights of %d to %d", i, smallest, largest)
					}
				}
			})
		}
	}
}

func TestEmptyGroups(t *testing.T) {
	groups := [][]*api.EndpointSlice{group(api.IPv4, 2), group(api.IPv4, 0), group(api.IPv4, 2), nil}
	divide([]int64{1, 8, 0, 5}, groups)
	if got := sumOf(groups[0], api.IPv4); got != total {
		t.Errorf("the only group with endpoints has %d shares, want %d", got, total)
	}
	if got := sumOf(groups[2], api.IPv4); got != 0 {
		t.Errorf("the group with weight 0 has %d shares, want none", got)
	}
}

func TestBackendsBecomeSlicesOfTheService(t *testing.T) {
	hints := &api.Hints{ForZones: []string{"a"}}
	backend := &api.EndpointSlice{
		Namespace: "b", Name: "b-1", ServiceName: "b", Family: api.IPv4,
		Ports: []api.EndpointPort{{Name: "web", Protocol: api.TCP, Port: 8080}, {Name: "dns", Protocol: api.UDP, Port: 5353}},
		Endpoints: []api.SliceEndpoint{
			{Addr: netip.MustParseAddr("10.1.0.1"), Details: &api.EndpointDetails{Hints: hints}, Conditions: api.Conditions{Ready: true}},
		},
	}
	key := types.NamespacedName{Namespace: "a", Name: "gateway"}
	got := Divide(key, &api.PortMapping{Name: "x", Protocol: api.UDP, Port: 53}, []Backend{
		{Weight: 1, Slices: []*api.EndpointSlice{backend}, Port: "dns"},
		{Weight: 1, Slices: []*api.EndpointSlice{backend}, Port: "web"}, // has another protocol
	}, nil)
	want := []*api.EndpointSlice{{
		Namespace: "a", Name: "x:0:b-1", ServiceName: "gateway", Family: api.IPv4,
		Ports:     []api.EndpointPort{{Name: "x", Protocol: api.UDP, Port: 5353}},
		Endpoints: []api.SliceEndpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Details: &api.EndpointDetails{}, Weight: total, Conditions: api.Conditions{Ready: true}}},
	}}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("slices (-want +got):\n%s", diff)
	}
	if backend.Endpoints[0].Details.Hints != hints || backend.Endpoints[0].Weight != 0 {
		t.Error("Divide changed the slice of the backend")
	}
}

// A backend without endpoints keeps its share of the connections. The node refuses these
// connections.
func TestConnectionsToMissingBackendsAreRefused(t *testing.T) {
	serving := func(c api.Conditions) []*api.EndpointSlice {
		return []*api.EndpointSlice{{
			Name: "b-1", Family: api.IPv4, Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 80}},
			Endpoints: []api.SliceEndpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Conditions: c}},
		}}
	}
	ready := Backend{Weight: 1, Slices: serving(api.Conditions{Ready: true})}
	v4 := api.NodeAddress{Type: "InternalIP", IP: netip.MustParseAddr("192.0.2.1")}
	v6 := api.NodeAddress{Type: "InternalIP", IP: netip.MustParseAddr("2001:db8::1")}
	outside := api.NodeAddress{Type: "ExternalIP", IP: netip.MustParseAddr("203.0.113.1")}
	for name, test := range map[string]struct {
		other Backend
		node  *api.Node
		want  string
	}{
		"none":           {Backend{Weight: 3}, &api.Node{Addresses: []api.NodeAddress{outside, v4}}, "10.1.0.1:80*1000 192.0.2.1:1*3000"},
		"not ready":      {Backend{Weight: 3, Slices: serving(api.Conditions{})}, &api.Node{Addresses: []api.NodeAddress{v4}}, "10.1.0.1:80*1000 192.0.2.1:1*3000"},
		"only draining":  {Backend{Weight: 3, Slices: serving(api.Conditions{Ready: true, Drain: true})}, &api.Node{Addresses: []api.NodeAddress{v4}}, "10.1.0.1:80*1000 192.0.2.1:1*3000"},
		"terminating":    {Backend{Weight: 3, Slices: serving(api.Conditions{Serving: true, Terminating: true})}, &api.Node{Addresses: []api.NodeAddress{v4}}, "10.1.0.1:80*4000"},
		"weight zero":    {Backend{}, &api.Node{Addresses: []api.NodeAddress{v4}}, "10.1.0.1:80*4000"},
		"other family":   {Backend{Weight: 3}, &api.Node{Addresses: []api.NodeAddress{v6}}, "10.1.0.1:80*4000 [2001:db8::1]:1*1000 [2001:db8::1]:1*3000"},
		"unknown node":   {Backend{Weight: 3}, nil, "10.1.0.1:80*4000"},
		"no internal IP": {Backend{Weight: 3}, &api.Node{Addresses: []api.NodeAddress{outside}}, "10.1.0.1:80*4000"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, slice := range Divide(types.NamespacedName{Name: "gateway"}, &api.PortMapping{Protocol: api.TCP, Port: 80}, []Backend{ready, test.other}, test.node) {
				for _, e := range slice.Endpoints {
					if e.Ready && !e.Drain {
						got = append(got, fmt.Sprintf("%v*%d", netip.AddrPortFrom(e.Addr, uint16(slice.Ports[0].Port)), e.Weight))
					}
				}
			}
			if got := strings.Join(got, " "); got != test.want {
				t.Errorf("endpoints with weights %s, want %s", got, test.want)
			}
		})
	}
}
