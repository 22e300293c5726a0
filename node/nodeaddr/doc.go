// SPDX-License-Identifier: Apache-2.0

// Package nodeaddr provides the addresses at which the node ports of a node are
// reachable.
//
// Backends read a [Source]. A [Watcher] is a Source that follows the addresses of the
// machine. [Of] returns a Source of fixed addresses.
//
//	watcher, err := nodeaddr.New(nodeaddr.Options{Selection: nodeaddr.Selection{"all"}})
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
	"github.com/kpng-project/kpng/internal/addrlist"
)

// Source provides the addresses of a node for node ports and health checks.
type Source interface {
	// Addresses returns the addresses, sorted and without duplicates, and a channel that is
	// closed when the addresses may have changed. The addresses have no zones, and IPv4
	// addresses are not mapped to IPv6. The caller must not modify the slice.
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// Of returns a Source with the given addresses.
func Of(addrs ...netip.Addr) Source { return addrlist.Of(addrs...) }

// SetNode passes the Node object to src if src has a method SetNode, as a [Watcher] has.
// A nil node means that the Node object is unknown. When SetNode of a Watcher returns,
// its Addresses are already the new ones. A sink that has a Source calls SetNode with
// Changes.Node if Changes.NodeChanged is true. Several sinks may call SetNode for the
// same Source.
func SetNode(src Source, node *api.Node) {
	if s, ok := src.(interface{ SetNode(*api.Node) }); ok {
		s.SetNode(node)
	}
}
