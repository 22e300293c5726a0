// SPDX-License-Identifier: Apache-2.0

// Package nodeaddr says at which addresses of a node its node ports are served.
//
// Backends take a [Source] and are told nothing else: a [Watcher] follows what
// the machine has, a [List] is told by its owner.
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
// Everything in this package may be used by several goroutines at once.
package nodeaddr

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

// Source has the addresses of a node at which node ports and health checks are
// served.
type Source interface {
	// Addresses returns them in order, each once, none of them mapped or with a
	// zone, and a channel that is closed once they may have changed. The slice
	// is the caller's to read, not to write.
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// SetNode tells src which Node object it is about, if it wants to know: a
// Watcher does. A sink whose addresses come from a Source calls it with each
// Changes.Node; that it is called for one source by several sinks does no harm.
func SetNode(src Source, node *api.Node) {
	if s, ok := src.(interface{ SetNode(*api.Node) }); ok {
		s.SetNode(node)
	}
}
