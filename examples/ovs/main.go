// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command ovs-agent is a small network agent that owns a bridge of Open vSwitch. It runs
// kpng with the ovs backend in its process, so that pods at the bridge can use services.
// README.md describes its features and limits.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/kpng-project/kpng/backends/ovs"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/node"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
)

func main() {
	var opts node.Options
	b := &bridge{pods: netip.MustParsePrefix("10.244.1.0/24")}
	flag.StringVar(&opts.Kubeconfig, "kubeconfig", "", "connect to the API server of this `file` (default: the pod's service account, else kubectl's configuration)")
	flag.StringVar(&opts.Manifests, "manifests", "", "read services from this `file` or folder instead of the API server")
	flag.StringVar(&opts.NodeName, "node-name", "", "be the agent of the Node of this `name` (default $NODE_NAME, else the host's name)")
	flag.StringVar(&opts.Services.ServiceProxyName, "service-proxy-name", "", "proxy only the services with this proxy `name`, beside kube-proxy")
	flag.StringVar(&b.name, "bridge", "br-int", "make a bridge with this `name`, or use it if it exists")
	flag.TextVar(&b.pods, "pod-cidr", b.pods, "the IPv4 `network` of this node's pods; its first address is the gateway")
	flag.StringVar(&b.runDir, "ovs-rundir", "/var/run/openvswitch", "the `directory` of the sockets of Open vSwitch")
	listen := flag.String("listen", "127.0.0.1:10256", "serve /healthz, /livez, /readyz and /metrics on this `host:port`")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, opts, b, *listen); err != nil {
		fmt.Fprintln(os.Stderr, "ovs-agent:", err)
		os.Exit(1)
	}
}

// run runs the service proxy until ctx ends.
func run(ctx context.Context, opts node.Options, b *bridge, listen string) (err error) {
	if !b.pods.Addr().Is4() || b.pods.Bits() > 30 {
		return fmt.Errorf("%s is not an IPv4 network with room for pods", b.pods)
	}
	b.Sink, err = ovs.New(ovs.Options{
		Bridge: b.name, RunDir: b.runDir,
		MasqueradeAddresses: []netip.Addr{b.gateway()},
		PodCIDRs:            []netip.Prefix{b.pods},
	})
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	if opts.Metrics, err = metrics.New(registry, metrics.Options{}); err != nil {
		return err
	}
	proxy, err := node.New(opts, b)
	if err != nil {
		return fmt.Errorf("set up the service proxy: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", proxy.HealthHandler())
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := http.Server{Addr: listen, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return proxy.Run(ctx) })
	group.Go(func() error {
		defer context.AfterFunc(ctx, func() { server.Close() })()
		if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	return group.Wait()
}
