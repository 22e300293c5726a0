// SPDX-License-Identifier: Apache-2.0

package explain_test

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/explain"
)

func Example() {
	state := cluster.New(cluster.Options{}) // a real program uses the State of its *kpng.Proxy
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(&api.Service{
			Namespace: "default", Name: "web", Type: api.ClusterIP,
			IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.96.0.80"))},
			Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}},
		})
	})
	for _, text := range []string{"10.96.0.80:80/tcp", "10.96.0.80:443"} {
		for e, err := range explain.Answers(state.Snapshot(), "node-1", text) {
			if err != nil {
				fmt.Println(err)
				continue
			}
			fmt.Println(e.Service, e.Frontends[0].Elsewhere)
		}
	}
	// Output:
	// default/web reject: no endpoint is usable anywhere
	// no service is served at 10.96.0.80:443; the address has: ClusterIP 10.96.0.80:80/TCP of default/web
}
