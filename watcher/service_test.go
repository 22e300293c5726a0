// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func addrs(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range texts {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range texts {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func messages(problems []error) []string {
	var out []string
	for _, p := range problems {
		out = append(out, p.Error())
	}
	return out
}

var cmpOptions = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func ptr[T any](v T) *T { return &v }

func TestServiceConversion(t *testing.T) {
	type service = corev1.Service
	for _, tc := range []struct {
		name     string
		options  Options
		change   func(*service) // changes service default/web, whose other fields are empty
		want     func(*api.Service)
		problems []string
	}{
		{
			name:   "an empty service is a ClusterIP service without an address",
			change: func(*service) {},
			want:   func(*api.Service) {},
		},
		{
			name: "identity, age and families are kept",
			change: func(s *service) {
				s.UID, s.CreationTimestamp = "1234", metav1.Unix(99, 0)
				s.Spec.IPFamilies = []corev1.IPFamily{"IPv6", "IPv4", "IPv6"}
			},
			want: func(s *api.Service) {
				s.UID, s.Created = "1234", time.Unix(99, 0)
				s.IPFamilies = []api.Family{api.IPv6, api.IPv4}
			},
		},
		{
			name:     "an unknown IP family is omitted",
			change:   func(s *service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv5", "IPv4"} },
			want:     func(s *api.Service) { s.IPFamilies = []api.Family{api.IPv4} },
			problems: []string{`spec.ipFamilies[0]: unknown IP family "IPv5"`},
		},
		{
			name: "cluster IPs are sorted by family",
			change: func(s *service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.0.0.1", []string{"10.0.0.1", "fd00::1"}
			},
			want: func(s *api.Service) {
				s.IPs.ClusterIPs = api.NewIPSet(addrs("10.0.0.1", "fd00::1")...)
			},
		},
		{
			name: "clusterIPs takes precedence over the legacy clusterIP",
			change: func(s *service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.0.0.1", []string{"10.0.0.2"}
			},
			want: func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(addrs("10.0.0.2")...) },
		},
		{
			name:   "the legacy clusterIP is used if clusterIPs is empty",
			change: func(s *service) { s.Spec.ClusterIP = "10.0.0.1" },
			want:   func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(addrs("10.0.0.1")...) },
		},
		{
			name:   "clusterIP None makes a headless service",
			change: func(s *service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} },
			want:   func(s *api.Service) { s.IPs.Headless = true },
		},
		{
			name: "a headless service may have external IPs",
			change: func(s *service) {
				s.Spec.ClusterIP, s.Spec.ExternalIPs = "None", []string{"10.0.0.55", "1000::55"}
			},
			want: func(s *api.Service) {
				s.IPs.Headless = true
				s.IPs.ExternalIPs = api.NewIPSet(addrs("10.0.0.55", "1000::55")...)
			},
		},
		{
			name:   "numbers of addresses may have leading zeros",
			change: func(s *service) { s.Spec.ClusterIP = "010.000.000.009" },
			want:   func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(addrs("10.0.0.9")...) },
		},
		{
			name:   "mapped IPv4 addresses are IPv4 addresses",
			change: func(s *service) { s.Spec.ExternalIPs = []string{"::ffff:10.0.0.1", "10.0.0.1"} },
			want:   func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(addrs("10.0.0.1")...) },
		},
		{
			name:   "invalid addresses are omitted, empty ones without a report",
			change: func(s *service) { s.Spec.ExternalIPs = []string{"", "10.0.0.300", " ", "fe80::1%eth0", "10.0.0.1"} },
			want:   func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(addrs("10.0.0.1")...) },
			problems: []string{
				`spec.externalIPs[1]: "10.0.0.300" is not an IP address`,
				`spec.externalIPs[3]: "fe80::1%eth0" is not an IP address`,
			},
		},
		{
			name: "addresses that mean the host itself are omitted",
			change: func(s *service) {
				s.Spec.ExternalIPs = []string{"127.0.0.1", "::", "10.0.0.1"}
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "0.0.0.0"}, {IP: "::1"}, {IP: "::ffff:0.0.0.0"}, {IP: "fe80::1"}}
			},
			want: func(s *api.Service) {
				s.IPs.ExternalIPs, s.IPs.LoadBalancerIPs = api.NewIPSet(addrs("10.0.0.1")...), api.NewIPSet(addrs("fe80::1")...)
			},
			problems: []string{
				`spec.externalIPs[0]: 127.0.0.1 means the host itself; it gets no frontend`,
				`spec.externalIPs[1]: :: means the host itself; it gets no frontend`,
				`status.loadBalancer.ingress[0]: 0.0.0.0 means the host itself; it gets no frontend`,
				`status.loadBalancer.ingress[1]: ::1 means the host itself; it gets no frontend`,
				`status.loadBalancer.ingress[2]: 0.0.0.0 means the host itself; it gets no frontend`,
			},
		},
		{
			name:     "an invalid cluster IP is reported",
			change:   func(s *service) { s.Spec.ClusterIP = "ten" },
			want:     func(*api.Service) {},
			problems: []string{`spec.clusterIP: "ten" is not an IP address`},
		},
		{
			name: "ingress addresses are classified by ipMode, and hostnames are ignored",
			change: func(s *service) {
				s.Spec.Type = corev1.ServiceTypeLoadBalancer
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
					{IP: "192.0.2.1"},
					{IP: "192.0.2.2", IPMode: ptr(corev1.LoadBalancerIPModeVIP)},
					{IP: "192.0.2.3", IPMode: ptr(corev1.LoadBalancerIPModeProxy)},
					{IP: "192.0.2.4", IPMode: ptr(corev1.LoadBalancerIPMode("Other"))},
					{Hostname: "lb.example.com"},
				}
			},
			want: func(s *api.Service) {
				s.Type = api.LoadBalancer
				s.IPs.LoadBalancerIPs = api.NewIPSet(addrs("192.0.2.1", "192.0.2.2")...)
				s.IPs.ProxiedIPs = api.NewIPSet(addrs("192.0.2.3", "192.0.2.4")...)
			},
		},
		{
			name: "source ranges are trimmed, masked and applied to the load-balancer IPs",
			change: func(s *service) {
				s.Spec.Type = corev1.ServiceTypeLoadBalancer
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
				s.Spec.LoadBalancerSourceRanges = []string{" 10.1.2.3/8 ", "fd00::/64\t", "010.0.0.0/16", ""}
			},
			want: func(s *api.Service) {
				s.Type = api.LoadBalancer
				s.IPs.LoadBalancerIPs = api.NewIPSet(addrs("192.0.2.1")...)
				s.SourceRanges = []api.SourceRanges{{
					TargetIPs: api.NewIPSet(addrs("192.0.2.1")...),
					Prefixes:  prefixes("10.0.0.0/8", "fd00::/64", "10.0.0.0/16"),
				}}
			},
		},
		{
			name: "if all source ranges are invalid, no source is admitted",
			change: func(s *service) {
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
				s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0", "::ffff:10.0.0.0/104"}
			},
			want: func(s *api.Service) {
				s.IPs.LoadBalancerIPs = api.NewIPSet(addrs("192.0.2.1")...)
				s.SourceRanges = []api.SourceRanges{{TargetIPs: api.NewIPSet(addrs("192.0.2.1")...)}}
			},
			problems: []string{
				`spec.loadBalancerSourceRanges[0]: "10.0.0.0" is not a CIDR; it admits no source`,
				`spec.loadBalancerSourceRanges[1]: "::ffff:10.0.0.0/104" is not a CIDR; it admits no source`,
			},
		},
		{
			name: "blank source ranges are ignored",
			change: func(s *service) {
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
				s.Spec.LoadBalancerSourceRanges = []string{"", " "}
			},
			want: func(s *api.Service) { s.IPs.LoadBalancerIPs = api.NewIPSet(addrs("192.0.2.1")...) },
		},
		{
			name: "the annotation for source ranges is ignored",
			change: func(s *service) {
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
				s.Annotations = map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: "10.0.0.0/8"}
			},
			want: func(s *api.Service) { s.IPs.LoadBalancerIPs = api.NewIPSet(addrs("192.0.2.1")...) },
		},
		{
			name:   "without load-balancer IPs there are no source ranges",
			change: func(s *service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"} },
			want:   func(*api.Service) {},
		},
		{
			name: "an ExternalName service has no addresses",
			change: func(s *service) {
				s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.com"
				s.Spec.ExternalIPs, s.Spec.ClusterIP = []string{"10.0.0.1"}, "10.0.0.2"
			},
			want: func(s *api.Service) { s.Type = api.ExternalName },
		},
		{
			name:     "an unknown type is kept and reported",
			change:   func(s *service) { s.Spec.Type = "Teleport" },
			want:     func(s *api.Service) { s.Type = "Teleport" },
			problems: []string{`spec.type: unknown type "Teleport"`},
		},
		{
			name: "traffic policies are kept",
			change: func(s *service) {
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
				s.Spec.InternalTrafficPolicy = ptr(corev1.ServiceInternalTrafficPolicyLocal)
			},
			want: func(s *api.Service) { s.ExternalTrafficToLocal, s.InternalTrafficToLocal = true, true },
		},
		{
			name: "the health-check node port is kept for a load balancer with policy Local",
			change: func(s *service) {
				s.Spec.Type, s.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, 30000
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			},
			want: func(s *api.Service) {
				s.Type, s.ExternalTrafficToLocal, s.HealthCheckNodePort = api.LoadBalancer, true, 30000
			},
		},
		{
			name: "the health-check node port is ignored with policy Cluster",
			change: func(s *service) {
				s.Spec.Type, s.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, 30000
			},
			want: func(s *api.Service) { s.Type = api.LoadBalancer },
		},
		{
			name: "ports get the API's defaults: TCP, and the target port of the same number",
			change: func(s *service) {
				s.Spec.Ports = []corev1.ServicePort{{Port: 80}}
			},
			want: func(s *api.Service) {
				s.Ports = []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 80}}
			},
		},
		{
			name: "all fields of ports are kept",
			change: func(s *service) {
				s.Spec.Ports = []corev1.ServicePort{
					{Name: "dns", Protocol: "UDP", Port: 53, TargetPort: intstr.FromInt32(5353), NodePort: 30053},
					{Name: "dns-tcp", Protocol: "TCP", Port: 53, TargetPort: intstr.FromString("dns"), AppProtocol: ptr("example.com/dns")},
					{Name: "assoc", Protocol: "SCTP", Port: 53},
				}
			},
			want: func(s *api.Service) {
				s.Ports = []api.PortMapping{
					{Name: "dns", Protocol: api.UDP, Port: 53, TargetPort: 5353, NodePort: 30053},
					{Name: "dns-tcp", Protocol: api.TCP, Port: 53, TargetPortName: "dns", AppProtocol: "example.com/dns"},
					{Name: "assoc", Protocol: api.SCTP, Port: 53, TargetPort: 53},
				}
			},
		},
		{
			name: "a port with an invalid number is omitted, the others are served",
			change: func(s *service) {
				s.Spec.Ports = []corev1.ServicePort{{Name: "zero"}, {Name: "big", Port: 65536}, {Name: "ok", Port: 80, NodePort: -1, TargetPort: intstr.FromInt32(99999)}}
			},
			want: func(s *api.Service) {
				s.Ports = []api.PortMapping{{Name: "ok", Protocol: api.TCP, Port: 80, TargetPort: 80}}
			},
			problems: []string{
				"spec.ports[0].port: 0 is not a port number",
				"spec.ports[1].port: 65536 is not a port number",
				"spec.ports[2].nodePort: -1 is not a port number",
				"spec.ports[2].targetPort: 99999 is not a port number; using 80",
			},
		},
		{
			name: "a port of an unknown protocol is kept without protocol, and reported",
			change: func(s *service) {
				s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80, Protocol: "QUIC"}, {Name: "b", Port: 80, Protocol: "DCCP"}}
			},
			want: func(s *api.Service) {
				s.Ports = []api.PortMapping{{Name: "a", Port: 80, TargetPort: 80}, {Name: "b", Port: 80, TargetPort: 80}}
			},
			problems: []string{
				`spec.ports[0].protocol: unknown protocol "QUIC"`,
				`spec.ports[1].protocol: unknown protocol "DCCP"`,
			},
		},
		{
			name: "if two ports have the same name, or the same number and protocol, the first one counts",
			change: func(s *service) {
				s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "a", Port: 81}, {Name: "b", Port: 80, Protocol: "TCP"}}
			},
			want: func(s *api.Service) {
				s.Ports = []api.PortMapping{{Name: "a", Protocol: api.TCP, Port: 80, TargetPort: 80}}
			},
			problems: []string{
				`spec.ports[1].name: the name "a" is taken by an earlier port`,
				"spec.ports[2].port: 80/TCP is taken by an earlier port",
			},
		},
		{
			name:   "session affinity has a default timeout",
			change: func(s *service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP },
			want: func(s *api.Service) {
				s.AffinitySeconds = 10800
			},
		},
		{
			name: "session affinity keeps its timeout",
			change: func(s *service) {
				s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
				s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr(int32(86400))}}
			},
			want: func(s *api.Service) {
				s.AffinitySeconds = 86400
			},
		},
		{
			name: "a timeout out of range is replaced by the default",
			change: func(s *service) {
				s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
				s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr(int32(0))}}
			},
			want: func(s *api.Service) {
				s.AffinitySeconds = 10800
			},
			problems: []string{"spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400; using 10800"},
		},
		{
			name:     "an unknown affinity means no affinity",
			change:   func(s *service) { s.Spec.SessionAffinity = "Cookie" },
			want:     func(*api.Service) {},
			problems: []string{`spec.sessionAffinity: unknown affinity "Cookie"`},
		},
		{
			name:   "the class of the load balancer",
			change: func(s *service) { s.Spec.LoadBalancerClass = ptr("example.com/lb") },
			want:   func(s *api.Service) { s.LoadBalancerClass = "example.com/lb" },
		},
		{
			name: "labels and annotations are not kept by default",
			change: func(s *service) {
				s.Labels, s.Annotations = map[string]string{"app": "web"}, map[string]string{"note": "x"}
			},
			want: func(*api.Service) {},
		},
		{
			name:    "labels and annotations that match a pattern are kept",
			options: Options{KeepLabels: []string{"a*", "example.com/*"}, KeepAnnotations: []string{"*"}},
			change: func(s *service) {
				s.Labels = map[string]string{"app": "web", "tier": "1", "example.com/x": "2", "a/b": "3"}
				s.Annotations = map[string]string{"note": "x", "example.com/y": "4"}
			},
			want: func(s *api.Service) {
				s.Labels = map[string]string{"app": "web", "example.com/x": "2"}
				s.Annotations = map[string]string{"note": "x"}
			},
		},
		{
			name:    "external IPs are ignored on request, also invalid ones",
			options: Options{IgnoreExternalIPs: true},
			change: func(s *service) {
				s.Spec.ClusterIP = "10.0.0.1"
				s.Spec.ExternalIPs = []string{"192.0.2.1", "no address"}
			},
			want: func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(addrs("10.0.0.1")...) },
		},
		{
			name:    "an annotation makes an all-ports service",
			options: Options{AllPorts: AllPortsAnnotated("example.com/all-ports")},
			change:  func(s *service) { s.Annotations = map[string]string{"example.com/all-ports": "true"} },
			want:    func(s *api.Service) { s.AllPorts = true },
		},
		{
			name:    "an annotation that is not true makes no all-ports service",
			options: Options{AllPorts: AllPortsAnnotated("example.com/all-ports")},
			change:  func(s *service) { s.Annotations = map[string]string{"example.com/all-ports": "maybe"} },
			want:    func(*api.Service) {},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
			tc.change(in)
			before := in.DeepCopy()
			want := &api.Service{Namespace: "default", Name: "web", Type: api.ClusterIP}
			tc.want(want)
			got, problems := newConverter(t, tc.options).Service(in)
			if diff := cmp.Diff(want, got, cmpOptions); diff != "" {
				t.Errorf("service (-want +got):\n%s", diff)
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

func TestNilServiceIsNil(t *testing.T) {
	if s, problems := newConverter(t, Options{}).Service(nil); s != nil || problems != nil {
		t.Errorf("Service(nil) = %v, %v", s, problems)
	}
}

func TestCreatedIsInUTC(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("elsewhere", 3600))
	c, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := c.Service(&corev1.Service{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(created)}})
	if s.Created != created.UTC() {
		t.Errorf("created %s, want %s", s.Created, created.UTC())
	}
	if s, _ := c.Service(&corev1.Service{}); !s.Created.IsZero() {
		t.Errorf("created %s, want none", s.Created)
	}
}
