// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func newConverter(t testing.TB, o Options) *Converter {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func labels(kv ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: "default", Name: "web"}
	for i := 0; i < len(kv); i += 2 {
		metav1.SetMetaDataLabel(&m, kv[i], kv[i+1])
	}
	return m
}

func TestWantsService(t *testing.T) {
	withIP := corev1.ServiceSpec{ClusterIP: "10.0.0.1"}
	headless := corev1.ServiceSpec{ClusterIP: "None"}
	for _, tc := range []struct {
		name      string
		proxyName string
		service   *corev1.Service
		want      bool
	}{
		{"without a name, a service without the label is served", "", &corev1.Service{ObjectMeta: labels(), Spec: withIP}, true},
		{"without a name, a labelled service is not served", "", &corev1.Service{ObjectMeta: labels(LabelServiceProxyName, "x"), Spec: withIP}, false},
		{"without a name, a service with an empty label is not served", "", &corev1.Service{ObjectMeta: labels(LabelServiceProxyName, ""), Spec: withIP}, false},
		{"without a name, a headless service is not served", "", &corev1.Service{ObjectMeta: labels(), Spec: headless}, false},
		{"without a name, a service with None in clusterIPs is not served", "", &corev1.Service{ObjectMeta: labels(), Spec: corev1.ServiceSpec{ClusterIPs: []string{"None"}}}, false},
		{"without a name, a service that has no address yet is served", "", &corev1.Service{ObjectMeta: labels()}, true},
		{"with a name, a service with that label is served", "x", &corev1.Service{ObjectMeta: labels(LabelServiceProxyName, "x"), Spec: withIP}, true},
		{"with a name, a headless service is served", "x", &corev1.Service{ObjectMeta: labels(LabelServiceProxyName, "x"), Spec: headless}, true},
		{"with a name, a service with another label is not served", "x", &corev1.Service{ObjectMeta: labels(LabelServiceProxyName, "y"), Spec: withIP}, false},
		{"with a name, a service without the label is not served", "x", &corev1.Service{ObjectMeta: labels(), Spec: withIP}, false},
		{"no object is not served", "", nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newConverter(t, Options{ServiceProxyName: tc.proxyName})
			if got := c.WantsService(tc.service); got != tc.want {
				t.Errorf("WantsService = %t, want %t", got, tc.want)
			}
		})
	}
}

func TestWantsSlice(t *testing.T) {
	for _, tc := range []struct {
		name      string
		proxyName string
		meta      metav1.ObjectMeta
		want      bool
	}{
		{"without a name, a slice without the labels is served", "", labels(), true},
		{"without a name, a slice with a proxy's label is served, because its service may have lost the label", "", labels(LabelServiceProxyName, "x"), true},
		{"without a name, a slice of a headless service is not served", "", labels(corev1.IsHeadlessService, ""), false},
		{"with a name, an equal label is served", "x", labels(LabelServiceProxyName, "x"), true},
		{"with a name, a slice of a headless service is served", "x", labels(LabelServiceProxyName, "x", corev1.IsHeadlessService, ""), true},
		{"with a name, a slice with another label is not served", "x", labels(LabelServiceProxyName, "y"), false},
		{"with a name, an unlabelled slice is not served", "x", labels(), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newConverter(t, Options{ServiceProxyName: tc.proxyName})
			if got := c.WantsSlice(&discoveryv1.EndpointSlice{ObjectMeta: tc.meta}); got != tc.want {
				t.Errorf("WantsSlice = %t, want %t", got, tc.want)
			}
		})
	}
}

func TestSkippedServiceIsNotWanted(t *testing.T) {
	class := "example.com/lb"
	c := newConverter(t, Options{ServiceProxyName: "x", Skip: func(s *corev1.Service) bool {
		return s.Spec.LoadBalancerClass != nil && *s.Spec.LoadBalancerClass == class
	}})
	wanted := &corev1.Service{ObjectMeta: labels(LabelServiceProxyName, "x")}
	skipped := wanted.DeepCopy()
	skipped.Spec.LoadBalancerClass = &class
	if !c.WantsService(wanted) || c.WantsService(skipped) {
		t.Errorf("WantsService = %t for a service that is not skipped and %t for a skipped one", c.WantsService(wanted), c.WantsService(skipped))
	}
}

func TestPanicOfAnOptionIsAProblemOfTheService(t *testing.T) {
	c := newConverter(t, Options{
		Skip:     func(s *corev1.Service) bool { return *s.Spec.LoadBalancerClass == "other" },
		AllPorts: func(s *corev1.Service) bool { panic("no reason") },
	})
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	if !c.WantsService(s) {
		t.Error("a panic of Skip excludes the service")
	}
	out, problems := c.Service(s)
	if out.AllPorts {
		t.Error("a panic of AllPorts makes an all-ports service")
	}
	want := []string{
		"Options.Skip: panic: runtime error: invalid memory address or nil pointer dereference; using the result false",
		"Options.AllPorts: panic: no reason; using the result false",
	}
	if diff := cmp.Diff(want, messages(problems)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

func TestServiceNameLabelNamesTheService(t *testing.T) {
	const label = "example.com/service-name"
	c := newConverter(t, Options{ServiceNameLabel: label})
	own := &discoveryv1.EndpointSlice{ObjectMeta: labels(label, "api", discoveryv1.LabelServiceName, "web"), AddressType: discoveryv1.AddressTypeIPv4}
	if got, problems := c.EndpointSlice(own); got == nil || got.ServiceName != "api" || problems != nil {
		t.Errorf("EndpointSlice = %+v, %v, want one of service api", got, problems)
	}
	other := &discoveryv1.EndpointSlice{ObjectMeta: labels(discoveryv1.LabelServiceName, "web"), AddressType: discoveryv1.AddressTypeIPv4}
	if got, problems := c.EndpointSlice(other); got != nil || problems != nil {
		t.Errorf("a slice without the label: %+v, %v, want none and no problem", got, problems)
	}
	if _, err := New(Options{ServiceNameLabel: "a b"}); err == nil || !strings.Contains(err.Error(), `service name label "a b"`) {
		t.Errorf("New with an invalid label name: error %v", err)
	}
}

func TestMalformedPatternIsAnError(t *testing.T) {
	for name, o := range map[string]Options{
		"KeepLabels":      {KeepLabels: []string{"ok/*", "bad/["}},
		"KeepAnnotations": {KeepAnnotations: []string{"bad/["}},
		"KeepSliceLabels": {KeepSliceLabels: []string{"bad/["}},
	} {
		_, err := New(o)
		if err == nil || !strings.Contains(err.Error(), name+` pattern "bad/["`) {
			t.Errorf("New with a malformed pattern in %s: error %v", name, err)
		}
	}
}
