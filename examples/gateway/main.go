// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command gateway is a service proxy for Gateways, TCPRoutes and UDPRoutes of the Gateway
// API. README.md describes its features and limits.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/node"
	"github.com/kpng-project/kpng/watcher/kube"
	"k8s.io/client-go/dynamic"
)

func main() {
	s := &source{}
	flag.StringVar(&s.kube.NodeName, "node-name", "", "be the proxy of the Node of this `name` (default $NODE_NAME, else the host's name)")
	flag.StringVar(&s.controller, "controller", "kpng.io/gateway", "serve the GatewayClasses with this controller `name`")
	flag.BoolVar(&s.writes, "status", false, "assign addresses and write status; exactly one process of the cluster does this")
	flag.Func("address-pool", "the `network` of the addresses of Gateways; once, or once for each IP family", func(text string) error {
		pool, err := netip.ParsePrefix(text)
		s.pools = append(s.pools, pool)
		return err
	})
	kubeconfig := flag.String("kubeconfig", "", "connect to the API server of this `file` (default: the pod's service account, else kubectl's configuration)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, s, *kubeconfig); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		os.Exit(1)
	}
}

// run runs the service proxy until ctx ends.
func run(ctx context.Context, s *source, kubeconfig string) (err error) {
	if s.kube.NodeName, err = kpng.NodeName(s.kube.NodeName); err != nil {
		return err
	}
	if s.kube.Config, err = kube.LoadConfig(kubeconfig); err != nil {
		return err
	}
	if s.client, err = dynamic.NewForConfig(s.kube.Config); err != nil {
		return err
	}
	var tables nftables.Options
	tables.Instance = "gateway"
	dataplane, err := nftables.New(tables)
	if err != nil {
		return err
	}
	var opts node.Options
	opts.NodeName, opts.Source, opts.Services.ServiceProxyName = s.kube.NodeName, s.run, "gateway"
	proxy, err := node.New(opts, dataplane)
	if err != nil {
		return err
	}
	return proxy.Run(ctx)
}
