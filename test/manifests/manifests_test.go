// SPDX-License-Identifier: Apache-2.0

// Package manifests compares the verdicts of kpng and of an API server about manifests. It
// runs the code of the API server, without a server.
package manifests

import (
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/file"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	componentversion "k8s.io/component-base/version"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/discovery"
	_ "k8s.io/kubernetes/pkg/apis/discovery/install"
	discoveryvalidation "k8s.io/kubernetes/pkg/apis/discovery/validation"
	"k8s.io/kubernetes/pkg/features"
)

var number = flag.Int("manifests", 1000, "number of random manifests of each kind")

// refusals returns the errors of the API server for a new object that also has a status.
func refusals(t *testing.T, object runtime.Object) field.ErrorList {
	t.Helper()
	object = object.DeepCopyObject()
	legacyscheme.Scheme.Default(object)
	switch o := object.(type) {
	case *corev1.Service:
		var in core.Service
		convert(t, o, &in)
		if in.Spec.ClusterIP != "" && len(in.Spec.ClusterIPs) == 0 {
			in.Spec.ClusterIPs = []string{in.Spec.ClusterIP}
		}
		if in.Spec.Type == core.ServiceTypeLoadBalancer && in.Spec.ExternalTrafficPolicy == core.ServiceExternalTrafficPolicyLocal && in.Spec.HealthCheckNodePort == 0 {
			in.Spec.HealthCheckNodePort = 30000 // the API server allocates the port before it validates the service
		}
		errs := corevalidation.ValidateServiceCreate(&in)
		for i, p := range in.Spec.Ports {
			if p.NodePort < 0 || p.NodePort > 65535 { // no range contains it
				errs = append(errs, field.Invalid(field.NewPath("spec", "ports").Index(i).Child("nodePort"), p.NodePort, "out of range"))
			}
		}
		return append(errs, corevalidation.ValidateLoadBalancerStatus(&in.Status.LoadBalancer, nil, field.NewPath("status", "loadBalancer"), &in.Spec)...)
	case *discoveryv1.EndpointSlice:
		var in discovery.EndpointSlice
		convert(t, o, &in)
		for i := range in.Endpoints {
			in.Endpoints[i].DeprecatedTopology = nil // the API server drops it
		}
		return discoveryvalidation.ValidateEndpointSliceCreate(&in)
	case *corev1.Node:
		var in core.Node
		convert(t, o, &in)
		return corevalidation.ValidateNode(&in)
	}
	panic("unknown kind")
}

func convert(t *testing.T, from, to any) {
	t.Helper()
	if err := legacyscheme.Scheme.Convert(from, to, nil); err != nil {
		t.Fatal(err)
	}
}

// read returns the error of kpng for a manifest.
func read(t *testing.T, path string, object runtime.Object) error {
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file.Watch(t.Context(), cluster.New(cluster.Options{}), file.Options{Path: path, Once: true})
}

func TestManifestsAreRefusedExactlyIfTheAPIServerRefusesThem(t *testing.T) {
	// kpng admits the forms of addresses that API servers before v1.36 admit.
	featuregatetesting.SetFeatureGateEmulationVersionDuringTest(t, utilfeature.DefaultFeatureGate, version.MustParse(componentversion.DefaultKubeBinaryVersion))
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.StrictIPCIDRValidation, false)
	kinds := map[string]func(dice) runtime.Object{
		"Service":       func(d dice) runtime.Object { return d.service() },
		"EndpointSlice": func(d dice) runtime.Object { return d.slice() },
		"Node":          func(d dice) runtime.Object { return d.node() },
	}
	for kind, make := range kinds {
		t.Run(kind, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.json")
			refused := 0
			for seed := range uint64(*number) {
				object := make(dice{rand.New(rand.NewPCG(seed, 0))})
				want, err := refusals(t, object), read(t, path, object)
				if len(want) > 0 {
					refused++
				}
				if (len(want) > 0) != (err != nil) || err != nil && !strings.Contains(err.Error(), ": "+kind) {
					text, _ := json.MarshalIndent(object, "", " ")
					t.Fatalf("seed %d: kpng: %v\nAPI server: %v\n%s", seed, err, want.ToAggregate(), text)
				}
			}
			if refused < *number/10 || refused > *number*9/10 {
				t.Errorf("%d of %d manifests are refused, so most have the same verdict", refused, *number)
			}
		})
	}
}

// dice makes random objects. Most are valid except for a few values.
type dice struct{ *rand.Rand }

func (d dice) oneIn(n int) bool { return d.IntN(n) == 0 }

// pick returns one of the values.
func pick[T any](d dice, values ...T) T { return values[d.IntN(len(values))] }

// rarely returns valid, and sometimes one of the other values, which may be invalid.
func rarely[T any](d dice, valid T, others ...T) T {
	if d.oneIn(30) {
		return pick(d, others...)
	}
	return valid
}

func some[T any](d dice, value T) *T {
	if d.oneIn(3) {
		return &value
	}
	return nil
}

func (d dice) ip() string {
	return pick(d, "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "192.0.2.1", rarely(d, "10.0.0.3",
		"127.0.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "225.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "ff02::1", "ff05::1",
		"::ffff:10.0.0.1", "010.0.0.1", "10.0.0.256", "fe80::1%eth0", "x", " 10.0.0.1", "10.0.0.1/32", "", "None"))
}

func (d dice) cidr() string {
	return pick(d, "10.0.0.0/8", "fd00::/64", rarely(d, "192.0.2.0/24",
		"0.0.0.0/0", "10.0.0.1/8", "10.0.0.0/33", "::ffff:10.0.0.0/104", "010.0.0.0/8", "10.0.0.0", "x", "", "10.0.0.0/8 "))
}

func (d dice) name() string {
	return rarely(d, pick(d, "web", "api", "a-1"), "", "Web", "a.b", "1", "-a", "a_b", strings.Repeat("a", 64), strings.Repeat("a", 254), "ä")
}

func (d dice) port() int32 {
	return rarely(d, pick[int32](d, 80, 443, 53, 30080), 0, -1, 65535, 65536, 1)
}

func (d dice) protocol() corev1.Protocol {
	return rarely(d, pick(d, corev1.ProtocolTCP, corev1.ProtocolUDP, ""), corev1.ProtocolSCTP, "QUIC", "tcp")
}

func (d dice) texts(keys ...string) map[string]string {
	out := map[string]string{}
	for range d.IntN(2) {
		out[rarely(d, pick(d, append(keys, "app", "example.com/a")...), "", "a b", "a/b/c", "-")] = rarely(d, pick(d, "x", "1", "Auto"), "a b", "", strings.Repeat("a", 64))
	}
	return out
}

func (d dice) meta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{Name: "web", Namespace: "default", Labels: d.texts("kubernetes.io/service-name"), Annotations: d.texts(
		corev1.AnnotationLoadBalancerSourceRangesKey, corev1.AnnotationTopologyMode, corev1.DeprecatedAnnotationTopologyAwareHints)}
	if d.oneIn(20) {
		m.Name = d.name()
	}
	if d.oneIn(30) {
		m.Namespace = rarely(d, "shop", "Shop", "a.b")
	}
	if d.oneIn(30) {
		m.Finalizers = []string{pick(d, "orphan", "foregroundDeletion", "kubernetes", "example.com/f", "f", "")}
	}
	if d.oneIn(40) {
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: pick(d, "Pod", ""), Name: "p", UID: "u"}}
	}
	if d.oneIn(40) {
		m.Generation = pick[int64](d, 1, -1)
	}
	return m
}

func list[T any](d dice, most int, make func() T) (out []T) {
	for range d.IntN(most + 1) {
		out = append(out, make())
	}
	return out
}

func (d dice) service() *corev1.Service {
	s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: d.meta()}
	s.Spec.Type = rarely(d, pick(d, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, ""), corev1.ServiceTypeExternalName, "X")
	s.Spec.Ports = list(d, 3, func() corev1.ServicePort {
		return corev1.ServicePort{
			Name: rarely(d, pick(d, "a", "b", "c"), "", "B", "a.b", strings.Repeat("a", 64)), Protocol: d.protocol(), Port: d.port(),
			TargetPort:  pick(d, intstr.FromInt32(rarely[int32](d, 8080, 0, 65536, -1)), intstr.FromString(rarely(d, "http", "", "HTTP", "80", "a--b", "averyveryverylong"))),
			AppProtocol: some(d, rarely(d, "http", "", "a b", "kubernetes.io/h2c")),
		}
	})
	if s.Spec.Type == corev1.ServiceTypeNodePort || s.Spec.Type == corev1.ServiceTypeLoadBalancer || d.oneIn(10) {
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = rarely(d, int32(30000+d.IntN(20)), 30000, -1, 65536, 0)
		}
	}
	s.Spec.ClusterIP = pick(d, "10.0.0.1", "fd00::1", "", rarely(d, "None", d.ip()))
	switch {
	case s.Spec.ClusterIP == "" || d.oneIn(2):
		s.Spec.ClusterIPs = rarely(d, nil, []string{"10.0.0.1"}, []string{""}, []string{d.ip(), d.ip()})
	default:
		s.Spec.ClusterIPs = append([]string{rarely(d, s.Spec.ClusterIP, "10.0.0.1", "None")}, rarely(d, nil, []string{d.ip()}, []string{d.ip(), d.ip()}, []string{"None"})...)
	}
	s.Spec.IPFamilies = rarely(d, nil, []corev1.IPFamily{"IPv4"}, []corev1.IPFamily{"IPv6"}, []corev1.IPFamily{"IPv4", "IPv6"}, []corev1.IPFamily{"IPv4", "IPv4"}, []corev1.IPFamily{"IPv5"})
	s.Spec.IPFamilyPolicy = some(d, rarely(d, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicySingleStack, "x", ""))
	s.Spec.SessionAffinity = rarely(d, pick(d, "", corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP), "x")
	if d.oneIn(3) {
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{}
		if d.oneIn(2) {
			s.Spec.SessionAffinityConfig.ClientIP = &corev1.ClientIPConfig{TimeoutSeconds: some(d, rarely[int32](d, 5, 0, -1, 86400, 86401))}
		}
	}
	if d.oneIn(3) {
		s.Spec.ExternalIPs = list(d, 2, d.ip)
	}
	if d.oneIn(6) || s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		s.Spec.LoadBalancerSourceRanges = list(d, 1, d.cidr)
		s.Spec.AllocateLoadBalancerNodePorts = some(d, true)
		s.Spec.LoadBalancerClass = some(d, rarely(d, "example.com/lb", "", "a b", "lb"))
		for range d.IntN(2) {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
				IP: rarely(d, d.ip(), ""), Hostname: rarely(d, "", "a.b", "A.b", "10.0.0.1", "a b"), IPMode: some(d, rarely(d, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy, "", "vip")),
			})
		}
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName && !d.oneIn(5) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = "", nil, nil, nil
	}
	s.Spec.ExternalName = rarely(d, "", "example.com", "example.com.", "a b", ".")
	if d.oneIn(4) {
		s.Spec.ExternalTrafficPolicy = pick(d, corev1.ServiceExternalTrafficPolicyLocal, corev1.ServiceExternalTrafficPolicyCluster, "x")
	}
	if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal || d.oneIn(20) {
		s.Spec.HealthCheckNodePort = rarely[int32](d, 30099, 0, -1, 65536)
	}
	s.Spec.InternalTrafficPolicy = some(d, rarely(d, corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster, "x", ""))
	s.Spec.TrafficDistribution = some(d, rarely(d, "PreferClose", "PreferSameZone", "PreferSameNode", "x", ""))
	s.Spec.Selector = d.texts()
	return s
}

func (d dice) slice() *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  d.meta(),
		AddressType: rarely(d, pick(d, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6), discoveryv1.AddressTypeFQDN, "", "IPv5"),
	}
	s.Ports = list(d, 2, func() discoveryv1.EndpointPort {
		return discoveryv1.EndpointPort{Name: some(d, rarely(d, pick(d, "a", "b"), "", "A", "a.b")), Protocol: some(d, d.protocol()), Port: some(d, d.port()), AppProtocol: some(d, rarely(d, "http", "", "a b"))}
	})
	s.Endpoints = list(d, 2, func() discoveryv1.Endpoint {
		e := discoveryv1.Endpoint{NodeName: some(d, rarely(d, "n1", "", "N1", "a.b")), Hostname: some(d, rarely(d, "h", "", "H", "a.b")), Zone: some(d, pick(d, "z", ""))}
		valid := map[discoveryv1.AddressType]string{discoveryv1.AddressTypeIPv4: "10.1.0.1", discoveryv1.AddressTypeIPv6: "fd01::1"}[s.AddressType]
		e.Addresses = rarely(d, []string{valid}, nil, []string{d.ip()}, []string{valid, d.ip()}, []string{"a.example.com"}, []string{"A"}, make([]string, 101))
		if d.oneIn(3) {
			e.Hints = &discoveryv1.EndpointHints{
				ForZones: list(d, rarely(d, 1, 10), func() discoveryv1.ForZone {
					return discoveryv1.ForZone{Name: rarely(d, "z", "", "a b") + pick(d, "", "1", "2")}
				}),
				ForNodes: list(d, rarely(d, 1, 10), func() discoveryv1.ForNode {
					return discoveryv1.ForNode{Name: rarely(d, "n", "N", "a.b") + pick(d, "", "1", "2")}
				}),
			}
		}
		if d.oneIn(20) {
			e.DeprecatedTopology = map[string]string{"a b": "c d"}
		}
		return e
	})
	return s
}

func (d dice) node() *corev1.Node {
	n := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: d.meta()}
	n.Namespace = ""
	n.Spec.PodCIDRs = list(d, 2, d.cidr)
	if d.oneIn(3) {
		n.Spec.PodCIDR = d.cidr()
	}
	n.Spec.Taints = list(d, 2, func() corev1.Taint {
		return corev1.Taint{Key: rarely(d, pick(d, "a", "b"), "", "a b", "example.com/t"), Value: rarely(d, "", "v", "a b"), Effect: rarely(d, corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute, "", "x")}
	})
	for range d.IntN(2) {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: pick(d, corev1.NodeInternalIP, corev1.NodeHostName, "x"), Address: d.ip()})
	}
	return n
}
