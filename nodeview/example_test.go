// SPDX-License-Identifier: Apache-2.0

package nodeview_test

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// The example prints one node's view of a service. The service has one endpoint on this
// node and one endpoint on another node.
func Example() {
	ready := api.Conditions{Ready: true, Serving: true}
	state := &api.ServiceState{
		Service: &api.Service{
			Namespace: "default", Name: "web", Type: api.NodePort,
			IPs:                    api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.1"))},
			IPFamilies:             []api.Family{api.IPv4},
			Ports:                  []api.PortMapping{{Protocol: api.TCP, Port: 80, NodePort: 30080, TargetPort: 8080}},
			ExternalTrafficToLocal: true,
		},
		Slices: []*api.EndpointSlice{{
			Namespace: "default", Name: "web-x7k2p", ServiceName: "web", Family: api.IPv4,
			Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 8080}},
			Endpoints: []api.SliceEndpoint{
				{Addr: netip.MustParseAddr("10.1.0.5"), Details: &api.EndpointDetails{NodeName: "node-1"}, Conditions: ready},
				{Addr: netip.MustParseAddr("10.1.1.7"), Details: &api.EndpointDetails{NodeName: "node-2"}, Conditions: ready},
			},
		}},
	}

	view := nodeview.View(state, &api.Node{Name: "node-1"})
	for f := range nodeview.Frontends(view) {
		fmt.Println(f.FrontendKey)
		fmt.Println("  from elsewhere:", f.Elsewhere)
		fmt.Println("  from this node:", f.Node)
	}
	// Output:
	// ClusterIP 10.96.0.1:80/TCP
	//   from elsewhere: forward to 10.1.0.5:8080, 10.1.1.7:8080
	//   from this node: forward to 10.1.0.5:8080, 10.1.1.7:8080
	// NodePort IPv4:30080/TCP
	//   from elsewhere: forward to 10.1.0.5:8080
	//   from this node: forward to 10.1.0.5:8080, 10.1.1.7:8080
}
