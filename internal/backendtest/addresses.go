// SPDX-License-Identifier: Apache-2.0

package backendtest

import (
	"net/netip"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

// NodeAddresses is a [nodeaddr.Source] with the addresses of the Node object.
type NodeAddresses struct {
	mu    sync.Mutex
	addrs []netip.Addr
}

// Addresses implements [nodeaddr.Source]. The channel is nil, because the addresses change
// only in calls of SetNode.
func (a *NodeAddresses) Addresses() ([]netip.Addr, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.addrs, nil
}

// SetNode sets the Node object.
func (a *NodeAddresses) SetNode(node *api.Node) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addrs = nodeaddr.OfNode(node)
}
