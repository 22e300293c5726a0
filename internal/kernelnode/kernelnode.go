// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package kernelnode has code that the backends for the Linux kernel share: the
// kernel settings, the tasks beside the dataplane, and the pauses between repairs.
package kernelnode

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
)

// Addrs returns the addresses of a Node object. If n is nil, it returns no addresses.
func Addrs(n *api.Node) []netip.Addr {
	var addrs []netip.Addr
	if n != nil {
		for _, a := range n.Addresses {
			addrs = append(addrs, a.IP)
		}
	}
	return addrs
}
