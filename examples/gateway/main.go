// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command gateway is a service proxy for Gateways, TCPRoutes and UDPRoutes of the Gateway
// API. README.md describes its features and limits.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/node"
	"github.com/kpng-project/kpng/watcher/gateway"
	"github.com/kpng-project/kpng/watcher/kube"
)

const name = "gateway"

func main() {
	opts := gateway.Options{Controller: "kpng.io/gateway"}
	flag.StringVar(&opts.NodeName, "node-name", "", "be the proxy of the Node of this `name` (default $NODE_NAME, else the host's name)")
	flag.BoolVar(&opts.WriteStatus, "status", false, "create Services and write status; exactly one process of the cluster does this")
	kubeconfig := flag.String("kubeconfig", "", "connect to the API server of this `file` (default: the pod's service account, else kubectl's configuration)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, opts, *kubeconfig); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		os.Exit(1)
	}
}

// run runs the service proxy until ctx ends.
func run(ctx context.Context, gateways gateway.Options, kubeconfig string) (err error) {
	if gateways.NodeName, err = kpng.NodeName(gateways.NodeName); err != nil {
		return err
	}
	if gateways.Config, err = kube.LoadConfig(kubeconfig); err != nil {
		return err
	}
	var tables nftables.Options
	tables.Instance = name
	dataplane, err := nftables.New(tables)
	if err != nil {
		return err
	}
	var opts node.Options
	opts.NodeName, opts.Services.ServiceProxyName = gateways.NodeName, name // kube-proxy runs beside it
	opts.Source = func(ctx context.Context, state *cluster.State) error {
		return gateway.Watch(ctx, state, gateways)
	}
	proxy, err := node.New(opts, dataplane)
	if err != nil {
		return err
	}
	return proxy.Run(ctx)
}
