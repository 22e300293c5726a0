// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command kpng-cni is a small network agent. It runs on each node, connects the node's
// pods to the cluster, and is the node's service proxy. It shows how to import kpng into
// a CNI plugin. The agent and kpng use the same informers, metrics endpoint and health
// endpoint. README.md describes its features and limits.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/internal/healthcheck"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
)

// agent contains the values of the command-line flags.
type agent struct {
	kubeconfig string
	nodeName   string
	health     string
	metrics    string
	cni        cniConfig
}

func main() {
	var a agent
	flag.StringVar(&a.kubeconfig, "kubeconfig", "", "connect to the API server of this `file` (default: the pod's service account, else kubectl's configuration)")
	flag.StringVar(&a.nodeName, "node-name", "", "be the agent of the Node of this `name` (default $NODE_NAME, else the host's name)")
	flag.StringVar(&a.health, "healthz", "127.0.0.1:10256", "serve /healthz, /livez and /readyz on this `host:port`")
	flag.StringVar(&a.metrics, "metrics", "127.0.0.1:10249", "serve /metrics and /proxyMode on this `host:port`, as kube-proxy does")
	flag.StringVar(&a.cni.file, "cni-config", "/etc/cni/net.d/10-kpng.conflist", "write the CNI configuration to this `file`")
	flag.StringVar(&a.cni.plugin, "plugin", "bridge", "connect pods with this CNI `plugin`: bridge or ptp")
	flag.IntVar(&a.cni.mtu, "mtu", 1500, "the MTU of pods, in `bytes`")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := a.run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "kpng-cni:", err)
		os.Exit(1)
	}
}

func (a *agent) run(ctx context.Context) error {
	if err := a.cni.check(); err != nil {
		return err
	}
	node, err := kpng.NodeName(a.nodeName)
	if err != nil {
		return err
	}
	config, err := kube.LoadConfig(a.kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	network, err := newNetwork(node, a.cni, factory.Core().V1().Nodes())
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	addrs, err := nodeaddr.Watch(ctx, nodeaddr.Options{})
	if err != nil {
		return fmt.Errorf("find the node's addresses: %w", err)
	}
	proxy, err := newProxy(node, factory, addrs, registry)
	if err != nil {
		return err
	}

	factory.Start(ctx.Done())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return serve(ctx, a.health, healthChecks(proxy)) })
	group.Go(func() error { return serve(ctx, a.metrics, metricsOf(registry)) })
	group.Go(func() error { return network.run(ctx) })
	group.Go(func() error { return proxy.Run(ctx) })
	return group.Wait()
}

// newProxy returns the service proxy. One sink programs services with nftables, and
// another sink serves the health-check node ports of load balancers.
func newProxy(node string, factory informers.SharedInformerFactory, addrs nodeaddr.Source, registry prometheus.Registerer) (*kpng.Proxy, error) {
	m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	tables, err := nftables.New(nftables.Options{Options: backends.Options{
		NodePodCIDRs:        true, // detect traffic from pods of this node
		MasqueradeOutsiders: true,
		NodeAddresses:       addrs,
		Conntrack:           conntrack.New(conntrack.Options{NodeAddresses: addrs}),
		Sysctls:             backends.SetSysctls,
	}})
	if err != nil {
		return nil, fmt.Errorf("set up nftables: %w", err)
	}
	var proxy *kpng.Proxy
	checks := healthcheck.New(healthcheck.Options{
		NodeAddresses: addrs,
		Healthy:       func() bool { r := proxy.Health(); return r.Synced && !r.Stuck },
	})
	proxy, err = kpng.New(kpng.Options{
		NodeName: node,
		Informers: &kube.Informers{
			Services:       factory.Core().V1().Services().Informer(),
			EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
			Nodes:          factory.Core().V1().Nodes().Informer(),
		},
		Sinks: []kpng.Sink{
			{Sink: tables, Options: sink.Options{Name: "nftables", Observer: m.Sink("nftables")}},
			{Sink: checks, Options: sink.Options{Name: "healthcheck", Observer: m.Sink("healthcheck")}},
		},
	})
	return proxy, err
}

func healthChecks(proxy *kpng.Proxy) http.Handler {
	checks, mux := health.Handler(proxy.Health), http.NewServeMux()
	for _, path := range [...]string{"/healthz", "/livez", "/readyz"} {
		mux.Handle("GET "+path, checks)
	}
	return mux
}

// metricsOf returns a handler for the paths /metrics and /proxyMode. kube-proxy serves
// the same paths.
func metricsOf(registry prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /proxyMode", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "nftables") })
	return mux
}

// serve runs an HTTP server at address until ctx ends.
func serve(ctx context.Context, address string, handler http.Handler) error {
	server := http.Server{Addr: address, Handler: handler, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", address, err)
	}
	return nil
}
