// SPDX-License-Identifier: Apache-2.0

package kpng_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/sink"
)

// source writes one service with one endpoint.
func source(ctx context.Context, state *cluster.State) error {
	state.Update(func(tx *cluster.Tx) { // one commit: readers see all of it or nothing
		tx.SetNode(&api.Node{Name: "node-1"})
		tx.SetService(&api.Service{
			Namespace: "default", Name: "web", Type: api.ClusterIP,
			IPs:        api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.80"))},
			IPFamilies: []api.Family{api.IPv4},
			Ports:      []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}},
		})
		tx.SetSlice(&api.EndpointSlice{
			Namespace: "default", Name: "web-1", ServiceName: "web", Family: api.IPv4,
			Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 8080}},
			Endpoints: []api.SliceEndpoint{{
				Addr: netip.MustParseAddr("10.1.0.5"), Details: &api.EndpointDetails{NodeName: "node-1"},
				Conditions: api.Conditions{Ready: true, Serving: true},
			}},
		})
	})
	state.SetSynced() // sinks get nothing before this
	<-ctx.Done()      // a real source writes changes here
	return nil
}

// The example gets services from a source of its own.
func ExampleOptions_source() {
	err := kpng.Run(context.Background(), kpng.Options{
		NodeName: "node-1",
		Source:   source,
		Sinks:    []kpng.Sink{{Sink: sink.FullState(show), Options: sink.Options{Once: true}}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("done")
	// Output:
	// ClusterIP 10.96.0.80:80/TCP forward to 10.1.0.5:8080
	// done
}
