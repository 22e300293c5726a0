// SPDX-License-Identifier: Apache-2.0

// Package nodeaddr provides the addresses at which the node ports of a node are
// reachable.
//
// Backends read a [Source]. There are two kinds of sources. A [Watcher] follows the
// addresses of the machine. A [List] has addresses that the program sets.
//
//	watcher, err := nodeaddr.New(nodeaddr.Options{Selection: nodeaddr.Selection{All: true}})
//	…
//	defer watcher.Start(ctx)()
//	for {
//		addrs, changed := watcher.Addresses()
//		program(addrs)
//		<-changed
//	}
//
// All types are safe for concurrent use.
package nodeaddr

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

// Source provides the addresses of a node for node ports and health checks.
type Source interface {
	// Addresses returns the addresses, sorted and without duplicates, and a channel that is
	// closed when the addresses may have changed. The addresses have no zones, and IPv4
	// addresses are not mapped to IPv6. The caller must not modify the slice.
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// SetNode passes the Node object to src if src has a method SetNode. A Watcher has this
// method. A sink that has a Source calls SetNode with each Changes.Node. Several sinks
// may call SetNode for the same Source.
func SetNode(src Source, node *api.Node) {
	if s, ok := src.(interface{ SetNode(*api.Node) }); ok {
		s.SetNode(node)
	}
}
