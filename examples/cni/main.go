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
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/node"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, parseFlags()); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "kpng-cni:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, f flags) error {
	if err := f.cni.check(); err != nil {
		return err
	}
	config, err := kube.LoadConfig(f.kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	factory, registry := informers.NewSharedInformerFactory(client, 0), prometheus.NewRegistry()
	proxy, err := newProxy(f.nodeName, factory, registry)
	if err != nil {
		return fmt.Errorf("set up the service proxy: %w", err)
	}
	network, err := newNetwork(proxy.NodeName(), f.cni, factory.Core().V1().Nodes())
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return serve(ctx, f.health, proxy.HealthHandler()) })
	group.Go(func() error { return serve(ctx, f.metrics, metricsOf(registry)) })
	group.Go(func() error { return network.run(ctx) })
	group.Go(func() error { return proxy.Run(ctx) })
	return group.Wait()
}

// newProxy returns the service proxy, which programs services with nftables.
func newProxy(name string, factory informers.SharedInformerFactory, registry prometheus.Registerer) (*node.Proxy, error) {
	m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
	if err != nil {
		return nil, err
	}
	var tables nftables.Options
	tables.NodePodCIDRs = true // detect traffic from pods of this node
	tables.MasqueradeOutsiders = true
	dataplane, err := nftables.New(tables)
	if err != nil {
		return nil, err
	}
	opts := node.Options{Metrics: m}
	opts.NodeName = name
	opts.Informers = &kube.Informers{
		Services:       factory.Core().V1().Services().Informer(),
		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
		Nodes:          factory.Core().V1().Nodes().Informer(),
	}
	return node.New(opts, dataplane)
}
