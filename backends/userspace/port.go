// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"maps"
	"net/netip"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
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
	// present is the port in the view of the last applied plan, or nil if there is none.
	present atomic.Pointer[portView]
}

// common is the state that all ports of a service share.
type common struct {
	service    types.NamespacedName
	affinity   affinity
	account    account // counts the descriptors of the service
	udpClients udpAccount
	warnOfLoop sync.Once
	// filters is the number of instructions of the socket filters of the service's listeners.
	// Backend.mu guards it.
	filters int
}

// portView is a port in a view of its service.
type portView struct {
	*api.PortMapping
	view *api.View
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

// The method serves reports whether e is an endpoint of the port, including endpoints
// that get no new connections.
func (p *port) serves(e netip.AddrPort) bool {
	now := p.present.Load()
	return now != nil && (now.in(now.view.Endpoints, e) || now.in(now.view.Draining, e))
}

// The method in reports whether the sorted list has an endpoint with this address and port.
func (p *portView) in(list []api.Endpoint, e netip.AddrPort) bool {
	i := sort.Search(len(list), func(i int) bool { return list[i].Addr.Compare(e.Addr()) >= 0 })
	for ; i < len(list) && list[i].Addr == e.Addr(); i++ {
		if list[i].TargetPort(p.PortMapping) == int32(e.Port()) {
			return true
		}
	}
	return false
}
