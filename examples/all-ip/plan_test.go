// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
)

// view returns a view of a service with two external IPs and the given endpoints.
func view(endpoints ...api.Endpoint) *api.View {
	return &api.View{
		Service: &api.Service{
			Name: "example", Type: api.ClusterIP, AllPorts: true,
			IPs: api.ServiceIPs{Headless: true, ExternalIPs: api.NewIPSet(netip.MustParseAddr("10.0.0.55"), netip.MustParseAddr("1000::55"))},
		},
		Endpoints: endpoints,
	}
}

func endpoint(ip string, local bool) api.Endpoint {
	return api.Endpoint{Addr: netip.MustParseAddr(ip), Local: local, Scopes: api.Scopes{Internal: true, External: true}}
}

// describe returns the elements of a view as lines, without slots and flows.
func describe(v *api.View) []string {
	var lines []string
	(&dataplane{}).Plan(v, func(o object, value string) {
		key, _, _ := strings.Cut(o.key, " ")
		if o.set != flowSet {
			lines = append(lines, strings.TrimSpace(o.set+" "+key+" "+value))
		}
	})
	slices.Sort(lines)
	return slices.Compact(lines)
}

func TestElements(t *testing.T) {
	unusable := view()
	unusable.Unusable = []api.PortFamily{{Family: api.IPv4}}
	lost := view(endpoint("11.0.2.2", true))
	lost.Lost = []api.LostClaim{{Claim: api.Claim{IP: netip.MustParseAddr("10.0.0.55")}}}
	onlyIPv6 := view(endpoint("1100::202", true))
	onlyIPv6.Service.IPFamilies = []api.Family{api.IPv6}
	others := view(endpoint("11.0.2.2", true))
	others.Service.AllPorts = false
	others.Service.Ports = []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 80}}
	balanced := view()
	balanced.Service.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("1000::55"))
	offList := endpoint("11.0.2.2", true)
	offList.Scopes = api.Scopes{Cluster: true}

	for _, test := range []struct {
		name string
		view *api.View
		want []string
	}{
		{"a local pod of one family", view(endpoint("11.0.2.2", true)),
			[]string{"dropped 1000::55", "hairpin 11.0.2.2", "pod 10.0.0.55 11.0.2.2"}},
		{"local pods of both families, and others", view(endpoint("11.0.2.2", true), endpoint("11.0.3.2", false), endpoint("1100::202", true)),
			[]string{"hairpin 11.0.2.2", "hairpin 1100::202", "pod 10.0.0.55 11.0.2.2", "pod 1000::55 1100::202"}},
		{"two local pods share the slots", view(endpoint("11.0.2.2", true), endpoint("11.0.2.3", true)),
			[]string{"dropped 1000::55", "hairpin 11.0.2.2", "hairpin 11.0.2.3", "pods 10.0.0.55 11.0.2.2", "pods 10.0.0.55 11.0.2.3"}},
		{"only pods on other nodes", view(endpoint("11.0.3.2", false)), []string{"dropped 10.0.0.55", "dropped 1000::55"}},
		{"a local pod that is not for external traffic", view(offList), []string{"dropped 10.0.0.55", "dropped 1000::55"}},
		{"no usable endpoint in one family", unusable, []string{"dropped 1000::55", "rejected 10.0.0.55"}},
		{"an address that belongs to an older service", lost, []string{"dropped 1000::55"}},
		{"an address of a family that is not served", onlyIPv6, []string{"hairpin 1100::202", "pod 1000::55 1100::202"}},
		{"a service with ports", others, nil},
		{"load-balancer addresses, one of which is also an external IP", balanced, []string{"dropped 10.0.0.55"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, describe(test.view)); diff != "" {
				t.Errorf("elements (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSlotsMoveOnlyForChangedPods(t *testing.T) {
	var pods []netip.Addr
	for i := range 8 {
		pods = append(pods, netip.AddrFrom4([4]byte{11, 0, 2, byte(i + 2)}))
	}
	for n := 1; n < len(pods); n++ {
		moved, shares := 0, map[netip.Addr]int{}
		for slot := range uint32(slots) {
			before, after := owner(slot, pods[:n]), owner(slot, pods[:n+1])
			if before != after && after != pods[n] {
				t.Errorf("slot %d moved from %s to %s when %s was added", slot, before, after, pods[n])
			}
			if before != after {
				moved++
			}
			shares[after]++
		}
		if len(shares) != n+1 || moved == 0 {
			t.Errorf("%[2]d of %[1]d pods have slots, %[3]d moved", n+1, len(shares), moved)
		}
	}
}
