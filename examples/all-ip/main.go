// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command all-ip is a specialized service proxy. Traffic of any protocol and port to an external
// IP or load-balancer IP of a service goes to a pod on this node. all-ip serves only services with
// the service-proxy name in the flag --service-proxy-name. Other proxies, such as
// kube-proxy, serve the other services on the same node.
//
//	all-ip --service-proxy-name kpng-example
//
// README.md describes its features and limits.
package main

import (
	"net/netip"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/watcher"
)

func main() {
	d := newDataplane()
	cmd := app.Command(app.Options{
		Name: "all-ip", Sink: reconcile.New(d, reconcile.Options[object, string]{}),
		Services: watcher.Options{KeepAnnotations: []string{"all-ip.kpng.io/*"}},
	})
	cmd.Long = "all-ip sends all traffic to the external IPs of a service, of any protocol and port, to a pod on this node."
	cmd.Flags().StringVar(&d.name, "table", "kpng-all-ip", "the `name` of the nftables tables, ip and ip6; each all-ip on a node needs its own")
	cmd.Flags().IPNetSliceVar(&d.keep, "keep-source", nil, "the `destinations` to which pods keep their own address in spite of annotation "+egress+", such as the networks of the cluster")
	cmd.MarkFlagsOneRequired("service-proxy-name", "api", "cleanup")

	allPorts := cmd.Flags().Lookup("all-ports")
	allPorts.Value.Set("true")
	allPorts.DefValue = "true"
	app.Execute(cmd)
}

func newDataplane() *dataplane {
	return &dataplane{pods: map[netip.Addr]string{}, stale: map[netip.Addr]bool{}}
}
