// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables_test

import (
	"context"
	"log"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/sink"
)

// This program replaces kube-proxy on a node. It needs CAP_NET_ADMIN.
func Example() {
	backend, err := nftables.New(nftables.Options{})
	if err != nil {
		log.Fatal(err)
	}
	err = kpng.Run(context.Background(), kpng.Options{
		NodeName: "node-1",
		Sinks:    []kpng.Sink{{Sink: backend, Options: sink.Options{Name: "nftables"}}},
	})
	if err != nil {
		log.Fatal(err)
	}
}
