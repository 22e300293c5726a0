// SPDX-License-Identifier: Apache-2.0

// Package nodeaddr provides the addresses of a node at which its node ports are served.
//
// Backends read a [Source]: a [Watcher] follows the addresses of the machine, and a
// [List] has the addresses that its owner sets.
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

// Source provides the addresses of a node at which node ports and health checks are
// served.
type Source interface {
	// Addresses returns the sorted addresses, without duplicates, mapped addresses and
	// zones. The channel is closed when the addresses may have changed. The caller must not
	// modify the slice.
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// SetNode passes the Node object to src if it accepts one, as a Watcher does. A sink with
// a Source calls it with each Changes.Node. Several sinks may call it for the same
// source.
func SetNode(src Source, node *api.Node) {
	if s, ok := src.(interface{ SetNode(*api.Node) }); ok {
		s.SetNode(node)
	}
}
