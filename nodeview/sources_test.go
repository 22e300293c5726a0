// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
)

// sourceRangesFor sets the source ranges of the service's load-balancer IPs, as watchers
// do for loadBalancerSourceRanges.
func sourceRangesFor(ranges ...string) func(*api.Service) {
	return func(s *api.Service) {
		f := api.SourceRanges{TargetIPs: s.IPs.LoadBalancerIPs}
		for _, r := range ranges {
			f.Prefixes = append(f.Prefixes, netip.MustParsePrefix(r))
		}
		s.SourceRanges = append(s.SourceRanges, f)
	}
}

func TestSourceRanges(t *testing.T) {
	lb := []func(*api.Service){
		dualStack, loadBalancerIPs("203.0.113.1", "203.0.113.2", "2001:db8::1"), externalIPs("192.0.2.1", "203.0.113.2"), nodePort(30080),
	}
	restricted := func(ranges ...string) *api.Service {
		return service(append(lb[:len(lb):len(lb)], sourceRangesFor(ranges...))...)
	}
	for _, c := range []struct {
		name    string
		service *api.Service
		want    map[string]string // restricted frontend → source ranges
	}{{
		name:    "without ranges all sources are admitted",
		service: service(lb...),
		want:    map[string]string{},
	}, {
		name:    "ranges apply only to load-balancer IPs, by family, and also to those that are external IPs",
		service: restricted("172.16.0.0/12", "fd00::/8", "10.0.0.0/8"),
		want: map[string]string{
			"LoadBalancerIP 203.0.113.1:80/TCP":   "only 10.0.0.0/8, 172.16.0.0/12",
			"LoadBalancerIP 203.0.113.2:80/TCP":   "only 10.0.0.0/8, 172.16.0.0/12",
			"LoadBalancerIP [2001:db8::1]:80/TCP": "only fd00::/8",
		},
	}, {
		name:    "ranges apply to a cluster IP that is also a load-balancer IP",
		service: service(loadBalancerIPs("10.96.0.1"), sourceRangesFor("10.0.0.0/8")),
		want:    map[string]string{"ClusterIP 10.96.0.1:80/TCP": "only 10.0.0.0/8"},
	}, {
		name:    "a range of length 0 admits all sources of its family",
		service: restricted("0.0.0.0/0", "fd00::/8"),
		want: map[string]string{
			"LoadBalancerIP [2001:db8::1]:80/TCP": "only fd00::/8",
		},
	}, {
		name:    "ranges of only the other family admit no source",
		service: restricted("fd00::/8"),
		want: map[string]string{
			"LoadBalancerIP 203.0.113.1:80/TCP":   "no source of this family",
			"LoadBalancerIP 203.0.113.2:80/TCP":   "no source of this family",
			"LoadBalancerIP [2001:db8::1]:80/TCP": "only fd00::/8",
		},
	}, {
		name:    "a source is admitted if one of several filters admits it",
		service: service(append(lb[:len(lb):len(lb)], sourceRangesFor("10.0.0.0/8", "::/0"), sourceRangesFor("172.16.0.0/12"))...),
		want: map[string]string{
			"LoadBalancerIP 203.0.113.1:80/TCP": "only 10.0.0.0/8, 172.16.0.0/12",
			"LoadBalancerIP 203.0.113.2:80/TCP": "only 10.0.0.0/8, 172.16.0.0/12",
		},
	}, {
		name:    "a later filter admits all sources",
		service: service(append(lb[:len(lb):len(lb)], sourceRangesFor("10.0.0.0/8"), sourceRangesFor("0.0.0.0/0"))...),
		want:    map[string]string{"LoadBalancerIP [2001:db8::1]:80/TCP": "no source of this family"},
	}} {
		t.Run(c.name, func(t *testing.T) {
			got := map[string]string{}
			for f := range Frontends(View(&api.ServiceState{Service: c.service}, thisNode)) {
				if f.Sources.Restricted || f.Sources.Ranges != nil {
					got[f.FrontendKey.String()] = f.Sources.String()
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("restricted frontends differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSources(t *testing.T) {
	if got := (Sources{}).String(); got != "any source" {
		t.Errorf("the zero value is %q", got)
	}
	own := []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")}
	ten := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	for _, c := range []struct {
		name    string
		sources Sources
		node    string
		want    []string
	}{{
		name: "not restricted",
	}, {
		name:    "restricted, without a range for the node",
		sources: Sources{Restricted: true, Ranges: ten, Own: own},
		node:    "172.16.0.1",
		want:    []string{"10.0.0.0/8"},
	}, {
		name:    "restricted, with a range for the node: the service's load-balancer IPs are also admitted",
		sources: Sources{Restricted: true, Ranges: ten, Own: own},
		node:    "10.1.2.3",
		want:    []string{"10.0.0.0/8", "203.0.113.1/32", "203.0.113.2/32"},
	}, {
		name:    "restricted to no source",
		sources: Sources{Restricted: true, Own: own},
		node:    "10.1.2.3",
	}} {
		t.Run(c.name, func(t *testing.T) {
			var node []netip.Addr
			if c.node != "" {
				node = []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr(c.node)}
			}
			var got []string
			for _, p := range c.sources.Prefixes(node) {
				got = append(got, p.String())
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("prefixes differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestFrontendsDoNotCopySourceRanges checks that the cost of computing a service's
// frontends does not depend on the number of its source ranges.
func TestFrontendsDoNotCopySourceRanges(t *testing.T) {
	svc := service(dualStack, loadBalancerIPs("203.0.113.1", "2001:db8::1"))
	sourceRangesFor("10.0.0.0/8", "172.16.0.0/12", "fd00::/8")(svc)
	ranges := svc.SourceRanges[0].Prefixes
	for f := range Frontends(&api.View{Service: svc}) {
		if want := map[api.Family]*netip.Prefix{api.IPv4: &ranges[0], api.IPv6: &ranges[2]}[f.Family]; f.Sources.Restricted && &f.Sources.Ranges[0] != want {
			t.Errorf("%s has a copy of the source ranges", f.FrontendKey)
		}
	}
}
