// SPDX-License-Identifier: Apache-2.0

package kpng_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
)

// show prints each frontend and the endpoints for clients outside the node. A proxy would
// program the frontends here.
func show(_ context.Context, services []*api.View) error {
	for _, service := range services {
		for f := range nodeview.Frontends(service) {
			fmt.Println(f.FrontendKey, f.Elsewhere)
		}
	}
	return nil
}

// This proxy programs the services of manifests once, then ends. If Manifests is empty,
// it reads from the API server. If Once is false, it runs until its context ends.
func Example() {
	err := kpng.Run(context.Background(), kpng.Options{
		Manifests: "examples/demo.yaml",
		NodeName:  "vm-002",
		Sinks:     []kpng.Sink{{Sink: sink.FullState(show), Options: sink.Options{Once: true}}},
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// ClusterIP 10.96.0.80:80/TCP forward to 11.0.2.3:8080, 11.0.3.3:8080
}

// A program that contains a proxy, such as a CNI agent, runs the proxy in a goroutine and
// serves the proxy's health checks.
func ExampleProxy() {
	p, err := kpng.New(kpng.Options{
		Manifests: "examples/demo.yaml",
		NodeName:  "vm-002",
		Services:  watcher.Options{ServiceProxyName: "kpng-example"},
		Sinks:     []kpng.Sink{{Sink: sink.FullState(show)}},
	})
	if err != nil {
		log.Fatal(err)
	}
	checks := http.NewServeMux()
	checks.Handle("GET /healthz", health.Handler(p.Health))

	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	if err := p.WaitSynced(ctx); err != nil { // services work when WaitSynced returns
		log.Fatal(err)
	}
	answer := httptest.NewRecorder()
	checks.ServeHTTP(answer, httptest.NewRequest("GET", "/healthz", nil))
	fmt.Println("health:", answer.Code)
	stop()
	fmt.Println("ended:", <-ended)
	// Output:
	// ExternalIP 10.0.0.55:6000/TCP forward to 11.0.2.2:6000, 11.0.3.2:6000
	// ExternalIP [1000::55]:6000/TCP forward to [1100::202]:6000, [1100::302]:6000
	// health: 200
	// ended: <nil>
}
