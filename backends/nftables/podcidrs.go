// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
)

// errPodCIDRs causes the pass that brings the new pod CIDRs into the skeleton.
var errPodCIDRs = errors.New("the pod CIDRs of the node changed")

// setPodCIDRs notes the pod CIDRs of the node, if they count, and reports whether they
// changed.
func (t *table) setPodCIDRs(node *api.Node) (changed bool) {
	var cidrs []netip.Prefix
	if t.opts.NodePodCIDRs && node != nil {
		cidrs = node.PodCIDRs
	}
	changed = !slices.Equal(cidrs, t.podCIDRs)
	t.podCIDRs = cidrs
	return changed
}

// skeletonChains returns the chains of the skeleton for the node as it is.
func (t *table) skeletonChains() []chain {
	opts := *t.opts
	opts.ClusterCIDRs = slices.Concat(opts.ClusterCIDRs, t.podCIDRs)
	return opts.skeletonChains()
}
