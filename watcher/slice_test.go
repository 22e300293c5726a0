// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestEndpointSliceConversion(t *testing.T) {
	type slice = discoveryv1.EndpointSlice
	ready := api.Conditions{Ready: true, Serving: true}
	for _, tc := range []struct {
		name     string
		options  Options
		change   func(*slice) // changes an IPv4 slice of service web, without endpoints and ports
		want     func(*api.EndpointSlice)
		none     bool
		problems []string
	}{
		{
			name:   "a slice without endpoints and ports is valid",
			change: func(*slice) {},
			want:   func(*api.EndpointSlice) {},
		},
		{
			name:     "a slice without the service label belongs to no service",
			change:   func(s *slice) { s.Labels = nil },
			none:     true,
			problems: []string{"metadata.labels[kubernetes.io/service-name]: missing, so the slice belongs to no service"},
		},
		{
			name:   "an FQDN slice is ignored",
			change: func(s *slice) { s.AddressType = discoveryv1.AddressTypeFQDN },
			none:   true,
		},
		{
			name:     "a slice of an unknown address type is omitted",
			change:   func(s *slice) { s.AddressType = "IPv5" },
			none:     true,
			problems: []string{`addressType: unknown address type "IPv5"`},
		},
		{
			name: "absent conditions mean ready, serving and not terminating",
			change: func(s *slice) {
				s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}}
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{{Addr: addrs("10.0.0.1")[0], Conditions: ready}}
			},
		},
		{
			name: "each condition has its own default",
			change: func(s *slice) {
				s.Endpoints = []discoveryv1.Endpoint{
					{Addresses: []string{"10.0.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: ptr(false)}},
					{Addresses: []string{"10.0.0.2"}, Conditions: discoveryv1.EndpointConditions{Serving: ptr(false)}},
					{Addresses: []string{"10.0.0.3"}, Conditions: discoveryv1.EndpointConditions{Terminating: ptr(true)}},
				}
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{
					{Addr: addrs("10.0.0.1")[0], Conditions: api.Conditions{Serving: true}},
					{Addr: addrs("10.0.0.2")[0], Conditions: api.Conditions{Ready: true}},
					{Addr: addrs("10.0.0.3")[0], Conditions: api.Conditions{Ready: true, Serving: true, Terminating: true}},
				}
			},
		},
		{
			name:   "labels and targets are not kept by default",
			change: func(s *slice) { setTargets(s) },
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{{Addr: addrs("10.0.0.1")[0], Conditions: ready}}
			},
		},
		{
			name:    "labels that match a pattern, and pods, are kept on request",
			options: Options{KeepSliceLabels: []string{"app"}, KeepTargets: true},
			change:  func(s *slice) { setTargets(s) },
			want: func(s *api.EndpointSlice) {
				s.Labels = map[string]string{"app": "web"}
				s.Endpoints = []api.SliceEndpoint{{
					Addr: addrs("10.0.0.1")[0], Conditions: ready,
					Details: &api.EndpointDetails{Target: &types.NamespacedName{Namespace: "default", Name: "web-0"}},
				}}
			},
		},
		{
			name:    "targets of other kinds are not kept",
			options: Options{KeepTargets: true},
			change: func(s *slice) {
				setTargets(s)
				s.Endpoints[0].TargetRef.Kind = "Node"
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{{Addr: addrs("10.0.0.1")[0], Conditions: ready}}
			},
		},
		{
			name: "only the first address is used",
			change: func(s *slice) {
				s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1", "10.0.0.2"}}}
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{{Addr: addrs("10.0.0.1")[0], Conditions: ready}}
			},
		},
		{
			name: "addresses are normalised",
			change: func(s *slice) {
				s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"010.0.0.01"}}, {Addresses: []string{"::ffff:10.0.0.2"}}}
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{
					{Addr: addrs("10.0.0.1")[0], Conditions: ready},
					{Addr: addrs("10.0.0.2")[0], Conditions: ready},
				}
			},
		},
		{
			name: "an endpoint without a usable address is omitted",
			change: func(s *slice) {
				s.Endpoints = []discoveryv1.Endpoint{{}, {Addresses: []string{"pod"}}, {Addresses: []string{"fd00::1"}}, {Addresses: []string{"10.0.0.1"}}}
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{{Addr: addrs("10.0.0.1")[0], Conditions: ready}}
			},
			problems: []string{
				"endpoints[0].addresses: empty",
				`endpoints[1].addresses[0]: "pod" is not an IP address`,
				`endpoints[2].addresses[0]: "fd00::1" is not an IPv4 address, as the slice's addressType says`,
			},
		},
		{
			name: "an IPv6 slice accepts no IPv4 addresses, also no mapped ones",
			change: func(s *slice) {
				s.AddressType = discoveryv1.AddressTypeIPv6
				s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"::ffff:10.0.0.2"}}, {Addresses: []string{"FD00::1"}}}
			},
			want: func(s *api.EndpointSlice) {
				s.Family = api.IPv6
				s.Endpoints = []api.SliceEndpoint{{Addr: addrs("fd00::1")[0], Conditions: ready}}
			},
			problems: []string{`endpoints[0].addresses[0]: "::ffff:10.0.0.2" is not an IPv6 address, as the slice's addressType says`},
		},
		{
			name: "host name, node, zone and hints are kept",
			change: func(s *slice) {
				s.Endpoints = []discoveryv1.Endpoint{{
					Addresses: []string{"10.0.0.1"}, Hostname: ptr("web-0"), NodeName: ptr("a"), Zone: ptr("z1"),
					Hints: &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: "a"}}, ForZones: []discoveryv1.ForZone{{Name: "z1"}}},
				}, {
					Addresses: []string{"10.0.0.2"},
					Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1"}, {Name: "z2"}}},
				}, {
					Addresses: []string{"10.0.0.3"},
					Hints:     &discoveryv1.EndpointHints{},
				}}
			},
			want: func(s *api.EndpointSlice) {
				s.Endpoints = []api.SliceEndpoint{
					{
						Addr: addrs("10.0.0.1")[0], Conditions: ready,
						Details: &api.EndpointDetails{Hostname: "web-0", NodeName: "a", Zone: "z1", Hints: &api.Hints{ForNodes: []string{"a"}, ForZones: []string{"z1"}}},
					},
					{Addr: addrs("10.0.0.2")[0], Conditions: ready, Details: &api.EndpointDetails{Hints: &api.Hints{ForZones: []string{"z1", "z2"}}}},
					{Addr: addrs("10.0.0.3")[0], Conditions: ready},
				}
			},
		},
		{
			name: "a port without any field is an unnamed TCP port without a number",
			change: func(s *slice) {
				s.Ports = []discoveryv1.EndpointPort{{}, {Name: ptr("http"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr(int32(8080)), AppProtocol: ptr("http")}}
			},
			want: func(s *api.EndpointSlice) {
				s.Ports = []api.EndpointPort{{Protocol: api.TCP}, {Name: "http", Protocol: api.TCP, Port: 8080, AppProtocol: "http"}}
			},
		},
		{
			name: "a name may have several protocols, each once",
			change: func(s *slice) {
				s.Ports = []discoveryv1.EndpointPort{
					{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr(int32(53))},
					{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr(int32(53))},
					{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr(int32(5353))},
				}
			},
			want: func(s *api.EndpointSlice) {
				s.Ports = []api.EndpointPort{{Name: "dns", Protocol: api.TCP, Port: 53}, {Name: "dns", Protocol: api.UDP, Port: 53}}
			},
			problems: []string{`ports[2].name: "dns" with protocol UDP is taken by an earlier port`},
		},
		{
			name: "a port number out of range is omitted, an unknown protocol is marked as unknown",
			change: func(s *slice) {
				s.Ports = []discoveryv1.EndpointPort{{Name: ptr("a"), Port: ptr(int32(-5))}, {Name: ptr("b"), Port: ptr(int32(0)), Protocol: ptr(corev1.Protocol("QUIC"))}}
			},
			want: func(s *api.EndpointSlice) {
				s.Ports = []api.EndpointPort{{Name: "a", Protocol: api.TCP}, {Name: "b"}}
			},
			problems: []string{
				"ports[0].port: -5 is not a port number",
				`ports[1].protocol: unknown protocol "QUIC"`,
			},
		},
		{
			name: "the trigger time is kept",
			change: func(s *slice) {
				s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05.6Z"}
			},
			want: func(s *api.EndpointSlice) { s.TriggerTime = time.Date(2026, 1, 2, 3, 4, 5, 6e8, time.UTC) },
		},
		{
			name: "an invalid trigger time is ignored",
			change: func(s *slice) {
				s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "yesterday"}
			},
			want: func(*api.EndpointSlice) {},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := &discoveryv1.EndpointSlice{ObjectMeta: labels(discoveryv1.LabelServiceName, "web"), AddressType: discoveryv1.AddressTypeIPv4}
			tc.change(in)
			before := in.DeepCopy()
			var want *api.EndpointSlice
			if !tc.none {
				want = &api.EndpointSlice{Namespace: "default", Name: "web", ServiceName: "web", Family: api.IPv4}
				tc.want(want)
			}
			got, problems := newConverter(t, tc.options).EndpointSlice(in)
			if diff := cmp.Diff(want, got, cmpOptions); diff != "" {
				t.Errorf("slice (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.problems, messages(problems)); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, in); diff != "" {
				t.Errorf("the object was modified:\n%s", diff)
			}
		})
	}
}

// setTargets adds two labels to s, and an endpoint with a pod as its target.
func setTargets(s *discoveryv1.EndpointSlice) {
	s.Labels["app"], s.Labels["tier"] = "web", "1"
	s.Endpoints = []discoveryv1.Endpoint{{
		Addresses: []string{"10.0.0.1"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-0"},
	}}
}

func TestSliceMayExceedLimitOfAPI(t *testing.T) {
	in := exampleSlice(1001)
	got, problems := newConverter(t, Options{}).EndpointSlice(in)
	if len(got.Endpoints) != 1001 || len(problems) > 0 {
		t.Errorf("%d endpoints, problems %v", len(got.Endpoints), problems)
	}
}

func TestProblemsOfAnObjectAreBounded(t *testing.T) {
	in := exampleSlice(1001)
	for i := range in.Endpoints {
		in.Endpoints[i].Addresses[0] = "bad"
	}
	got, problems := newConverter(t, Options{}).EndpointSlice(in)
	if len(got.Endpoints) != 0 || len(problems) != maxProblems {
		t.Errorf("%d endpoints, %d problems", len(got.Endpoints), len(problems))
	}
	if last := problems[len(problems)-1].Error(); !strings.HasSuffix(last, "(and 991 more problems)") {
		t.Errorf("last problem %q", last)
	}
}

func TestRepeatedStringsAreStoredOnce(t *testing.T) {
	c := newConverter(t, Options{})
	hints := &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}}}
	convert := func() api.SliceEndpoint {
		in := exampleSlice(1)
		in.Endpoints[0].NodeName = ptr(strings.Clone("node"))
		in.Endpoints[0].Hints = hints
		s, _ := c.EndpointSlice(in)
		return s.Endpoints[0]
	}
	a, b := convert(), convert()
	if a.Details != b.Details {
		t.Error("equal details are stored twice")
	}
}

func TestSharedTablesAreBounded(t *testing.T) {
	var s shared
	for i := range 2*maxShared + 1 {
		name := fmt.Sprint(i)
		s.hint(hintKey{zone: name})
	}
	if len(s.strings) > maxShared || len(s.hints) > maxShared {
		t.Errorf("%d strings and %d hints, want at most %d", len(s.strings), len(s.hints), maxShared)
	}
}
