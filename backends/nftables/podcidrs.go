// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

// errPodCIDRs requests the pass that brings the new pod CIDRs into the skeleton.
var errPodCIDRs = fmt.Errorf("pod CIDRs of the node changed (%w)", sink.ErrStartOver)

// setPodCIDRs notes the pod CIDRs of the node, if they count, and reports whether they
// changed.
func (b *Backend) setPodCIDRs(node *api.Node) (changed bool) {
	var cidrs []netip.Prefix
	if b.opts.NodePodCIDRs && node != nil {
		cidrs = node.PodCIDRs
	}
	changed = !slices.Equal(cidrs, b.podCIDRs)
	b.podCIDRs = cidrs
	return changed
}

// skeletonChains returns the chains of the skeleton for the node as it is.
func (b *Backend) skeletonChains() []chain {
	opts := b.opts
	opts.ClusterCIDRs = slices.Concat(opts.ClusterCIDRs, b.podCIDRs)
	return opts.skeletonChains()
}
