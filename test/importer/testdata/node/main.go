// SPDX-License-Identifier: Apache-2.0

// A program that runs the proxy of a node with nftables.
package main

import (
	"context"
	"log"

	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/node"
)

func main() {
	dataplane, err := nftables.New(nftables.Options{})
	if err != nil {
		log.Fatal(err)
	}
	proxy, err := node.New(node.Options{}, dataplane)
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(proxy.Run(context.Background()))
}
