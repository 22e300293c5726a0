// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/randfill"
)

// FuzzConvert fills objects with values from the fuzzer's bytes: nil pointers, arbitrary
// strings and numbers, and some valid values. It checks that their conversion does not
// panic, and that the results satisfy the guarantees of package api.
func FuzzConvert(f *testing.F) {
	f.Add([]byte("some bytes to begin with"))
	f.Add([]byte{})
	options := []Options{{}, {ServiceProxyName: "x", IgnoreExternalIPs: true, KeepLabels: []string{"*"}, KeepAnnotations: []string{"*/*"}, KeepSliceLabels: []string{"*"}, KeepTargets: true, AllPorts: AllPortsAnnotated("a")}}
	f.Fuzz(func(t *testing.T, data []byte) {
		var service corev1.Service
		var slice discoveryv1.EndpointSlice
		var node corev1.Node
		filler := randfill.NewFromGoFuzz(data).NilChance(0.3).NumElements(0, 4).Funcs(
			func(s *string, c randfill.Continue) {
				if typical := []string{"", "None", "10.0.0.1", "010.0.0.1", "::1", "::ffff:1.2.3.4", "10.0.0.0/8", " ::/0", "a"}; c.Intn(3) > 0 {
					*s = typical[c.Intn(len(typical))]
				} else {
					*s = c.String(8)
				}
			},
			func(p *corev1.Protocol, c randfill.Continue) {
				*p = []corev1.Protocol{"", "TCP", "UDP", "SCTP", "X"}[c.Intn(5)]
			},
			func(a *discoveryv1.AddressType, c randfill.Continue) {
				*a = []discoveryv1.AddressType{"IPv4", "IPv6", "FQDN", ""}[c.Intn(4)]
			},
		)
		filler.Fill(&service)
		filler.Fill(&slice)
		filler.Fill(&node)
		if slice.Labels == nil {
			slice.Labels = map[string]string{}
		}
		slice.Labels[discoveryv1.LabelServiceName] = "web"
		for _, o := range options {
			c := newConverter(t, o)
			c.WantsService(&service)
			c.WantsSlice(&slice)
			Selectorless(&service)
			converted, _ := c.Service(&service)
			checkService(t, converted)
			again, _ := c.Service(&service)
			if !converted.Equal(again) {
				t.Errorf("converted twice: %+v and %+v", converted, again)
			}
			if s, _ := c.EndpointSlice(&slice); s != nil {
				checkSlice(t, s)
			}
			c.Node(&node)
		}
	})
}

func checkService(t *testing.T, s *api.Service) {
	for _, set := range []api.IPSet{s.IPs.ClusterIPs, s.IPs.ExternalIPs, s.IPs.LoadBalancerIPs, s.IPs.ProxiedIPs} {
		if again := api.NewIPSet(slices.Collect(set.All())...); again != set {
			t.Errorf("addresses %s, and then %s", set, again)
		}
	}
	for i, p := range s.Ports {
		if !isPort(p.Port) || p.NodePort != 0 && !isPort(p.NodePort) || p.TargetPort != 0 && !isPort(p.TargetPort) {
			t.Errorf("port %+v", p)
		}
		for _, o := range s.Ports[:i] {
			if o.Name == p.Name || p.Protocol != api.UnknownProtocol && o.Port == p.Port && o.Protocol == p.Protocol {
				t.Errorf("ports %+v and %+v", o, p)
			}
		}
	}
	for _, f := range s.SourceRanges {
		for _, r := range f.Prefixes {
			if !r.IsValid() || r != r.Masked() || r.Addr().Is4In6() {
				t.Errorf("source range %v", r)
			}
		}
	}
	if s.AffinitySeconds < 0 || s.AffinitySeconds > maxAffinitySeconds {
		t.Errorf("affinity timeout %d", s.AffinitySeconds)
	}
}

func checkSlice(t *testing.T, s *api.EndpointSlice) {
	for _, e := range s.Endpoints {
		if api.FamilyOf(e.Addr) != s.Family || e.Addr.Is4In6() || e.Addr.Zone() != "" {
			t.Errorf("endpoint %s in an %s slice", e.Addr, s.Family)
		}
	}
	for _, p := range s.Ports {
		if p.Port != 0 && !isPort(p.Port) {
			t.Errorf("port %+v", p)
		}
	}
}
