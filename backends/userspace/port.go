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
	service types.NamespacedName
	// name is the name in logs: namespace/service or, if the port has a name,
	// namespace/service:port.
	name     string
	counters counters
	affinity affinity
	// account counts the descriptors of the service, for all its ports.
	account    *account
	warnOfLoop *sync.Once

	// Backend.mu guards the following fields.

	// pools has the pools of the last plan, one for each different list of endpoints.
	pools []*pool
	// allEndpoints has all existing endpoints, sorted, including those that get no new
	// connections.
	allEndpoints []netip.AddrPort
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

func newPort(s *service, p *api.PortMapping) *port {
	return &port{portKey: portKey{p.Protocol, p.Port}, service: s.key, name: portName(s.key, p), account: s.account, warnOfLoop: s.warnOfLoop}
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

// The method pool returns a pool with the endpoints of targets. The argument newPools has
// the pools of the new plan. If newPools or p already has a pool with these endpoints,
// the result is that pool, so that its round continues.
func (p *port) pool(targets []nodeview.Target, newPools []*pool) *pool {
	endpoints := addrPorts(targets)
	same := func(o *pool) bool { return slices.Equal(o.sorted, endpoints) }
	for _, pools := range [...][]*pool{newPools, p.pools} {
		if i := slices.IndexFunc(pools, same); i >= 0 {
			return pools[i]
		}
	}
	return newPool(endpoints)
}

// servingOf returns all endpoints of the port p, sorted, including draining endpoints.
func servingOf(se *api.ServiceEndpoints, p *api.PortMapping) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(se.Endpoints)+len(se.Draining))
	for _, list := range [...][]api.Endpoint{se.Endpoints, se.Draining} {
		for i := range list {
			if number := list[i].TargetPort(p); number != 0 {
				out = append(out, netip.AddrPortFrom(list[i].Addr, uint16(number)))
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// setServing sets the field allEndpoints. If a client has affinity to a removed endpoint,
// its next connection gets another endpoint.
func (p *port) setServing(serving []netip.AddrPort) {
	before := p.allEndpoints
	p.allEndpoints = serving
	if slices.ContainsFunc(before, func(e netip.AddrPort) bool { return !p.serves(e) }) {
		p.affinity.detachIf(func(c attachment) bool { return !p.serves(c.endpoint) })
	}
}

func (p *port) serves(e netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(p.allEndpoints, e, netip.AddrPort.Compare)
	return found
}
