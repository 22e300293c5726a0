// SPDX-License-Identifier: Apache-2.0

package kernelspace

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/internal/hns"
)

// tunnels finds the tunnel to an address. An overlay network has a remote subnet for each
// other node, so a search through all of them would be slow. The zero value has no tunnels.
type tunnels struct {
	// subnets has the nodes of the remote subnets.
	subnets map[netip.Prefix]netip.Addr
	// lengths has the different prefix lengths of the subnets, the longest first.
	lengths []int
	// nodes has the addresses of the other nodes.
	nodes map[netip.Addr]bool
}

func newTunnels(n *hns.Network) tunnels {
	t := tunnels{subnets: map[netip.Prefix]netip.Addr{}, nodes: map[netip.Addr]bool{}}
	for _, s := range n.RemoteSubnets {
		t.nodes[s.Provider] = true
		subnet := s.Prefix.Masked()
		if _, known := t.subnets[subnet]; known || !subnet.IsValid() {
			continue
		}
		t.subnets[subnet] = s.Provider
		if at, found := slices.BinarySearchFunc(t.lengths, subnet.Bits(), func(a, b int) int { return b - a }); !found {
			t.lengths = slices.Insert(t.lengths, at, subnet.Bits())
		}
	}
	return t
}

// provider returns the address of the node at the end of the tunnel to address a. The node
// either has the address a itself or has a remote subnet that contains the address a.
// Without a tunnel, provider returns the zero Addr.
func (t *tunnels) provider(a netip.Addr) netip.Addr {
	if t.nodes[a] {
		return a
	}
	for _, bits := range t.lengths {
		if subnet, err := a.Prefix(bits); err == nil {
			if provider, ok := t.subnets[subnet]; ok {
				return provider
			}
		}
	}
	return netip.Addr{}
}
