// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"flag"
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
			Slices:  endpointSlices(oneReady),
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
