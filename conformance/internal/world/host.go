// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"net/netip"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// Host is a network namespace with its servers. It is safe for concurrent use.
type Host struct {
	*netnstest.Namespace
	Name string
	// Addrs are the host's addresses, except those added by planner.addLocalNetworks.
	Addrs api.IPSet

	// lastPort counts the source ports of sockets; see withUnusedPort.
	lastPort atomic.Uint32
	servers  []interface{ Close() error }
}

// Addr returns the host's first address of a family.
func (h *Host) Addr(f api.Family) netip.Addr { return h.Addrs.Family(f)[0] }

func (h *Host) close() {
	for _, s := range h.servers {
		s.Close()
	}
	h.Namespace.Close()
}
