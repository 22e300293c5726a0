// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"context"
	"log"
	"net/http"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/node"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/status"
	"github.com/prometheus/client_golang/prometheus"
)

// This proxy balances connections inside the cluster with eBPF, and all other connections
// with nftables.
func Example() {
	below, err := nftables.New(nftables.Options{})
	if err != nil {
		log.Fatal(err)
	}
	dataplane, err := ebpf.New(below, ebpf.Options{})
	if err != nil {
		log.Fatal(err)
	}
	m, err := metrics.New(prometheus.DefaultRegisterer, metrics.Options{KubeProxy: true})
	if err != nil {
		log.Fatal(err)
	}
	proxy, err := node.New(node.Options{Metrics: m}, dataplane)
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/proxy/", proxy.HealthHandler()) // /proxy/healthz, /proxy/livez and /proxy/readyz
	log.Fatal(proxy.Run(context.Background()))    // in place of kube-proxy
}

// This proxy counts the traffic of each service. Its metrics and its status page show the
// numbers.
func Example_traffic() {
	var options nftables.Options
	options.Stats = true
	dataplane, err := nftables.New(options)
	if err != nil {
		log.Fatal(err)
	}
	proxy, err := node.New(node.Options{}, dataplane)
	if err != nil {
		log.Fatal(err)
	}
	counter, ok := sink.As[backends.Counter](dataplane)
	if !ok {
		log.Fatal("the dataplane does not count traffic")
	}
	prometheus.MustRegister(metrics.Traffic(counter, 0))
	http.Handle("GET /status", status.Handler(struct {
		*node.Proxy
		backends.Counter
	}{proxy, counter}))
	log.Fatal(proxy.Run(context.Background()))
}
