// SPDX-License-Identifier: Apache-2.0

package healthcheck_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/node/healthcheck"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// The server is a sink of its own, beside the sink that programs services. Without local
// endpoints of a service, load balancers get the status 503.
func Example() {
	server := healthcheck.New(healthcheck.Options{
		NodeAddresses: nodeaddr.Of(netip.MustParseAddr("127.0.0.1")), // usually a nodeaddr.Watcher
		Failed: func(service types.NamespacedName, at netip.AddrPort, err error) {
			fmt.Println(service, at, err)
		},
	})
	source := sinktest.NewSource() // a real program has a feed
	source.Set(&api.View{Service: &api.Service{
		Namespace: "default", Name: "web", Type: api.LoadBalancer,
		ExternalTrafficToLocal: true, HealthCheckNodePort: 32123,
	}})
	source.MarkSynced()

	ctx, stop := context.WithCancel(context.Background())
	driver := sink.NewDriver(source, server, sink.Options{})
	ended := make(chan error)
	go func() { ended <- driver.Run(ctx) }()
	if err := driver.WaitApplied(ctx, source.Revision()); err != nil {
		fmt.Println(err)
	}
	if answer, err := http.Get("http://127.0.0.1:32123/"); err != nil {
		fmt.Println(err)
	} else {
		answer.Body.Close()
		fmt.Println(answer.StatusCode)
	}
	stop()
	fmt.Println(<-ended)
}
