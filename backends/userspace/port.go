// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// port is the state of a service port. It exists as long as the service has this port.
type port struct {
	portKey
	// name is the name in logs: namespace/service or, if the port has a name,
	// namespace/service:port.
	name     string
	counters counters
	// common is what all ports of the service share.
	*common
	// existing has the endpoints whose clients stay, by family, according to the last applied
	// plan. It is nil if there is none.
	existing atomic.Pointer[existing]
}

// common is the state that all ports of a service share.
type common struct {
	service    types.NamespacedName
	affinity   affinity
	account    account // counts the descriptors of the service
	udpClients udpAccount
	warnOfLoop sync.Once
	// filters is the number of instructions of the socket filters of the service's listeners.
	// backend.mu guards it.
	filters int
}

// ports is the set of the ports of all services. It is safe for concurrent use. Because
// it has its own lock, readers need not wait for a Sync.
type ports struct {
	mu  sync.Mutex
	all map[*port]struct{}
}

// The method replace replaces the port p by next. If p is nil, it only adds next. If next
// is nil, it only removes p.
func (s *ports) replace(p, next *port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, p)
	if next == nil {
		return
	}
	if s.all == nil {
		s.all = map[*port]struct{}{}
	}
	s.all[next] = struct{}{}
}

func (s *ports) list() []*port {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.all))
}

type portKey struct {
	protocol api.Protocol
	number   int32
}

func newPort(c *common, p *api.PortMapping) *port {
	return &port{portKey: portKey{p.Protocol, p.Port}, name: portName(c.service, p), common: c}
}

func portName(service types.NamespacedName, p *api.PortMapping) string {
	if p.Name == "" {
		return service.String()
	}
	return service.String() + ":" + p.Name
}

// counters has the statistics of a port. Only the number of active connections can
// decrease.
type counters struct {
	connections, active, dialFailures    atomic.Int64
	bytesToEndpoints, bytesFromEndpoints atomic.Int64
}

// existing has the endpoints to which existing connections and flows may continue.
type existing map[api.Family]nodeview.Existing

// The method serves reports whether e is an endpoint of the port, including endpoints
// that get no new connections.
func (p *port) serves(e netip.AddrPort) bool {
	now := p.existing.Load()
	return now != nil && (*now)[api.FamilyOf(e.Addr())].Has(e)
}
