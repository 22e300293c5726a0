// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

var update = flag.Bool("update", false, "write the golden files in testdata")

func TestExplain(t *testing.T) {
	older := types.NamespacedName{Namespace: "default", Name: "older"}
	for _, c := range []struct {
		name  string
		state *api.ServiceState
		node  *api.Node
	}{{
		name: "load balancer",
		state: &api.ServiceState{
			Service: service(dualStack, externalLocal, ports("http=80", "https=443"),
				loadBalancerIPs("203.0.113.1"), externalIPs("192.0.2.1"), nodePort(30080), sourceRangesFor("10.0.0.0/8"),
				func(s *api.Service) {
					s.HealthCheckNodePort = 32000
					s.AffinitySeconds = 10800
				}),
			Slices: endpointSlices(`slice web-a http=8080 https=8443
				10.0.0.1 ready @here zones=zone-2
				10.0.0.2 ready @there zones=zone-1
				10.0.0.3 ready @there zones=zone-3
				10.0.0.4 serving terminating @here
				10.0.0.5 @there
				slice web-b http=8080
				10.0.0.2 ready zones=zone-1
				slice web-c metrics=9100
				10.0.0.9 ready
				slice web-v6 http=8080
				fd00::a ready @there`),
			Lost: []api.LostClaim{{
				Claim:  api.Claim{IP: netip.MustParseAddr("192.0.2.1"), Protocol: api.TCP, Port: 443},
				Winner: older,
			}},
		},
		node: thisNode,
	}, {
		name: "cluster ip",
		state: &api.ServiceState{
			Service: service(externalLocal),
			Slices: endpointSlices(`slice web-a
				10.0.0.1 serving terminating
				10.0.0.2
				slice web-v6
				fd00::a ready`),
		},
	}, {
		name: "all ports",
		state: &api.ServiceState{
			Service: service(mapIP, headless, internalLocal, externalIPs("192.0.2.1")),
			Slices:  endpointSlices(oneReady + "\n10.0.0.7 serving terminating @here"),
		},
		node: thisNode,
	}, {
		name:  "slices only",
		state: &api.ServiceState{Slices: endpointSlices(oneReady)},
		node:  thisNode,
	}, {
		name:  "external name",
		state: &api.ServiceState{Service: service(ofType(api.ExternalName))},
		node:  thisNode,
	}} {
		t.Run(c.name, func(t *testing.T) {
			e := Explain(c.state, c.node)
			if want := View(c.state, c.node); !e.View.Equal(want) {
				t.Errorf("the view of Explain differs from View (-View +Explain):\n%s", cmp.Diff(describe(want), describe(e.View)))
			}
			if e.View != nil {
				want := *e
				want.lists, want.skipped = nil, nil
				if diff := cmp.Diff(want.String(), ExplainView(e.View, c.node).String()); diff != "" {
					t.Errorf("ExplainView differs from Explain without lists (-Explain +ExplainView):\n%s", diff)
				}
			}
			golden := filepath.Join("testdata", "explain", strings.ReplaceAll(c.name, " ", "-")+".txt")
			got := e.String()
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("explanation differs from %s; go test -run TestExplain -update writes it (-want +got):\n%s", golden, diff)
			}
		})
	}
}

// TestExplainsTheListsOfDuplicates checks which EndpointSlice is named as preferred. It
// also checks that the lists for short-circuited traffic are explained even if they equal
// other lists.
func TestExplainsTheListsOfDuplicates(t *testing.T) {
	e := Explain(&api.ServiceState{
		Service: service(internalLocal, externalLocal, externalIPs("192.0.2.1"), ports("http=80")),
		Slices: endpointSlices(`slice first http=9090
			10.0.0.1 ready @there
			slice other http=9090
			10.0.0.2 ready @there
			slice a http=8080
			10.0.0.2 ready @there
			slice web http=9090
			10.0.0.2 ready @there`),
	}, thisNode)
	for _, want := range []string{
		"10.0.0.2:9090 of slice web on there\n    every list     out  another entry with its address and port is preferred: that of slice other\n",
		"10.0.0.1:9090 of slice first on there\n    internal       out  not on this node\n    external       out  not on this node\n    short circuit  in   ready\n",
	} {
		if !strings.Contains(e.String(), want) {
			t.Errorf("the explanation lacks %q:\n%s", want, e)
		}
	}
}

func TestExplainsExternalListsOnlyOfExternalFrontends(t *testing.T) {
	for _, c := range []struct {
		edits []func(*api.Service)
		want  int
	}{
		{[]func(*api.Service){internalLocal}, 0}, {[]func(*api.Service){internalLocal, externalIPs("192.0.2.1")}, 1}, {[]func(*api.Service){internalLocal, nodePort(30080)}, 1}, {nil, 0},
	} {
		e := Explain(&api.ServiceState{Service: service(c.edits...), Slices: endpointSlices("slice a\n10.0.0.1 ready @there")}, thisNode)
		if got := strings.Count(e.String(), "    external "); got != c.want {
			t.Errorf("%d lines about external traffic, want %d:\n%s", got, c.want, e)
		}
	}
}

// Ready endpoints whose weight is 0 are named as the reason only if nothing else is wrong.
func TestExplainsThatAllWeightsAreZero(t *testing.T) {
	zero, port := api.Conditions{Ready: true, Drain: true}, &api.PortMapping{}
	for _, c := range []struct {
		name       string
		conditions api.Conditions
		port       *api.PortMapping
		target     int32
		want       bool
	}{
		{"weight 0", zero, port, 80, true},
		{"weight 0, all ports", zero, nil, 0, true},
		{"weight 0, without the port", zero, port, 0, false},
		{"weight 0, not ready", api.Conditions{Drain: true}, port, 80, false},
		{"another weight", api.Conditions{Ready: true}, port, 80, false},
	} {
		l := listReport{Port: c.port, Endpoints: []endpointReport{{Endpoint: &api.SliceEndpoint{Conditions: c.conditions}, TargetPort: c.target}}}
		var b strings.Builder
		if l.text(&b, false); strings.Contains(b.String(), "all weights of ready endpoints are 0\n") != c.want {
			t.Errorf("%s:\n%s", c.name, b.String())
		}
	}
}

func TestExplainsPortsOfDrainingEndpointsInOrder(t *testing.T) {
	ports := func(s *api.Service) {
		s.Ports = nil
		for i, name := range []string{"a", "b", "c"} {
			s.Ports = append(s.Ports, api.PortMapping{Name: name, Protocol: api.TCP, Port: 80 + int32(i)})
		}
	}
	e := Explain(&api.ServiceState{Service: service(ports), Slices: endpointSlices("slice a a=9000 b=8000 c=9000\n10.0.0.1 ready\n10.0.0.2 serving terminating")}, thisNode)
	if want := "\n  10.0.0.2:8000, 10.0.0.2:9000\n"; !strings.Contains(e.String(), want) {
		t.Errorf("the explanation lacks %q:\n%s", want, e)
	}
}

func TestExplainsWhichPortsASliceHas(t *testing.T) {
	const noPort = "10.0.0.1 of slice a on no known node: its slice has no port of the same name and protocol"
	for ports, want := range map[string]string{
		"":                                noPort + "\n",
		"a=1 b=0 c=3 d=4 e=5":             noPort + `; it has "a"/TCP, "b"/TCP without a number, "c"/TCP, "d"/TCP, "e"/TCP` + "\n",
		"a=1 b=2 c=3 d=4 e=5 f=6 g=7 h=8": noPort + `; it has "a"/TCP, "b"/TCP, "c"/TCP, "d"/TCP, "e"/TCP, 3 more` + "\n",
	} {
		state := &api.ServiceState{Service: service(), Slices: endpointSlices("slice a " + ports + "\n10.0.0.1 ready")}
		state.Service.Ports[0].Name = "http"
		if ports == "" {
			state.Slices[0].Ports = nil
		}
		if e := Explain(state, thisNode); !strings.Contains(e.String(), want) {
			t.Errorf("the explanation lacks %q:\n%s", want, e)
		}
	}
}

func TestExplainsWhyHintsAreIgnored(t *testing.T) {
	for _, c := range []struct{ name, endpoints, want string }{
		{"no hints", "10.0.0.1 ready\n10.0.0.2 ready", "topology: no hints; all ready endpoints"},
		{"only one has a hint", "10.0.0.1 ready zones=zone-1\n10.0.0.2 ready", "topology: hints ignored (not on every ready endpoint)"},
		{"hints of different kinds", "10.0.0.1 ready zones=zone-1\n10.0.0.2 ready nodes=there", "topology: hints ignored (not on every ready endpoint)"},
		{"all hints are for other zones", "10.0.0.1 ready zones=zone-2\n10.0.0.2 ready zones=zone-3", "topology: hints ignored (none for this node or zone)"},
		{"all hints are for other nodes", "10.0.0.1 ready nodes=there\n10.0.0.2 ready nodes=there", "topology: hints ignored (none for this node or zone)"},
		{"not ready", "10.0.0.1", "no endpoint is usable anywhere"},
		{"an endpoint is for another node", "10.0.0.1 ready nodes=here\n10.0.0.2 ready nodes=there", "every list     out  hinted for other nodes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := Explain(&api.ServiceState{Service: service(), Slices: endpointSlices("slice a\n" + c.endpoints)}, thisNode)
			if !strings.Contains(e.String(), c.want) {
				t.Errorf("the explanation lacks %q:\n%s", c.want, e)
			}
			text, err := json.Marshal(e)
			if topology, ok := strings.CutPrefix(c.want, "topology: "); err != nil || ok && !strings.Contains(string(text), `"Topology":"`+topology) {
				t.Errorf("the JSON form lacks %q: %s, error %v", topology, text, err)
			}
		})
	}
	e := Explain(weighed(service(), -1, -1), thisNode)
	if want := "no endpoint is usable anywhere: all weights of ready endpoints are 0\n"; !strings.Contains(e.String(), want) {
		t.Errorf("the explanation lacks %q:\n%s", want, e)
	}
	e = Explain(weighed(service(), 1, -1), thisNode)
	if want := "every list     out  its weight is zero"; !strings.Contains(e.String(), want) {
		t.Errorf("the explanation lacks %q:\n%s", want, e)
	}
	if e := Explain(&api.ServiceState{}, nil); e.absent != "service not found or not selected" {
		t.Errorf("without a service and slices: %s", e)
	}
}

func TestNarrow(t *testing.T) {
	e := func() *Explanation {
		return Explain(&api.ServiceState{
			Service: service(dualStack, ports("http=80", "https=443"), externalIPs("192.0.2.1"), func(s *api.Service) { s.IPs.LoadBalancerIPs = ips("2001:db8::9") }),
			Slices:  endpointSlices("slice a http=1 https=2\n10.0.0.1 ready\nslice b http=1 https=2\nfd00::a ready"),
			Lost:    []api.LostClaim{{Claim: api.Claim{IP: netip.MustParseAddr("192.0.2.1"), Protocol: api.TCP, Port: 80}}},
		}, thisNode)
	}
	for _, c := range []struct {
		name string
		keep func(FrontendKey) bool
		want string
	}{
		{"one served frontend", func(k FrontendKey) bool { return k.String() == "ClusterIP [fd00::1]:443/TCP" }, "ClusterIP [fd00::1]:443/TCP; lists 443 IPv6"},
		{"one frontend that is not served", func(k FrontendKey) bool { return k.String() == "ExternalIP 192.0.2.1:80/TCP" }, "not ExternalIP 192.0.2.1:80/TCP; lists"},
		{"both", func(k FrontendKey) bool {
			return k.Kind == ExternalIP && k.Port == 80 || k.Kind == ExternalIP && k.Port == 443
		}, "ExternalIP 192.0.2.1:443/TCP not ExternalIP 192.0.2.1:80/TCP; lists 443 IPv4"},
		{"nothing", func(FrontendKey) bool { return false }, "; lists"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := e()
			left := e.Narrow(c.keep)
			var got []string
			for _, f := range e.Frontends {
				got = append(got, f.FrontendKey.String())
			}
			for _, u := range e.unserved {
				got = append(got, "not "+u.FrontendKey.String())
			}
			if left != (len(got) > 0) {
				t.Errorf("Narrow returned %t", left)
			}
			text := strings.Join(got, " ") + "; lists"
			for _, l := range e.lists {
				text += fmt.Sprintf(" %d %s", l.Port.Port, l.Family)
			}
			if diff := cmp.Diff(c.want, text); diff != "" {
				t.Errorf("frontends and lists (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUnknownConstantsHaveTexts(t *testing.T) {
	for want, got := range map[string]fmt.Stringer{
		"nodeview.reason(0)": reason(0), "nodeview.reason(15)": reason(15), "nodeview.Verdict(3)": Verdict(3), "ready": inReady,
	} {
		if got.String() != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if reason(0).In() || !inTerminating.In() || outNotReady.In() {
		t.Error("In is wrong")
	}
}
