// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/healthport"
	"k8s.io/apimachinery/pkg/types"
)

// describeFrontends returns a line "KEY: ELSEWHERE; NODE" for each frontend of a view.
// The line shows the decisions for traffic from elsewhere and for traffic from this node.
func describeFrontends(view *api.View) []string {
	var out []string
	for f := range Frontends(view) {
		out = append(out, fmt.Sprintf("%s: %s; %s", f.FrontendKey, trafficText(f.Elsewhere), trafficText(f.Node)))
	}
	return out
}

func trafficText(t Traffic) string {
	if t.Verdict != Forward {
		return t.Verdict.String()
	}
	var text string
	for i, e := range t.Endpoints {
		if i > 0 {
			text += " "
		}
		text += addrPort(e.Addr, e.Port)
	}
	return text
}

func describeUnserved(view *api.View) []string {
	var out []string
	for frontend, why := range Unserved(view) {
		out = append(out, frontend.String()+": "+why)
	}
	return out
}

type frontendCase struct {
	name     string
	service  *api.Service
	slices   string // argument of endpointSlices
	lost     []api.LostClaim
	want     string // result of describeFrontends
	unserved string // result of describeUnserved
}

func runFrontendCases(t *testing.T, cases []frontendCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			view := View(&api.ServiceState{Service: c.service, Slices: endpointSlices(c.slices), Lost: c.lost}, thisNode)
			if diff := cmp.Diff(lines(c.want), describeFrontends(view)); diff != "" {
				t.Errorf("frontends differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(lines(c.unserved), describeUnserved(view)); diff != "" {
				t.Errorf("unserved frontends differ (-want +got):\n%s", diff)
			}
		})
	}
}

const oneReady = `slice a
	10.0.0.1 ready @here`

func TestFrontends(t *testing.T) {
	runFrontendCases(t, []frontendCase{{
		name:    "every kind of frontend",
		service: service(loadBalancerIPs("203.0.113.1"), externalIPs("192.0.2.1"), nodePort(30080)),
		slices:  oneReady,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			LoadBalancerIP 203.0.113.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			NodePort IPv4:30080/TCP: 10.0.0.1:8080; 10.0.0.1:8080`,
	}, {
		name:    "a frontend's endpoints are of its own family",
		service: service(dualStack, nodePort(30080)),
		slices: `slice a
			10.0.0.1 ready
			slice b
			fd00::a ready`,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			NodePort IPv4:30080/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			ClusterIP [fd00::1]:80/TCP: [fd00::a]:8080; [fd00::a]:8080
			NodePort IPv6:30080/TCP: [fd00::a]:8080; [fd00::a]:8080`,
	}, {
		name:    "a port has another number in another EndpointSlice",
		service: service(ports("http=80")),
		slices: `slice a http=8080
			10.0.0.1 ready
			10.0.0.3 ready
			slice b http=9090
			10.0.0.2 ready
			10.0.0.4 ready`,
		want: "ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080 10.0.0.2:9090 10.0.0.3:8080 10.0.0.4:9090; 10.0.0.1:8080 10.0.0.2:9090 10.0.0.3:8080 10.0.0.4:9090",
	}, {
		name:    "an endpoint needs no entry for a port with the number of the target port",
		service: service(ports("80→8080", "b=81")),
		slices: `slice a 8080
			10.0.0.1 ready`,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			ClusterIP 10.96.0.1:81/TCP: Reject; Reject`,
	}, {
		name:    "frontends of a family that the service does not have are reported",
		service: service(externalIPs("2001:db8::1"), func(s *api.Service) { s.IPs.LoadBalancerIPs = ips("2001:db8::2") }),
		slices:  oneReady,
		want:    "ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
		unserved: `LoadBalancerIP [2001:db8::2]:80/TCP: the service is not served in this family
			ExternalIP [2001:db8::1]:80/TCP: the service is not served in this family`,
	}, {
		name: "an address that is twice in a field has one frontend",
		service: service(headless, func(s *api.Service) {
			a := netip.MustParseAddr("192.0.2.1")
			s.IPs.ExternalIPs = api.NewIPSet(a, a)
		}),
		slices: oneReady,
		want:   "ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
	}, {
		name:    "a headless service has external IPs but no cluster IP",
		service: service(headless, externalIPs("192.0.2.1"), func(s *api.Service) { s.IPs.ClusterIPs = ips("10.96.0.1") }),
		slices:  oneReady,
		want:    "ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
	}, {
		name:    "no cluster IP is allocated yet",
		service: service(nodePort(30080), func(s *api.Service) { s.IPs.ClusterIPs = api.IPSet{} }),
		slices:  oneReady,
		want:    "NodePort IPv4:30080/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
	}, {
		name:    "TCP and UDP ports with the same number are two frontends, each with its own target port",
		service: service(ports("dns-tcp=53", "dns=53/UDP")),
		slices: `slice a dns-tcp=1053 dns=2053/UDP
			10.0.0.1 ready
			slice b dns=3053/UDP
			10.0.0.2 ready`,
		want: `ClusterIP 10.96.0.1:53/TCP: 10.0.0.1:1053; 10.0.0.1:1053
			ClusterIP 10.96.0.1:53/UDP: 10.0.0.1:2053 10.0.0.2:3053; 10.0.0.1:2053 10.0.0.2:3053`,
	}, {
		name:    "an all-ports service has one frontend per address and no node port",
		service: service(mapIP, externalIPs("192.0.2.1"), nodePort(30080)),
		slices:  oneReady,
		want: `ClusterIP 10.96.0.1: 10.0.0.1; 10.0.0.1
			ExternalIP 192.0.2.1: 10.0.0.1; 10.0.0.1`,
	}, {
		name:     "a service without ports has no frontends",
		service:  service(ports()),
		slices:   oneReady,
		unserved: "ClusterIP 10.96.0.1: it has no port number",
	}, {
		name: "ports that cannot be served are reported",
		service: service(ports("a=80", "b=80", "c=0", "d=53"), func(s *api.Service) {
			s.Ports[3].Protocol = api.UnknownProtocol
		}),
		slices: `slice a a=8080 b=8081 c=8082 d=8083
			10.0.0.1 ready`,
		want: "ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
		unserved: `ClusterIP 10.96.0.1:80/TCP: an earlier port of the service has the same number and protocol, or name
			ClusterIP 10.96.0.1:0/TCP: it has no port number
			ClusterIP 10.96.0.1:53/Protocol(0): the protocol is unknown`,
	}, {
		name: "if two ports have the same node port, the first one keeps it",
		service: service(headless, ports("none=0", "a=80", "b=81"), func(s *api.Service) {
			for i := range s.Ports {
				s.Ports[i].NodePort = 30080
			}
		}),
		slices: `slice a a=8080 b=8081
			10.0.0.1 ready`,
		want: "NodePort IPv4:30080/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
		unserved: `NodePort IPv4:30080/TCP: it has no port number
			NodePort IPv4:30080/TCP: an earlier port of the service has the same number and protocol, or name`,
	}, {
		name:    "an address that is both external and load-balancer IP has one frontend",
		service: service(loadBalancerIPs("192.0.2.1"), externalIPs("192.0.2.1", "192.0.2.2")),
		slices:  oneReady,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			LoadBalancerIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			ExternalIP 192.0.2.2:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080`,
	}})
}

func TestLostFrontends(t *testing.T) {
	older := types.NamespacedName{Namespace: "default", Name: "older"}
	lost := func(ip string, protocol api.Protocol, port int32) []api.LostClaim {
		return []api.LostClaim{{Claim: api.Claim{IP: netip.MustParseAddr(ip), Protocol: protocol, Port: port}, Winner: older}}
	}
	runFrontendCases(t, []frontendCase{{
		name:     "an address and port",
		service:  service(externalIPs("192.0.2.1")),
		slices:   oneReady,
		lost:     lost("192.0.2.1", api.TCP, 80),
		want:     "ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
		unserved: "ExternalIP 192.0.2.1:80/TCP: service default/older owns it",
	}, {
		name:    "the same port of another protocol is not lost",
		service: service(externalIPs("192.0.2.1"), headless),
		slices:  oneReady,
		lost:    lost("192.0.2.1", api.UDP, 80),
		want:    "ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
	}, {
		name:     "a node port, in one family",
		service:  service(dualStack, headless, nodePort(30080)),
		slices:   oneReady,
		lost:     []api.LostClaim{{Claim: api.Claim{Family: api.IPv6, Protocol: api.TCP, Port: 30080}, Winner: older}},
		want:     "NodePort IPv4:30080/TCP: 10.0.0.1:8080; 10.0.0.1:8080",
		unserved: `NodePort IPv6:30080/TCP: service default/older owns it`,
	}, {
		name:     "a whole address",
		service:  service(mapIP, headless, externalIPs("192.0.2.1")),
		slices:   oneReady,
		lost:     lost("192.0.2.1", 0, 0),
		unserved: "ExternalIP 192.0.2.1: service default/older owns it",
	}})
}

func TestTrafficAndVerdicts(t *testing.T) {
	external := service(externalLocal, externalIPs("192.0.2.1"))
	runFrontendCases(t, []frontendCase{{
		name:    "external policy Local: traffic from this node uses the Cluster list",
		service: external,
		slices: `slice a
			10.0.0.1 ready @here
			10.0.0.2 ready @there`,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080 10.0.0.2:8080; 10.0.0.1:8080 10.0.0.2:8080
			ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080 10.0.0.2:8080`,
	}, {
		name:    "both policies Local: only the short circuit uses the Cluster list",
		service: service(externalLocal, internalLocal, externalIPs("192.0.2.1")),
		slices: `slice a
			10.0.0.1 ready @here
			10.0.0.2 ready @there`,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080 10.0.0.2:8080`,
	}, {
		name:    "internal policy Local only",
		service: service(internalLocal, externalIPs("192.0.2.1")),
		slices: `slice a
			10.0.0.1 ready @here
			10.0.0.2 ready @there`,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.1:8080; 10.0.0.1:8080
			ExternalIP 192.0.2.1:80/TCP: 10.0.0.1:8080 10.0.0.2:8080; 10.0.0.1:8080 10.0.0.2:8080`,
	}, {
		name:    "no usable endpoint anywhere: reject",
		service: external,
		slices: `slice a
			10.0.0.1 terminating @here
			10.0.0.2 serving @there`,
		want: `ClusterIP 10.96.0.1:80/TCP: Reject; Reject
			ExternalIP 192.0.2.1:80/TCP: Reject; Reject`,
	}, {
		name:    "external policy Local, usable endpoints only on other nodes: drop traffic from elsewhere",
		service: external,
		slices: `slice a
			10.0.0.2 ready @there`,
		want: `ClusterIP 10.96.0.1:80/TCP: 10.0.0.2:8080; 10.0.0.2:8080
			ExternalIP 192.0.2.1:80/TCP: Drop; 10.0.0.2:8080`,
	}, {
		name:    "internal policy Local, usable endpoints only on other nodes: drop",
		service: service(internalLocal, externalIPs("192.0.2.1")),
		slices: `slice a
			10.0.0.2 serving terminating @there`,
		want: `ClusterIP 10.96.0.1:80/TCP: Drop; Drop
			ExternalIP 192.0.2.1:80/TCP: 10.0.0.2:8080; 10.0.0.2:8080`,
	}, {
		name:    "the verdict is decided for each port and family separately",
		service: service(dualStack, ports("a=1", "b=2")),
		slices: `slice a a=1
			10.0.0.1 ready
			slice b b=2
			fd00::a ready`,
		want: `ClusterIP 10.96.0.1:1/TCP: 10.0.0.1:1; 10.0.0.1:1
			ClusterIP [fd00::1]:1/TCP: Reject; Reject
			ClusterIP 10.96.0.1:2/TCP: Reject; Reject
			ClusterIP [fd00::1]:2/TCP: [fd00::a]:2; [fd00::a]:2`,
	}})
}

func TestFrontendsShareLists(t *testing.T) {
	view := View(&api.ServiceState{
		Service: service(loadBalancerIPs("203.0.113.1", "203.0.113.2"), nodePort(30080)),
		Slices:  endpointSlices(oneReady),
	}, thisNode)
	var first *Target
	for f := range Frontends(view) {
		for _, traffic := range []Traffic{f.Elsewhere, f.Node} {
			if first == nil {
				first = &traffic.Endpoints[0]
			}
			if &traffic.Endpoints[0] != first {
				t.Errorf("%s has a list of its own", f.FrontendKey)
			}
			if traffic.Endpoints[0].Endpoint != &view.Endpoints[0] {
				t.Errorf("%s has a copy of an endpoint", f.FrontendKey)
			}
		}
	}
}

func TestShortCircuitSharesTheInternalList(t *testing.T) {
	view := View(&api.ServiceState{
		Service: service(externalLocal, externalIPs("192.0.2.1")),
		Slices:  endpointSlices(oneReady),
	}, thisNode)
	all := slices.Collect(Frontends(view))
	if &all[0].Elsewhere.Endpoints[0] != &all[1].Node.Endpoints[0] {
		t.Errorf("%s has a list of its own for this node's traffic", all[1].FrontendKey)
	}
}

func TestFrontendsStop(t *testing.T) {
	view := View(&api.ServiceState{Service: service(dualStack, ports("http=80", "https=443"), nodePort(30080), externalIPs("192.0.2.1", "2001:db8::1"))}, thisNode)
	all := slices.Collect(Frontends(view))
	for n := range all {
		var got []Frontend
		for f := range Frontends(view) {
			if got = append(got, f); len(got) == n+1 {
				break
			}
		}
		if len(got) != n+1 {
			t.Errorf("%d frontends before the loop ended, want %d", len(got), n+1)
		}
	}
}

func TestMasquerade(t *testing.T) {
	kinds := func(edits ...func(*api.Service)) *api.Service {
		return service(append(edits, loadBalancerIPs("203.0.113.1"), externalIPs("192.0.2.1"), nodePort(30080))...)
	}
	for _, c := range []struct {
		name    string
		service *api.Service
		want    map[Kind]Masquerade
	}{{
		"external policy Cluster: all sources",
		kinds(),
		map[Kind]Masquerade{
			ClusterIP: MasqueradeIfConfigured, LoadBalancerIP: MasqueradeAll, ExternalIP: MasqueradeAll, NodePort: MasqueradeAll,
		},
	}, {
		"external policy Local: only the node's own traffic",
		kinds(externalLocal),
		map[Kind]Masquerade{
			ClusterIP: MasqueradeIfConfigured, LoadBalancerIP: MasqueradeNode, ExternalIP: MasqueradeNode, NodePort: MasqueradeNode,
		},
	}, {
		"cluster IPs: only if the backend requests it, with any policy",
		service(internalLocal),
		map[Kind]Masquerade{ClusterIP: MasqueradeIfConfigured},
	}} {
		t.Run(c.name, func(t *testing.T) {
			got := map[Kind]Masquerade{}
			for f := range Frontends(View(&api.ServiceState{Service: c.service}, thisNode)) {
				got[f.Kind] = f.Masquerade
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("masquerade rules differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAffinity(t *testing.T) {
	for _, c := range []struct {
		name     string
		affinity int32
		want     time.Duration
	}{
		{"none", 0, 0},
		{"ClientIP keeps its timeout", 10800, 3 * time.Hour},
	} {
		t.Run(c.name, func(t *testing.T) {
			svc := service(nodePort(30080), func(s *api.Service) { s.AffinitySeconds = c.affinity })
			for f := range Frontends(View(&api.ServiceState{Service: svc}, thisNode)) {
				if f.Affinity != c.want {
					t.Errorf("%s has affinity %v, want %v", f.FrontendKey, f.Affinity, c.want)
				}
			}
		})
	}
}

func TestHealthCheck(t *testing.T) {
	checked := func(edits ...func(*api.Service)) *api.Service {
		return service(append([]func(*api.Service){dualStack, externalLocal, ofType(api.LoadBalancer), func(s *api.Service) {
			s.HealthCheckNodePort = 32000
		}}, edits...)...)
	}
	for _, c := range []struct {
		name    string
		service *api.Service
		want    int32
	}{
		{"a load balancer with policy Local has a port", checked(), 32000},
		{"a load balancer with policy Cluster has none", checked(func(s *api.Service) { s.ExternalTrafficToLocal = false }), 0},
		{"services of other types have none", checked(ofType(api.NodePort)), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := healthport.Of(c.service); got != c.want {
				t.Errorf("the port is %d, want %d", got, c.want)
			}
		})
	}

	for _, c := range []struct {
		name   string
		slices string
		v4, v6 int
	}{{
		"distinct addresses of ready endpoints on this node are counted by family",
		`slice a 8080
			10.0.0.1 ready @here
			10.0.0.2 ready @there
			10.0.0.3 @here
			slice b 9090
			10.0.0.1 ready @here
			slice c 8080
			fd00::a ready @here
			fd00::b ready @here zones=zone-2`,
		1, 2,
	}, {
		"serving and terminating endpoints are not counted",
		`slice a
			10.0.0.1 serving terminating @here`,
		0, 0,
	}} {
		t.Run(c.name, func(t *testing.T) {
			view := View(&api.ServiceState{Service: checked(), Slices: endpointSlices(c.slices)}, thisNode)
			if v4, v6 := healthport.Ready(view, api.IPv4), healthport.Ready(view, api.IPv6); v4 != c.v4 || v6 != c.v6 {
				t.Errorf("ready are %d IPv4, %d IPv6, want %d and %d", v4, v6, c.v4, c.v6)
			}
		})
	}
}

func TestFrontendKeyString(t *testing.T) {
	addr := netip.MustParseAddr
	for want, k := range map[string]FrontendKey{
		"ClusterIP 10.96.0.10:53/UDP":       {ClusterIP, addr("10.96.0.10"), api.IPv4, api.UDP, 53},
		"ExternalIP [2001:db8::1]:80/TCP":   {ExternalIP, addr("2001:db8::1"), api.IPv6, api.TCP, 80},
		"NodePort IPv6:30053/SCTP":          {NodePort, netip.Addr{}, api.IPv6, api.SCTP, 30053},
		"ExternalIP 2001:db8::1":            {ExternalIP, addr("2001:db8::1"), api.IPv6, 0, 0},
		"LoadBalancerIP 192.0.2.1:8443/TCP": {LoadBalancerIP, addr("192.0.2.1"), api.IPv4, api.TCP, 8443},
	} {
		if got := k.String(); got != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
	}
}

func TestNilViewHasNoFrontends(t *testing.T) {
	if got := describeFrontends(nil); len(got) > 0 {
		t.Errorf("frontends of a nil view: %v", got)
	}
	if got := describeUnserved(nil); len(got) > 0 {
		t.Errorf("unserved frontends of a nil view: %v", got)
	}
}
