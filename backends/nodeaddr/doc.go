// SPDX-License-Identifier: Apache-2.0

// Package nodeaddr provides the addresses of a node at which its node ports are
// reachable.
//
// Backends read a [Source]. One kind of Source is a [Watcher], which follows the
// addresses of the machine. The other is a [List], which has the addresses that its owner
// sets.
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
	// Addresses returns the addresses, sorted and without duplicates. They have no zones,
	// and none is an IPv4-mapped IPv6 address. The channel is closed when the addresses may
	// have changed. The caller must not modify the slice.
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// SetNode passes the Node object to src if src accepts one, like a Watcher. A sink with a
// Source calls it with each Changes.Node. Several sinks may call it for the same Source.
func SetNode(src Source, node *api.Node) {
	if s, ok := src.(interface{ SetNode(*api.Node) }); ok {
		s.SetNode(node)
	}
}
