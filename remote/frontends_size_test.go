// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
)

// TestPortsShareTheirLists checks that a message has each list of endpoints once if all ports
// of a service lead to the same ports of the endpoints. The lists are the list for traffic
// from elsewhere, the list for traffic from this node, and the list Keep.
func TestPortsShareTheirLists(t *testing.T) {
	svc := &api.Service{
		Namespace: "default", Name: "web", Type: api.LoadBalancer, ExternalTrafficToLocal: true,
		IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.1")), LoadBalancerIPs: api.NewIPSet(netip.MustParseAddr("203.0.113.1"))},
	}
	for i := range 20 {
		svc.Ports = append(svc.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.UDP, Port: int32(1 + i)})
	}
	endpoint := func(addr string, scopes api.Scopes) api.Endpoint {
		e := api.Endpoint{Addr: netip.MustParseAddr(addr), Scopes: scopes}
		for i := range svc.Ports {
			e.PortOverrides = append(e.PortOverrides, api.PortName{Name: svc.Ports[i].Name, Port: 8080})
		}
		return e
	}
	w, err := frontendsOf(&api.View{
		Service: svc,
		Endpoints: []api.Endpoint{
			endpoint("10.0.0.1", api.Scopes{Internal: true, External: true, Cluster: true}),
			endpoint("10.0.0.2", api.Scopes{Internal: true, Cluster: true}),
		},
		Draining: []api.Endpoint{endpoint("10.0.0.3", api.Scopes{})},
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(w.Frontends) != 2*len(svc.Ports) || len(w.Lists) != 3 {
		t.Errorf("%d frontends have %d lists, want 40 and 3: %v", len(w.Frontends), len(w.Lists), w.Lists)
	}
}
