// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

func TestNoView(t *testing.T) {
	for _, c := range []struct {
		name  string
		state *api.ServiceState
	}{
		{"slices without a service", &api.ServiceState{Slices: endpointSlices("slice a\n10.0.0.1 ready")}},
		{"an ExternalName service", &api.ServiceState{Service: service(ofType(api.ExternalName))}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := View(c.state, thisNode); got != nil {
				t.Errorf("View returned %v, want none", got)
			}
		})
	}
}

func TestPorts(t *testing.T) {
	runViewCases(t, []viewCase{{
		name:    "a service port is served by the slice port of the same name",
		service: service(ports("http=80")),
		slices: `slice a https=8443 http=8080
			10.0.0.1 ready`,
		want: "10.0.0.1#http=8080 internal external",
	}, {
		name:    "a service port is served by the slice port of the same protocol",
		service: service(ports("dns=53/UDP")),
		slices: `slice a dns=1053/TCP dns=2053/UDP
			10.0.0.1 ready`,
		want: "10.0.0.1#dns=2053 internal external",
	}, {
		name:    "a port name may have different numbers in different slices",
		service: service(ports("http=80→web")),
		slices: `slice a http=8080
			10.0.0.1 ready
			slice b http=9090
			10.0.0.2 ready`,
		want: `10.0.0.1#http=8080 internal external
			10.0.0.2#http=9090 internal external`,
	}, {
		name:    "a slice port without a number serves no port",
		service: service(ports("http=80")),
		slices: `slice a http=0
			10.0.0.1 ready`,
		want: "unusable 80/TCP IPv4",
	}, {
		name:    "an endpoint that serves no port of the service is not in the view",
		service: service(ports("http=80")),
		slices: `slice a metrics=9100
			10.0.0.1 ready
			slice b http=8080
			10.0.0.2 ready`,
		want: "10.0.0.2#http=8080 internal external",
	}, {
		name:    "TCP and UDP ports with the same number are independent",
		service: service(ports("tcp=53", "udp=53/UDP")),
		slices: `slice a tcp=53
			10.0.0.1 ready
			slice b udp=53/UDP
			10.0.0.2 serving terminating`,
		want: `10.0.0.1#tcp=53 internal external (53/TCP internal external)
			10.0.0.2#udp=53 internal external (53/UDP internal external)`,
	}, {
		name:    "a port of unknown protocol is not served",
		service: service(func(s *api.Service) { s.Ports[0].Protocol = api.UnknownProtocol }),
		slices: `slice a
			10.0.0.1 ready`,
		want: "",
	}, {
		name:    "a port without a number is not served",
		service: service(func(s *api.Service) { s.Ports[0].Port = 0 }),
		slices: `slice a
			10.0.0.1 ready`,
		want: "",
	}, {
		name:    "if two ports have the same identity, the first one counts",
		service: service(ports("a=80", "b=80", "a=81")),
		slices: `slice a a=1 b=2
			10.0.0.1 ready`,
		want: "10.0.0.1#a=1 internal external",
	}, {
		name:    "an all-ports service ignores ports",
		service: service(mapIP, ports("http=80")),
		slices: `slice a other=1
			10.0.0.1 ready
			slice b other=0
			10.0.0.2 ready`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}, {
		name:    "an all-ports service may have no endpoints",
		service: service(mapIP),
		want:    "unusable 0/Protocol(0) IPv4",
	}, {
		name:    "a service without ports lists its addresses",
		service: service(headless, ports()),
		slices: `slice a other=1
			10.0.0.1 ready`,
		want: "10.0.0.1 internal external",
	}})
}

func TestPortOverrides(t *testing.T) {
	runViewCases(t, []viewCase{{
		name:    "every named port has an override",
		service: service(ports("a=1→8080", "b=2→8081")),
		slices: `slice a a=8080 b=9000
			10.0.0.1 ready`,
		want: "10.0.0.1#a=8080,b=9000 internal external",
	}, {
		name:    "an unnamed port with a named targetPort has an override of that name",
		service: service(ports("80→web")),
		slices: `slice a 8080
			10.0.0.1 ready`,
		want: "10.0.0.1#web=8080 internal external",
	}, {
		name:    "an unnamed port with a numeric targetPort has an override only if the number differs",
		service: service(ports("80→8080")),
		slices: `slice a 8080
			10.0.0.1 ready
			slice b 9090
			10.0.0.2 ready`,
		want: `10.0.0.1 internal external
			10.0.0.2#9090 internal external`,
	}})
}

func TestConditions(t *testing.T) {
	runViewCases(t, []viewCase{{
		name: "a ready endpoint is listed",
		slices: `slice a
			10.0.0.1 ready`,
		want: "10.0.0.1 internal external",
	}, {
		name: "an endpoint that is ready and terminating counts as ready",
		slices: `slice a
			10.0.0.1 ready terminating
			10.0.0.2 ready`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}, {
		name: "a ready endpoint that does not serve counts as ready",
		slices: `slice a
			10.0.0.1 ready unserving`,
		want: "10.0.0.1 internal external",
	}, {
		name: "an endpoint that serves and is not ready is not listed",
		slices: `slice a
			10.0.0.1 serving`,
		want: `draining 10.0.0.1
			unusable 80/TCP IPv4`,
	}, {
		name: "an endpoint that terminates without serving is not listed",
		slices: `slice a
			10.0.0.1 terminating`,
		want: "unusable 80/TCP IPv4",
	}})
}

func TestDuplicates(t *testing.T) {
	runViewCases(t, []viewCase{{
		name: "the same address and port in two slices is one endpoint",
		slices: `slice a
			10.0.0.1 ready
			slice b
			10.0.0.1 ready`,
		want: "10.0.0.1 internal external",
	}, {
		name: "a ready entry is preferred",
		slices: `slice a
			10.0.0.1 serving @here
			slice b
			10.0.0.1 ready terminating @there`,
		want: "10.0.0.1 internal external",
	}, {
		name: "then an entry that is not terminating",
		slices: `slice a
			10.0.0.1 ready terminating @here
			slice b
			10.0.0.1 ready unserving @there`,
		want: "10.0.0.1 internal external",
	}, {
		name: "then a serving entry",
		slices: `slice a
			10.0.0.1 terminating
			slice b
			10.0.0.1 serving terminating`,
		want: "10.0.0.1 internal external",
	}, {
		name: "then the entry of the smaller slice name",
		slices: `slice b
			10.0.0.1 ready @there
			slice a
			10.0.0.1 ready @here`,
		want: "10.0.0.1 local internal external",
	}, {
		name: "an entry that is not terminating is preferred to a usable one that is",
		slices: `slice a
			10.0.0.1 serving terminating
			slice b
			10.0.0.1 serving`,
		want: `draining 10.0.0.1
			unusable 80/TCP IPv4`,
	}, {
		name: "an endpoint twice in one slice is one endpoint, in any order",
		slices: `slice a
			10.0.0.1 ready @there
			10.0.0.1 ready @here
			10.0.0.2 ready host=b
			10.0.0.2 ready host=a
			10.0.0.3 ready zone=b
			10.0.0.3 ready zone=a`,
		want: `10.0.0.1 local internal external
			10.0.0.2 internal external
			10.0.0.3 internal external`,
	}, {
		name: "an endpoint twice in one slice with different zone hints, in any order",
		slices: `slice a
			10.0.0.1 ready zones=zone-2
			10.0.0.1 ready zones=zone-1
			10.0.0.2 ready zones=zone-2`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "an endpoint twice in one slice with different node hints, in any order",
		slices: `slice a
			10.0.0.1 ready nodes=there
			10.0.0.1 ready nodes=here
			10.0.0.2 ready nodes=there`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name:    "an address with two port numbers is two endpoints",
		service: service(ports("http=80→web")),
		slices: `slice a http=8080
			10.0.0.1 ready
			slice b http=9090
			10.0.0.1 ready`,
		want: `10.0.0.1#http=8080 internal external
			10.0.0.1#http=9090 internal external`,
	}, {
		name:    "with more ports in one slice, each port is decided separately: the same slice preferred",
		service: service(ports("http=80", "https=443")),
		slices: `slice a http=8080 https=8443
			10.0.0.1 ready
			slice b http=8080
			10.0.0.1 ready`,
		want: "10.0.0.1#http=8080,https=8443 internal external",
	}, {
		name:    "with more ports in one slice, each port is decided separately: the other slice preferred",
		service: service(ports("http=80", "https=443")),
		slices: `slice a http=8080 https=8443
			10.0.0.1 serving terminating
			slice b http=8080
			10.0.0.1 ready`,
		want: `10.0.0.1#http=8080 internal external (80/TCP internal external)
			10.0.0.1#http=8080,https=8443 internal external (443/TCP internal external)`,
	}, {
		name:    "an all-ports service lists each address once",
		service: service(mapIP),
		slices: `slice a 1
			10.0.0.1 ready
			slice b 2
			10.0.0.1 ready`,
		want: "10.0.0.1 internal external",
	}, {
		name: "a duplicate does not count for topology",
		slices: `slice a
			10.0.0.1 ready zones=zone-1
			slice b
			10.0.0.1 ready
			10.0.0.2 ready zones=zone-2`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}})
}

func TestClusterList(t *testing.T) {
	runViewCases(t, []viewCase{{
		name: "the ready endpoints on all nodes",
		slices: `slice a
			10.0.0.1 ready @here
			10.0.0.2 ready @there
			10.0.0.3 ready`,
		want: `10.0.0.1 local internal external
			10.0.0.2 internal external
			10.0.0.3 internal external`,
	}, {
		name: "if none is ready, the serving and terminating endpoints",
		slices: `slice a
			10.0.0.1 serving terminating
			10.0.0.2
			10.0.0.3 terminating
			10.0.0.4 serving`,
		want: `10.0.0.1 internal external
			draining 10.0.0.4`,
	}, {
		name: "if one is ready, no terminating endpoint",
		slices: `slice a
			10.0.0.1 serving terminating
			10.0.0.2 ready`,
		want: `10.0.0.2 internal external
			draining 10.0.0.1`,
	}, {
		name:    "the fallback is decided for each port",
		service: service(ports("http=80", "https=443")),
		slices: `slice a http=1 https=2
			10.0.0.1 serving terminating
			slice b http=1
			10.0.0.2 ready`,
		want: `10.0.0.1#http=1,https=2 internal external (443/TCP internal external)
			10.0.0.2#http=1 internal external (80/TCP internal external)`,
	}, {
		name:    "an endpoint may be on the lists of some ports",
		service: service(ports("c=3", "b=2", "a=1")),
		slices: `slice a a=1 b=1 c=1
			10.0.0.1 ready zones=zone-2
			slice b b=1
			10.0.0.2 ready zones=zone-1`,
		want: `10.0.0.1#c=1,b=1,a=1 internal external (3/TCP internal external) (1/TCP internal external)
			10.0.0.2#b=1 internal external (2/TCP internal external)`,
	}, {
		name:    "short-circuited traffic uses an endpoint that serves only the first port",
		service: service(externalLocal, externalIPs("192.0.2.1"), ports("http=80", "https=443")),
		slices: `slice a http=1
			10.0.0.1 ready @there
			slice b https=1
			10.0.0.2 ready @there`,
		want: `10.0.0.1#http=1 internal cluster (80/TCP internal cluster)
			10.0.0.2#https=1 internal cluster (443/TCP internal cluster)`,
	}, {
		name:    "the fallback is decided for each family",
		service: service(dualStack),
		slices: `slice a
			10.0.0.1 ready
			slice b
			fd00::a serving terminating`,
		want: `10.0.0.1 internal external
			fd00::a internal external`,
	}, {
		name: "the fallback ignores topology",
		slices: `slice a
			10.0.0.1 serving terminating zones=zone-1
			10.0.0.2 serving terminating zones=zone-2`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}})
}

func TestLocalList(t *testing.T) {
	local := service(internalLocal)
	runViewCases(t, []viewCase{{
		name:    "the ready endpoints on this node",
		service: local,
		slices: `slice a
			10.0.0.1 ready @here
			10.0.0.2 ready @there
			10.0.0.3 ready`,
		want: `10.0.0.1 local internal external
			10.0.0.2 external
			10.0.0.3 external`,
	}, {
		name:    "if none on this node is ready, its serving and terminating endpoints",
		service: local,
		slices: `slice a
			10.0.0.1 serving terminating @here
			10.0.0.2 ready @there
			10.0.0.3 terminating @here`,
		want: `10.0.0.1 local internal
			10.0.0.2 external`,
	}, {
		name:    "if one on this node is ready, no terminating endpoint",
		service: local,
		slices: `slice a
			10.0.0.1 serving terminating @here
			10.0.0.2 ready @here`,
		want: `10.0.0.2 local internal external
			draining 10.0.0.1`,
	}, {
		name:    "topology has no effect",
		service: local,
		slices: `slice a
			10.0.0.1 ready @here zones=zone-2
			10.0.0.2 ready @there zones=zone-1`,
		want: `10.0.0.1 local internal
			10.0.0.2 external`,
	}, {
		name:    "without a node name no endpoint is local",
		service: local,
		node:    &api.Node{},
		slices: `slice a
			10.0.0.1 ready`,
		want: "10.0.0.1 external",
	}})

	s := &api.ServiceState{Service: local, Slices: endpointSlices("slice a\n10.0.0.1 ready")}
	if diff := cmp.Diff([]string{"10.0.0.1 external"}, describe(View(s, nil))); diff != "" {
		t.Errorf("without a node, the view differs (-want +got):\n%s", diff)
	}
}

func TestTopology(t *testing.T) {
	noZone := &api.Node{Name: "here"}
	runViewCases(t, []viewCase{{
		name: "node hints for this node select endpoints",
		slices: `slice a
			10.0.0.1 ready nodes=here,there
			10.0.0.2 ready nodes=there`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "node hints take precedence over zone hints",
		slices: `slice a
			10.0.0.1 ready nodes=here zones=zone-2
			10.0.0.2 ready nodes=there zones=zone-1`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "node hints that are not on every ready endpoint are ignored",
		slices: `slice a
			10.0.0.1 ready nodes=here
			10.0.0.2 ready`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}, {
		name: "zone hints apply if all node hints are for other nodes",
		slices: `slice a
			10.0.0.1 ready nodes=there zones=zone-1
			10.0.0.2 ready nodes=there zones=zone-2`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "zone hints for this zone select endpoints",
		slices: `slice a
			10.0.0.1 ready zones=zone-1,zone-2
			10.0.0.2 ready zones=zone-2`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "zone hints that are not on every ready endpoint are ignored",
		slices: `slice a
			10.0.0.1 ready zones=zone-2
			10.0.0.2 ready
			10.0.0.3 ready zones=zone-1`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external
			10.0.0.3 internal external`,
	}, {
		name: "zone hints are ignored if all are for other zones",
		slices: `slice a
			10.0.0.1 ready zones=zone-2
			10.0.0.2 ready zones=zone-3`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}, {
		name: "hints of endpoints that are not ready do not matter",
		slices: `slice a
			10.0.0.1 ready zones=zone-1
			10.0.0.2 serving terminating
			10.0.0.3`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "a node without a zone matches no zone",
		node: noZone,
		slices: `slice a
			10.0.0.1 ready zones=
			10.0.0.2 ready zones=zone-1`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}, {
		name: "a node without a name matches no node",
		node: &api.Node{},
		slices: `slice a
			10.0.0.1 ready nodes=
			10.0.0.2 ready nodes=there`,
		want: `10.0.0.1 internal external
			10.0.0.2 internal external`,
	}, {
		name:    "hints are decided for each port",
		service: service(ports("http=80", "https=443")),
		slices: `slice a http=1 https=2
			10.0.0.1 ready zones=zone-1
			10.0.0.2 ready zones=zone-2
			slice b https=2
			10.0.0.3 ready`,
		want: `10.0.0.1#http=1,https=2 internal external
			10.0.0.2#http=1,https=2 internal external (443/TCP internal external)
			10.0.0.3#https=2 internal external (443/TCP internal external)`,
	}, {
		name:    "hints are decided for each family",
		service: service(dualStack),
		slices: `slice a
			10.0.0.1 ready zones=zone-1
			10.0.0.2 ready zones=zone-2
			slice b
			fd00::a ready
			fd00::b ready zones=zone-1`,
		want: `10.0.0.1 internal external
			fd00::a internal external
			fd00::b internal external
			draining 10.0.0.2`,
	}})
}

func TestPolicies(t *testing.T) {
	const twoNodes = `slice a
		10.0.0.1 ready @here
		10.0.0.2 ready @there`
	everywhere := `10.0.0.1 local internal external
		10.0.0.2 internal external`
	localOutside := `10.0.0.1 local internal external cluster
		10.0.0.2 internal cluster`
	runViewCases(t, []viewCase{{
		name:   "policy Cluster uses the Cluster list",
		slices: twoNodes,
		want:   everywhere,
	}, {
		name:    "internalTrafficPolicy Local uses the Local list",
		service: service(internalLocal),
		slices:  twoNodes,
		want: `10.0.0.1 local internal external
			10.0.0.2 external`,
	}, {
		name:    "externalTrafficPolicy Local applies to NodePort services",
		service: service(externalLocal, ofType(api.NodePort)),
		slices:  twoNodes,
		want:    localOutside,
	}, {
		name:    "externalTrafficPolicy Local applies to LoadBalancer services",
		service: service(externalLocal, ofType(api.LoadBalancer)),
		slices:  twoNodes,
		want:    localOutside,
	}, {
		name:    "externalTrafficPolicy Local applies to ClusterIP services with external IPs",
		service: service(externalLocal, externalIPs("192.0.2.1")),
		slices:  twoNodes,
		want:    localOutside,
	}, {
		name:    "externalTrafficPolicy Local applies to headless services with external IPs",
		service: service(externalLocal, headless, externalIPs("192.0.2.1")),
		slices:  twoNodes,
		want:    localOutside,
	}, {
		name:    "for other services externalTrafficPolicy is Cluster",
		service: service(externalLocal),
		slices:  twoNodes,
		want:    everywhere,
	}, {
		name:    "the short circuit follows topology",
		service: service(externalLocal, internalLocal, ofType(api.NodePort)),
		slices: `slice a
			10.0.0.1 ready @here zones=zone-2
			10.0.0.2 ready @there zones=zone-1
			10.0.0.3 ready @there zones=zone-2`,
		want: `10.0.0.1 local internal external
			10.0.0.2 cluster
			draining 10.0.0.3`,
	}, {
		name:    "a terminating endpoint on this node and a ready one on another node",
		service: service(externalLocal, ofType(api.NodePort)),
		slices: `slice a
			10.0.0.1 serving terminating @here
			10.0.0.2 ready @there`,
		want: `10.0.0.1 local external
			10.0.0.2 internal cluster`,
	}})
}

func TestDraining(t *testing.T) {
	runViewCases(t, []viewCase{{
		name:    "ready, but excluded by policy and topology",
		service: service(internalLocal, externalLocal, externalIPs("192.0.2.1"), headless),
		slices: `slice a
			10.0.0.1 ready @here zones=zone-1
			10.0.0.2 ready @there zones=zone-2`,
		want: `10.0.0.1 local internal external cluster
			draining 10.0.0.2`,
	}, {
		name: "ready and not serving, but not hinted for this zone",
		slices: `slice a
			10.0.0.1 ready zones=zone-1
			10.0.0.2 ready unserving zones=zone-2`,
		want: `10.0.0.1 internal external
			draining 10.0.0.2`,
	}, {
		name: "serving and terminating while others are ready",
		slices: `slice a
			10.0.0.1 serving terminating
			10.0.0.2 ready`,
		want: `10.0.0.2 internal external
			draining 10.0.0.1`,
	}, {
		name: "an endpoint that does not serve is not draining",
		slices: `slice a
			10.0.0.1
			10.0.0.2 ready`,
		want: "10.0.0.2 internal external",
	}})
}

func TestUnusable(t *testing.T) {
	runViewCases(t, []viewCase{{
		name:    "each port and family without an endpoint",
		service: service(dualStack, ports("a=1", "b=2/UDP")),
		slices: `slice a a=1
			10.0.0.1 ready
			slice b b=2/UDP
			fd00::a serving
			fd00::b terminating`,
		want: `10.0.0.1#a=1 internal external (1/TCP internal external)
			draining fd00::a#b=2
			unusable 1/TCP IPv6
			unusable 2/UDP IPv4
			unusable 2/UDP IPv6`,
	}, {
		name:    "an endpoint on another node is usable",
		service: service(internalLocal, externalLocal, ofType(api.NodePort)),
		slices: `slice a
			10.0.0.1 ready @there`,
		want: "10.0.0.1 cluster",
	}, {
		name: "serving and terminating is usable",
		slices: `slice a
			10.0.0.1 serving terminating`,
		want: "10.0.0.1 internal external",
	}})
}

func TestFamilies(t *testing.T) {
	const both = `slice a
		10.0.0.1 ready
		slice b
		fd00::a ready`
	runViewCases(t, []viewCase{{
		name:   "endpoints of a family that the service does not have are omitted",
		slices: both,
		want:   "10.0.0.1 internal external",
	}, {
		name:    "ipFamilies determines the families",
		service: service(func(s *api.Service) { s.IPFamilies = []api.Family{api.IPv6} }),
		slices:  both,
		want:    "fd00::a internal external",
	}, {
		name:    "without ipFamilies, the cluster IPs determine the families",
		service: service(dualStack, externalIPs("192.0.2.1"), func(s *api.Service) { s.IPFamilies = nil }),
		slices:  both,
		want: `10.0.0.1 internal external
			fd00::a internal external`,
	}, {
		name:    "without either, a headless service has the families of its external IPs",
		service: service(headless, externalIPs("2001:db8::1"), func(s *api.Service) { s.IPFamilies = nil }),
		slices:  both,
		want:    "fd00::a internal external",
	}, {
		name: "without either, a service that is not headless has none",
		service: service(externalIPs("192.0.2.1"), func(s *api.Service) {
			s.IPFamilies, s.IPs.ClusterIPs = nil, api.IPSet{}
		}),
		slices: both,
		want:   "",
	}})
}

// A feed computes many views. So View should allocate only the view, its endpoints, and
// the addresses and ports of the endpoints.
func TestViewAllocatesOnlyItsResult(t *testing.T) {
	s := benchState(10)
	if got := testing.AllocsPerRun(100, func() { View(s, thisNode) }); got > 4 {
		t.Errorf("View allocated %v times, want 4", got)
	}
}

// TestManyEndpoints has many endpoints, ports and lost claims. With so many, View does
// not use linear searches, and its buffers are too small.
func TestManyEndpoints(t *testing.T) {
	const endpoints, ports = 40, 80
	state := manyPorts(ports, endpoints)
	slices.Reverse(state.Service.Ports) // the result must not depend on the order of the ports
	view := View(state, nil)
	if len(view.Endpoints) != endpoints || view.Draining != nil {
		t.Errorf("%d endpoints, draining %v", len(view.Endpoints), view.Draining)
	}
	n := 0
	for f := range Frontends(view) {
		want := endpoints / 2 // ports with even numbers are in one EndpointSlice
		if f.ServicePort.Port%2 == 1 {
			want = endpoints
		}
		if n++; len(f.Elsewhere.Endpoints) != want {
			t.Errorf("%s has %d endpoints, want %d", f.FrontendKey, len(f.Elsewhere.Endpoints), want)
		}
		for _, e := range f.Elsewhere.Endpoints {
			if e.Port != f.ServicePort.Port {
				t.Errorf("%s has port %d", f.FrontendKey, e.Port)
			}
		}
	}
	if want := ports/2 + ports; n != want {
		t.Errorf("%d frontends, want %d", n, want)
	}
	lost := describeUnserved(view)
	if len(lost) != ports/2 || lost[0] != "ClusterIP 10.96.0.1:79/TCP: service /older owns it" {
		t.Errorf("%d lost frontends, want %d: %s", len(lost), ports/2, lost)
	}
	none := View(&api.ServiceState{Service: service(), Slices: endpointSlices("slice a\n10.0.0.1 serving")}, nil)
	if none.Endpoints != nil || len(none.Draining) != 1 {
		t.Errorf("endpoints %v, want none; draining %v", none.Endpoints, none.Draining)
	}
}

// TestDuplicatesOfDifferentPods checks that the order of two entries for one address does not
// matter if they differ only in their pods.
func TestDuplicatesOfDifferentPods(t *testing.T) {
	state := &api.ServiceState{Service: service(), Slices: endpointSlices("slice a\n10.0.0.1 ready\n10.0.0.1 ready")}
	for i, name := range []string{"pod-2", "pod-1"} {
		state.Slices[0].Endpoints[i].Details.Target = &types.NamespacedName{Namespace: "default", Name: name}
	}
	for range 2 {
		if got := View(state, nil).Endpoints[0].Target; got.Name != "pod-1" {
			t.Errorf("the endpoint is %s, want pod-1", got)
		}
		slices.Reverse(state.Slices[0].Endpoints)
	}
}

func TestViewCarriesWhatBackendsNeed(t *testing.T) {
	s := &api.ServiceState{
		Service: service(),
		Slices:  endpointSlices("slice a\n10.0.0.1 serving terminating @here"),
		Lost:    []api.LostClaim{{Claim: api.Claim{Port: 80}, Winner: types.NamespacedName{Name: "older"}}},
	}
	s.Slices[0].Endpoints[0].Details.Hostname = "web-0"
	s.Slices[0].Endpoints[0].Details.Zone = "zone-2"
	want := &api.View{
		Service: s.Service,
		Endpoints: []api.Endpoint{{
			Hostname: "web-0", Addr: ips("10.0.0.1").Family(api.IPv4)[0], Local: true, Scopes: api.Scopes{Internal: true, External: true},
			NodeName: "here", Zone: "zone-2", Conditions: api.Conditions{Serving: true, Terminating: true},
		}},
		Lost: s.Lost,
	}
	got := View(s, thisNode)
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b *api.Service) bool { return a == b }), cmp.Comparer(sameEndpoint)); diff != "" {
		t.Errorf("view differs (-want +got):\n%s", diff)
	}
}

func sameEndpoint(a, b api.Endpoint) bool { return a.Equal(&b) }

func TestScopesOf(t *testing.T) {
	tcp, udp := &api.PortMapping{Protocol: api.TCP, Port: 53}, &api.PortMapping{Protocol: api.UDP, Port: 53}
	flat := api.Endpoint{Scopes: api.Scopes{Internal: true}}
	uneven := api.Endpoint{
		Scopes:     api.Scopes{Internal: true, External: true},
		PortScopes: []api.PortScopes{{Protocol: api.TCP, Port: 53, Scopes: api.Scopes{Internal: true}}},
	}
	for _, c := range []struct {
		name     string
		endpoint api.Endpoint
		port     *api.PortMapping
		want     api.Scopes
	}{
		{"the same for all ports", flat, udp, api.Scopes{Internal: true}},
		{"by port", uneven, tcp, api.Scopes{Internal: true}},
		{"on no list for this port", uneven, udp, api.Scopes{}},
		{"all ports", flat, nil, api.Scopes{Internal: true}},
		{"all ports, though lists differ", uneven, nil, uneven.Scopes},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := scopesOf(&c.endpoint, c.port); got != c.want {
				t.Errorf("scopesOf = %+v, want %+v", got, c.want)
			}
		})
	}
}
