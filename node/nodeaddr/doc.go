// SPDX-License-Identifier: Apache-2.0

// Package nodeaddr provides the addresses at which the node ports of a node are
// reachable.
//
// Dataplanes read a [Source]. [Watch] returns a Source that follows the addresses of the
// machine. [Of] returns a Source of fixed addresses.
//
//	addresses, err := nodeaddr.Watch(ctx, nodeaddr.Options{Selection: nodeaddr.Selection{"all"}})
//	…
//	for {
//		addrs, changed := addresses.Addresses()
//		program(addrs)
//		<-changed
//	}
package nodeaddr

import (
	"context"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
)

// Source provides the addresses of a node for node ports and health checks. It is safe for
// concurrent use.
type Source interface {
	// Addresses returns the addresses, sorted and without duplicates. It also returns a
	// channel that is closed when the addresses may have changed. The addresses have no
	// zones, and IPv4 addresses are not mapped to IPv6. The caller must not modify the
	// slice.
	Addresses() (addrs []netip.Addr, changed <-chan struct{})
}

// Of returns a Source with the given addresses. It sorts them, and removes duplicates.
func Of(addrs ...netip.Addr) Source { return nodeaddrs.Of(addrs...) }

// OfNode returns the addresses of a Node object: its InternalIPs or, without InternalIPs,
// its ExternalIPs. If node is nil or has no such addresses, the result is nil.
func OfNode(node *api.Node) []netip.Addr { return nodeaddrs.OfNode(node) }

// Options select addresses of the machine. The zero value selects the primary addresses.
type Options struct {
	// Selection selects addresses of the machine. Default: the primary addresses.
	Selection Selection
	// ExcludeInterfaces are the names of interfaces whose addresses are ignored. An example
	// is kube-ipvs0, the interface to which kube-proxy adds service addresses. Default:
	// none.
	ExcludeInterfaces []string
}

// Selection is a list of items. Each item selects addresses of a node. An empty list
// means primary. The items are:
//
//   - primary: the InternalIPs of the Node object or, if it has none, its ExternalIPs.
//     While the Node object is unknown, the source addresses of the machine's default
//     routes, at most one per family
//   - all: every address of the machine, except loopback and link-local addresses
//   - a CIDR: the addresses of the machine in this range
//   - localhost: the same as the CIDRs 127.0.0.0/8 and ::1/128
//
// Loopback and link-local addresses are selected only by a CIDR within their own ranges,
// such as 127.0.0.0/8 or fe80::/10. A wider CIDR does not select them.
type Selection []string

// Watch reads the selected addresses of the machine, and returns a Source that follows them
// until ctx ends. Watch returns an error if an item of the selection is invalid, or if it
// cannot read the addresses. If it fails to read them again later, it logs an error, and the
// Source keeps the last known addresses.
//
// On Linux, the Source notices a changed address immediately, and a changed default route
// within 10 seconds. On other systems, it notices all changes within 10 seconds. The
// Source needs the Node object for the primary addresses. The dataplanes of this module
// pass it to the Source's method SetNode(*api.Node).
func Watch(ctx context.Context, opts Options) (Source, error) {
	w, err := nodeaddrs.New(nodeaddrs.Options{Selection: opts.Selection, ExcludeInterfaces: opts.ExcludeInterfaces})
	if err != nil {
		return nil, err
	}
	stop := w.Start(ctx)
	context.AfterFunc(ctx, stop)
	return w, nil
}
