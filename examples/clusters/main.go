// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command clusters is a service proxy for services with endpoints in several clusters. It
// reads the API server of its own cluster, and those of other clusters. README.md describes
// its features and limits.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/node"
	"github.com/kpng-project/kpng/watcher/kube"
	"golang.org/x/sync/errgroup"
)

// patience is how long the start waits for the API servers of other clusters.
const patience = 10 * time.Second

func main() {
	var options kube.Options
	flag.StringVar(&options.NodeName, "node-name", "", "be the proxy of the Node of this `name` (default $NODE_NAME, else the host's name)")
	flag.StringVar(&options.ServiceProxyName, "service-proxy-name", "multi-cluster", "serve the services with this proxy `name`")
	flag.DurationVar(&options.StaleAfter, "forget", 0, "remove the endpoints of another cluster whose API server does not answer for this `duration` (default: keep them)")
	kubeconfig := flag.String("kubeconfig", "", "the `file` for this cluster's API server (default: the pod's service account, else kubectl's configuration)")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: clusters [flags] KUBECONFIG...   (a file for each other cluster)")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, append([]string{*kubeconfig}, flag.Args()...), options); err != nil {
		fmt.Fprintln(os.Stderr, "clusters:", err)
		os.Exit(1)
	}
}

// run runs the service proxy until ctx ends. The first kubeconfig is that of this cluster.
func run(ctx context.Context, kubeconfigs []string, options kube.Options) (err error) {
	if options.NodeName, err = kpng.NodeName(options.NodeName); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	var states []*cluster.State
	for _, file := range kubeconfigs {
		from, state := options, cluster.New(cluster.Options{})
		if from.Config, err = kube.LoadConfig(file); err != nil {
			return err
		}
		states = append(states, state)
		group.Go(func() error { return kube.Watch(ctx, state, from) })
	}
	var tables nftables.Options
	tables.Instance = options.ServiceProxyName
	dataplane, err := nftables.New(tables)
	if err != nil {
		return err
	}
	var opts node.Options
	opts.NodeName, opts.Services = options.NodeName, options.Options
	opts.Source = func(ctx context.Context, out *cluster.State) error {
		go func() {
			select {
			case <-states[0].Changed(0):
				time.AfterFunc(patience, out.SetSynced)
			case <-ctx.Done():
			}
		}()
		cluster.Merge(ctx, out, merger{forget: options.StaleAfter > 0}.merge, states...)
		return nil
	}
	proxy, err := node.New(opts, dataplane)
	if err != nil {
		return err
	}
	group.Go(func() error { return proxy.Run(ctx) })
	return group.Wait()
}
