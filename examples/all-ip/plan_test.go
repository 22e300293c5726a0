// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"regexp"
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

// describe returns the elements of a view, except those of flows. It returns all slots of a pod
// as one element.
func describe(t *testing.T, v *api.View) []string {
	t.Helper()
	var all []string
	if err := (&dataplane{}).Plan(v, func(o object, value string) {
		if o.part != flowPart {
			all = append(all, strings.Split(slot.ReplaceAllString(value, " : "), "\n")...)
		}
	}); err != nil {
		t.Fatal(err)
	}
	for i := range all {
		all[i] = strings.NewReplacer(" {", "", " }", "", " : ", " ").Replace(all[i])
	}
	slices.Sort(all)
	return slices.Compact(all)
}

var slot = regexp.MustCompile(` \. \d+ : `)

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
	balanced.Service.SourceRanges = []api.SourceRanges{{
		TargetIPs: api.NewIPSet(netip.MustParseAddr("192.0.2.1")),
		Prefixes:  []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.2.3.4/32"), netip.MustParsePrefix("192.0.2.9/32")},
	}}
	offList := endpoint("11.0.2.2", true)
	offList.Scopes = api.Scopes{Cluster: true}

	for _, test := range []struct {
		name string
		view *api.View
		want []string
	}{
		{"connections of pods leave with an address of the service", annotated(egress, "true", endpoint("11.0.2.2", true), endpoint("1100::202", true)),
			[]string{"egress 11.0.2.2 10.0.0.55", "egress 1100::202 1000::55", "hairpin 11.0.2.2 . 11.0.2.2", "hairpin 1100::202 . 1100::202", "pod 10.0.0.55 11.0.2.2", "pod 1000::55 1100::202"}},
		{"a local pod of one family", view(endpoint("11.0.2.2", true)),
			[]string{"dropped 1000::55", "hairpin 11.0.2.2 . 11.0.2.2", "pod 10.0.0.55 11.0.2.2"}},
		{"local pods of both families, and others", view(endpoint("11.0.2.2", true), endpoint("11.0.3.2", false), endpoint("1100::202", true)),
			[]string{"hairpin 11.0.2.2 . 11.0.2.2", "hairpin 1100::202 . 1100::202", "pod 10.0.0.55 11.0.2.2", "pod 1000::55 1100::202"}},
		{"two local pods share the slots", view(endpoint("11.0.2.2", true), endpoint("11.0.2.3", true)),
			[]string{"dropped 1000::55", "hairpin 11.0.2.2 . 11.0.2.2", "hairpin 11.0.2.3 . 11.0.2.3", "pods 10.0.0.55 11.0.2.2", "pods 10.0.0.55 11.0.2.3"}},
		{"only pods on other nodes", view(endpoint("11.0.3.2", false)), []string{"dropped 10.0.0.55", "dropped 1000::55"}},
		{"a local pod that is not for external traffic", view(offList), []string{"dropped 10.0.0.55", "dropped 1000::55"}},
		{"no usable endpoint in one family", unusable, []string{"dropped 1000::55", "rejected 10.0.0.55"}},
		{"an address that belongs to an older service", lost, []string{"dropped 1000::55"}},
		{"an address of a family that is not served", onlyIPv6, []string{"hairpin 1100::202 . 1100::202", "pod 1000::55 1100::202"}},
		{"a service with ports", others, nil},
		{"load-balancer addresses, one of which is also an external IP", balanced,
			[]string{"dropped 10.0.0.55", "dropped 1000::55", "dropped 192.0.2.1", "restricted 192.0.2.1", "sources 192.0.2.1 . 10.0.0.0/8", "sources 192.0.2.1 . 192.0.2.9"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, describe(t, test.view)); diff != "" {
				t.Errorf("elements (-want +got):\n%s", diff)
			}
		})
	}
}

func annotated(name, value string, endpoints ...api.Endpoint) *api.View {
	v := view(endpoints...)
	v.Service.Annotations = map[string]string{name: value}
	return v
}

func TestFilters(t *testing.T) {
	for _, test := range []struct{ value, v4, v6 string }{
		{"icmp", "protocols 1", "protocols 58"},
		{"80/tcp, 8000-8080/udp", "ports 17 . 8000-8080, ports 6 . 80", "ports 17 . 8000-8080, ports 6 . 80"},
		{"80-90/tcp,85-100/tcp,82/tcp,100/tcp,102/tcp", "ports 6 . 102, ports 6 . 80-100", "ports 6 . 102, ports 6 . 80-100"},
		{"ports, 47, tcp", "ports 132 . 7, ports 17 . 53, protocols 47, protocols 6", "ports 132 . 7, ports 17 . 53, protocols 47, protocols 6"},
		{"0-65535/sctp", "ports 132 . 0-65535", "ports 132 . 0-65535"},
		{"", "error", "error"},
		{"80", "protocols 80", "protocols 80"},
		{"256", "error", "error"},
		{"80-/tcp", "error", "error"},
		{"90-80/tcp", "error", "error"},
		{"65536/tcp", "error", "error"},
		{"80/icmp", "error", "error"},
		{"80/gre", "error", "error"},
		{"} ; flush ruleset", "error", "error"},
		{many(maxItems + 1), "error", "error"},
	} {
		t.Run(test.value, func(t *testing.T) {
			svc := annotated(allow, test.value).Service
			svc.Ports = []api.PortMapping{{Protocol: api.UDP, Port: 53}, {Protocol: api.SCTP, Port: 7}}
			for ip, want := range map[string]string{"10.0.0.55": test.v4, "1000::55": test.v6} {
				lines, err := filter(svc, netip.MustParseAddr(ip))
				got := "error"
				if err == nil {
					got = strings.NewReplacer("filtered { "+ip+" }\n", "", "{ "+ip+" . ", "", " }", "", "\n", ", ").Replace(join(lines))
				}
				if got != want {
					t.Errorf("%s: %s, %v; want %s", ip, got, err, want)
				}
			}
		})
	}
}

// many returns a filter of n ports.
func many(n int) string {
	var items []string
	for i := range n {
		items = append(items, fmt.Sprintf("%d/tcp", 2*i))
	}
	return strings.Join(items, ",")
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
