// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/utils/ptr"
)

func external(s *api.Service) {
	s.Type = api.LoadBalancer
	s.IPs.ExternalIPs = addrs("198.51.100.1")
	s.IPs.LoadBalancerIPs = addrs("203.0.113.1")
	s.Ports[0].NodePort = 30080
}

func externalLocal(s *api.Service) { external(s); s.ExternalTrafficToLocal = true }
func internalLocal(s *api.Service) { s.InternalTrafficToLocal = true }
func affine(s *api.Service) {
	s.AffinitySeconds = 10800
}
func preserving(s *api.Service) {
	external(s)
	s.Annotations = map[string]string{"preserve-destination": "true"}
}

func dualStack(s *api.Service) {
	s.IPs.ClusterIPs = addrs("10.96.0.1", "fd00:96::1")
	s.IPFamilies = []api.Family{api.IPv4, api.IPv6}
	s.Ports[0].NodePort = 30080
	s.Type = api.NodePort
}

func without(change func(*hns.Features)) hns.Features {
	f := fakehns.AllFeatures()
	change(&f)
	return f
}

func TestEachFrontendHasLoadBalancer(t *testing.T) {
	all := fakehns.AllFeatures()
	overlay := hns.Network{Overlay: true, RemoteSubnets: []hns.RemoteSubnet{
		{Prefix: netip.MustParsePrefix("10.1.2.0/24"), Provider: addr("192.168.0.2")},
	}}
	sourceVIP := kernelspace.Options{SourceVIPs: []netip.Addr{addr("10.1.1.250")}, HostMAC: "00-15-5d-00-00-99"}
	for _, tc := range []struct {
		name     string
		features *hns.Features
		network  hns.Network
		opts     kernelspace.Options
		named    []string // additional endpoints on this node, such as "cbr0=10.1.1.2": the name and address
		pods     []string // addresses of the pods of this node
		view     *api.View
		want     string
		remotes  []string
		fails    string
		// everyQuirk also runs the case with each quirk of the fake HNS alone.
		everyQuirk bool
	}{{
		name: "a cluster IP uses pods on all nodes",
		pods: []string{"10.1.1.1"}, view: view(service("web"), "10.1.1.1@here", "10.1.2.1"),
		want:    "10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1 10.1.2.1",
		remotes: []string{"10.1.2.1"},
	}, {
		name: "a cluster IP has direct server return on request",
		opts: kernelspace.Options{EnableDSR: true}, view: view(service("web"), "10.1.2.1"),
		want:    "10.96.0.1 DSR protocol 6 port 80->8080 to 10.1.2.1",
		remotes: []string{"10.1.2.1"},
	}, {
		name:     "direct server return is omitted if Windows lacks it",
		features: ptr.To(without(func(f *hns.Features) { f.DSR = false })),
		pods:     []string{"10.1.1.1"}, view: view(service("web", externalLocal), "10.1.1.1@here"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1
			198.51.100.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1
			203.0.113.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1
			node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1`,
	}, {
		name: "a cluster IP with internal policy Local uses pods on this node",
		pods: []string{"10.1.1.1"}, view: view(service("web", internalLocal), "10.1.1.1@here", "10.1.2.1"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1",
	}, {
		name: "with internal policy Local and no pod on this node there is no load balancer",
		view: view(service("web", internalLocal), "10.1.2.1"),
	}, {
		name: "external frontends with policy Cluster use pods on all nodes", everyQuirk: true,
		pods: []string{"10.1.1.1"}, view: view(service("web", external), "10.1.1.1@here", "10.1.2.1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1 10.1.2.1
			198.51.100.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1 10.1.2.1
			203.0.113.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1 10.1.2.1
			node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1 10.1.2.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "external frontends with policy Local use pods on this node, with direct server return",
		pods: []string{"10.1.1.1"}, view: view(service("web", externalLocal), "10.1.1.1@here", "10.1.2.1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1 10.1.2.1
			198.51.100.1 DSR protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1
			203.0.113.1 DSR protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1
			node port DSR protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "with preserve-destination the ingress address and the node port use pods on this node", everyQuirk: true,
		pods: []string{"10.1.1.1"}, view: view(service("web", preserving), "10.1.1.1@here", "10.1.2.1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1 10.1.2.1
			198.51.100.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1 10.1.2.1
			203.0.113.1 DSR protocol 6 port 80->8080 UseMux PreserveDIP VIPExternalIP to 10.1.1.1
			node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "session affinity distributes by client", everyQuirk: true,
		view: view(service("web", affine), "10.1.2.1"),
		want: "10.96.0.1 protocol 6 port 80->8080 per client to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}, {
		name:     "session affinity is omitted if Windows lacks it",
		features: ptr.To(without(func(f *hns.Features) { f.SessionAffinity = false })),
		view:     view(service("web", affine), "10.1.2.1"),
		want:     "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}, {
		name: "a dual-stack service has load balancers of both families",
		pods: []string{"10.1.1.1"}, view: view(service("web", dualStack), "10.1.1.1@here", "fd00:1::1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1
			fd00:96::1 IPv6 protocol 6 port 80->8080 to fd00:1::1
			node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1
			node port IPv6 protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to fd00:1::1`,
		remotes: []string{"fd00:1::1"},
	}, {
		name:     "IPv6 is not served if Windows lacks it",
		features: ptr.To(without(func(f *hns.Features) { f.DualStack = false })),
		pods:     []string{"10.1.1.1"}, view: view(service("web", dualStack), "10.1.1.1@here", "fd00:1::1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1
			node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1`,
	}, {
		name: "UDP and TCP with the same port are two load balancers, and SCTP has none",
		view: view(service("dns", func(s *api.Service) {
			s.Ports = []api.PortMapping{
				{Name: "udp", Protocol: api.UDP, Port: 53, TargetPort: 5353}, {Name: "tcp", Protocol: api.TCP, Port: 53, TargetPort: 5353},
				{Name: "sctp", Protocol: api.SCTP, Port: 53, TargetPort: 5353},
			}
		}), "10.1.2.1"),
		want: `10.96.0.1 protocol 17 port 53->5353 to 10.1.2.1
			10.96.0.1 protocol 6 port 53->5353 to 10.1.2.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "terminating endpoints are used if none is ready",
		view: view(service("web"), "10.1.2.1@other-node~draining", "10.1.2.2@other-node~draining"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1 10.1.2.2", remotes: []string{"10.1.2.1", "10.1.2.2"},
	}, {
		name: "terminating endpoints are not used while one is ready",
		view: view(service("web"), "10.1.2.1@other-node~draining", "10.1.2.2"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.2", remotes: []string{"10.1.2.2"},
	}, {
		name: "topology hints apply",
		view: viewWithHints("zone-a", "zone-b"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}, {
		name: "a load-balancer address with source ranges is not served",
		view: view(service("web", func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs = addrs("203.0.113.1")
			s.SourceRanges = []api.SourceRanges{{TargetIPs: addrs("203.0.113.1"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
		}), "10.1.2.1"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}, {
		name: "with source ranges of all frontends, only addresses without ranges are served", everyQuirk: true,
		view: view(service("web", external, func(s *api.Service) {
			s.SourceRanges = []api.SourceRanges{{
				TargetIPs: addrs("198.51.100.1", "203.0.113.1"), NodePorts: true,
				Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			}}
		}), "10.1.2.1"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}, {
		name: "with source ranges without a prefix, node ports are not served",
		view: view(service("web", external, func(s *api.Service) {
			s.SourceRanges = []api.SourceRanges{{NodePorts: true}}
		}), "10.1.2.1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
			198.51.100.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.2.1
			203.0.113.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.2.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "an all-ports service is not served",
		view: view(service("web", func(s *api.Service) { s.AllPorts = true; s.IPs.ExternalIPs = addrs("198.51.100.1") }), "10.1.2.1"),
	}, {
		name: "a pod in this node's host network gets no endpoint, which would take the address from the node",
		view: view(service("web"), "192.168.0.1@here", "10.1.2.1"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}, {
		name: "a service whose pods are all in this node's host network has no load balancer",
		view: view(service("web"), "192.168.0.1@here"),
	}, {
		name: "a pod in this node's host network is served if HNS has an endpoint for the node's address",
		pods: []string{"192.168.0.1"}, view: view(service("web"), "192.168.0.1@here"),
		want: "10.96.0.1 protocol 6 port 80->8080 to 192.168.0.1",
	}, {
		name: "health checks at a load-balancer address are forwarded on request",
		opts: kernelspace.Options{RootEndpoint: "cbr0", HealthzPort: 10256}, named: []string{"cbr0=10.1.1.2"},
		view: view(service("web", external), "10.1.2.1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
			198.51.100.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.2.1
			203.0.113.1 protocol 6 port 10256->10256 to 10.1.1.2
			203.0.113.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.2.1
			node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.2.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "health checks go to the health-check node port of a service that has one",
		opts: kernelspace.Options{RootEndpoint: "root"}, named: []string{"root=10.1.1.2"},
		view: view(service("web", preserving, func(s *api.Service) { s.ExternalTrafficToLocal, s.HealthCheckNodePort = true, 31999 }), "10.1.1.1@here"),
		pods: []string{"10.1.1.1"},
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1
			198.51.100.1 DSR protocol 6 port 80->8080 VIPExternalIP to 10.1.1.1
			203.0.113.1 DSR protocol 6 port 80->8080 UseMux PreserveDIP VIPExternalIP to 10.1.1.1
			203.0.113.1 protocol 6 port 31999->31999 UseMux PreserveDIP to 10.1.1.2
			node port DSR protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.1.1`,
	}, {
		name: "health checks are not forwarded while all endpoints terminate",
		opts: kernelspace.Options{RootEndpoint: "cbr0", HealthzPort: 10256}, named: []string{"cbr0=10.1.1.2"},
		view: view(service("web", func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs = addrs("203.0.113.1")
		}), "10.1.2.1@other-node~draining"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
			203.0.113.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.2.1`,
		remotes: []string{"10.1.2.1"},
	}, {
		name: "without the root endpoint health checks fail their service, which is served",
		opts: kernelspace.Options{RootEndpoint: "cbr0", HealthzPort: 10256},
		view: view(service("web", func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs = addrs("203.0.113.1")
		}), "10.1.2.1"),
		want: `10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
			203.0.113.1 protocol 6 port 80->8080 VIPExternalIP to 10.1.2.1`,
		remotes: []string{"10.1.2.1"},
		fails:   `frontend 203.0.113.1:10256/TCP: HNS network "pods" has no endpoint "cbr0" for health checks`,
	}, {
		name: "a pod on this node without an HNS endpoint fails its service, whose other pods are used",
		pods: []string{"10.1.1.1"}, view: view(service("web"), "10.1.1.1@here", "10.1.1.2@here"),
		want:  "10.96.0.1 protocol 6 port 80->8080 to 10.1.1.1",
		fails: "frontend 10.96.0.1:80/TCP: endpoint 10.1.1.2: pod of this node has no HNS endpoint; the network plug-in has to create it",
	}, {
		name: "on an overlay network the source VIP is the pod network's, and endpoints name their node", everyQuirk: true,
		pods: []string{"10.1.1.1"}, network: overlay, opts: sourceVIP, view: view(service("web"), "10.1.1.1@here", "10.1.2.1"),
		want:    "10.96.0.1 source 10.1.1.250 protocol 6 port 80->8080 to 10.1.1.1 10.1.2.1",
		remotes: []string{"10.1.2.1", "10.96.0.1"},
	}, {
		name:    "on an overlay network only IPv4 is served",
		network: overlay, opts: sourceVIP, view: view(service("web", dualStack), "10.1.2.1", "fd00:1::1"),
		want: `10.96.0.1 source 10.1.1.250 protocol 6 port 80->8080 to 10.1.2.1
			node port source 10.1.1.250 protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.2.1`,
		remotes: []string{"10.1.2.1", "10.96.0.1"},
	}, {
		name:    "on an overlay network the source is this node's address if an endpoint is outside the cluster",
		network: overlay, opts: sourceVIP, view: view(service("web"), "8.8.8.8"),
		want: "10.96.0.1 source 192.168.0.1 protocol 6 port 80->8080 to 8.8.8.8", remotes: []string{"8.8.8.8", "10.96.0.1"},
	}, {
		name:    "on an overlay network the source is this node's address if an endpoint is another node",
		network: overlay, opts: sourceVIP, view: view(service("web"), "192.168.0.2"),
		want: "10.96.0.1 source 192.168.0.1 protocol 6 port 80->8080 to 192.168.0.2", remotes: []string{"192.168.0.2", "10.96.0.1"},
	}, {
		name: "on other networks the configured source VIP is used",
		opts: sourceVIP, view: view(service("web"), "10.1.2.1"),
		want: "10.96.0.1 source 10.1.1.250 protocol 6 port 80->8080 to 10.1.2.1", remotes: []string{"10.1.2.1"},
	}} {
		for quirk, quirks := range fakehns.AllQuirks() {
			if quirk != "none" && quirk != "all" && !tc.everyQuirk {
				continue // the set "all" finds all errors; a set of one quirk only shows the cause of an error
			}
			t.Run(tc.name+"/HNS "+quirk, func(t *testing.T) {
				features := all
				if tc.features != nil {
					features = *tc.features
				}
				w := newWorld(t, features, tc.network, tc.opts, tc.pods...)
				w.hns.SetQuirks(quirks)
				for _, n := range tc.named {
					name, ip, _ := strings.Cut(n, "=")
					w.endpoint(hns.Endpoint{Name: name, Addrs: []netip.Addr{addr(ip)}})
				}
				w.views[tc.view.Key()] = tc.view
				for range 2 {
					got := failures(t, w.syncAll())
					if got["web"] != tc.fails {
						t.Errorf("Sync failed with %q, want %q", got["web"], tc.fails)
					}
					w.mustHave(tc.want)
					w.mustHaveRemotes(tc.remotes...)

					// Verify and a new backend find the expected state and write nothing.
					w.hns.Calls()
					w.must(w.backend.Verify(t.Context()))
					if tc.fails == "" {
						w.mustHaveCalled(listing)
					}
					w.restart()
					failures(t, w.syncAll())
					for call, n := range w.hns.Calls() {
						if listing[call] == 0 && call != "Features" {
							t.Errorf("after a restart %s was called %d times", call, n)
						}
					}

					// Deleting the service removes all objects that were created for it.
					w.must(w.remove(tc.view.Service.Name))
					w.mustHave("")
					w.mustHaveRemotes()
					w.views[tc.view.Key()] = tc.view
				}
			})
		}
	}
}

// TestRestrictedFrontendsLoseTheirLoadBalancers adds source ranges to a service, and
// removes them. Another service keeps its load balancers.
func TestRestrictedFrontendsLoseTheirLoadBalancers(t *testing.T) {
	w := l2bridge(t)
	const open = `10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1
		node port protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.2.1`
	const other = `
		10.96.0.2 protocol 6 port 80->8080 to 10.1.2.1
		node port protocol 6 port 30081->8080 LocalRoutedVIP VIPExternalIP to 10.1.2.1`
	onNodePort := func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 }
	w.must(w.set(view(service("other", func(s *api.Service) {
		s.Type, s.Ports[0].NodePort, s.IPs.ClusterIPs = api.NodePort, 30081, addrs("10.96.0.2")
	}), "10.1.2.1")))
	w.must(w.set(view(service("web", onNodePort), "10.1.2.1")))
	w.mustHave(open + other)
	w.must(w.set(view(service("web", onNodePort, func(s *api.Service) {
		s.SourceRanges = []api.SourceRanges{{
			TargetIPs: s.IPs.ClusterIPs, NodePorts: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		}}
	}), "10.1.2.1")))
	w.mustHave(other)
	w.must(w.set(view(service("web", onNodePort), "10.1.2.1")))
	w.mustHave(open + other)
}

// viewWithHints returns the view of a service whose endpoints 10.1.2.1, 10.1.2.2, ... have
// hints for these zones.
func viewWithHints(zones ...string) *api.View {
	state := &api.ServiceState{Service: service("web")}
	for i, zone := range zones {
		slice := sinktest.Slices(state.Service, fmt.Sprintf("10.1.2.%d@other-node", i+1))[0]
		details := slice.Endpoints[0].Details.Value()
		details.Hints = &api.Hints{ForZones: []string{zone}}
		slice.Endpoints[0].Details = &details
		state.Slices = append(state.Slices, slice)
	}
	return nodeview.View(state, node())
}

func TestMostCommonTargetPortIsServed(t *testing.T) {
	w := l2bridge(t)
	named := func(s *api.Service) { s.Ports[0].Name, s.Ports[0].TargetPortName = "http", "http" }
	v := view(service("web", named), "10.1.2.1", "10.1.2.2")
	v.Endpoints[1].PortOverrides = []api.PortName{{Name: "http", Port: 9090}}
	w.must(w.set(v))
	w.mustHave("10.96.0.1 protocol 6 port 80->8080 to 10.1.2.1")
	v = view(service("web", named), "10.1.2.1", "10.1.2.2", "10.1.2.3")
	v.Endpoints[1].PortOverrides = []api.PortName{{Name: "http", Port: 9090}}
	v.Endpoints[2].PortOverrides = []api.PortName{{Name: "http", Port: 9090}}
	w.must(w.set(v))
	w.mustHave("10.96.0.1 protocol 6 port 80->9090 to 10.1.2.2 10.1.2.3")
	w.mustHaveRemotes("10.1.2.2", "10.1.2.3")
}

func TestSourceVIPOfBridgeIsNodeAddress(t *testing.T) {
	w := l2bridge(t)
	w.must(w.set(view(service("web", dualStack), "10.1.2.1", "fd00:1::1")))
	if got, want := w.hns.Dump(), `endpoint [10.1.2.1] remote mac 02-11-0a-01-02-01 named kpng-10.1.2.1
endpoint [fd00:1::1] remote mac 02-11-c9-16-f6-c8 named kpng-fd00:1::1
load balancer 10.96.0.1 source 192.168.0.1 protocol 6 port 80->8080 to 10.1.2.1
load balancer fd00:96::1 IPv6 source fd00:192::1 protocol 6 port 80->8080 to fd00:1::1
load balancer node port IPv6 source fd00:192::1 protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to fd00:1::1
load balancer node port source 192.168.0.1 protocol 6 port 30080->8080 LocalRoutedVIP VIPExternalIP to 10.1.2.1
`; got != want {
		t.Errorf("HNS has\n%swant\n%s", got, want)
	}
}

func TestServicesShareHealthChecksOfLoadBalancerAddress(t *testing.T) {
	w := newWorld(t, fakehns.AllFeatures(), hns.Network{}, kernelspace.Options{RootEndpoint: "cbr0", HealthzPort: 10256})
	w.endpoint(hns.Endpoint{Name: "cbr0", Addrs: []netip.Addr{addr("10.1.1.2")}})
	at := func(port int32) *api.View {
		return view(service(fmt.Sprint("web-", port), withClusterIP(int(port)), func(s *api.Service) {
			s.Type, s.Ports[0].Port = api.LoadBalancer, port
			s.IPs.LoadBalancerIPs = addrs("203.0.113.1")
		}), "10.1.2.1")
	}
	const check = "load balancer 203.0.113.1 source 192.168.0.1 protocol 6 port 10256->10256 to 10.1.1.2\n"
	w.must(w.set(at(80), at(81)))
	for _, name := range []string{"web-80", "web-81"} {
		if !strings.Contains(w.hns.Dump(), check) {
			t.Errorf("HNS before %s is deleted:\n%s", name, w.hns.Dump())
		}
		w.must(w.remove(name))
	}
	w.mustHave("")
}

func TestOverlayNetworkHasEndpointsForSourceVIPAndClusterIPs(t *testing.T) {
	w := newWorld(t, fakehns.AllFeatures(),
		hns.Network{Overlay: true, RemoteSubnets: []hns.RemoteSubnet{{Prefix: netip.MustParsePrefix("10.1.2.0/24"), Provider: addr("192.168.0.2")}}},
		kernelspace.Options{SourceVIPs: []netip.Addr{addr("10.1.1.250")}, HostMAC: "00-15-5d-00-00-99"})
	w.must(w.set(view(service("web"), "10.1.2.1")))
	const sourceVIP = "endpoint [10.1.1.250] named kpng-source-vip\n"
	if got, want := w.hns.Dump(), sourceVIP+
		"endpoint [10.1.2.1] remote mac 02-11-0a-01-02-01 at 192.168.0.2 named kpng-10.1.2.1\n"+
		"endpoint [10.96.0.1] remote mac 00-15-5d-00-00-99 at 192.168.0.1 named kpng-10.96.0.1\n"+
		"load balancer 10.96.0.1 source 10.1.1.250 protocol 6 port 80->8080 to 10.1.2.1\n"; got != want {
		t.Errorf("HNS has\n%swant\n%s", got, want)
	}

	// A new node replaces the node 192.168.0.2 and gets its pod network.
	network, _ := w.hns.NetworkByID(w.network)
	network.RemoteSubnets[0].Provider = addr("192.168.0.3")
	w.hns.AddNetwork(network)
	w.verify()
	if got := w.hns.Dump(); !strings.Contains(got, "at 192.168.0.3 named kpng-10.1.2.1") || !strings.Contains(got, "to 10.1.2.1") {
		t.Errorf("HNS after the pod network moved:\n%s", got)
	}

	// A node is added after the last listing.
	network.RemoteSubnets = append(network.RemoteSubnets, hns.RemoteSubnet{Prefix: netip.MustParsePrefix("10.1.3.0/24"), Provider: addr("192.168.0.4")})
	w.hns.AddNetwork(network)
	if err := w.set(view(service("web"), "10.1.3.1")); err == nil {
		t.Error("Sync requested no retry although the network changed")
	}
	w.must(w.set(view(service("web"), "10.1.3.1")))
	if got := w.hns.Dump(); !strings.Contains(got, "at 192.168.0.4 named kpng-10.1.3.1") {
		t.Errorf("HNS after a node was added:\n%s", got)
	}

	w.must(w.remove("web"))
	if got := w.hns.Dump(); got != sourceVIP {
		t.Errorf("HNS after all services were deleted:\n%s", got)
	}
	w.must(w.backend.Cleanup(t.Context()))
	if got := w.hns.Dump(); got != "" {
		t.Errorf("HNS after Cleanup:\n%s", got)
	}
}
