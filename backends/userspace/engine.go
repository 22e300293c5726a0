// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"k8s.io/klog/v2"
)

// engine is the state that all listeners of a backend share. It is safe for concurrent
// use.
type engine struct {
	opts   *settings
	log    klog.Logger
	local  *references
	served ports
	// machine has the addresses of all interfaces of this machine.
	machine    *nodeaddrs.Watcher
	buffers    *buffers
	pipes      *pipes
	batches    *batches
	udp        *udpClients
	complaints complaints
	// descriptors counts the descriptors of listeners, connections and UDP clients.
	descriptors *descriptors
	// sockets has the listening sockets of all services.
	sockets socketOwners
	// By family, listening counts the open listeners, and unopened counts the failed
	// attempts to open a listener. The field accepted counts TCP connections and UDP
	// clients.
	listening, unopened perFamily
	accepted            atomic.Int64
	// drainEnded is closed when connections must not drain any longer.
	drainEnded chan struct{}
	// running counts the goroutines of listeners, draining listeners, UDP clients and
	// address changes. Stop waits for these goroutines.
	running sync.WaitGroup
}

// perFamily has a number for each IP family.
type perFamily [api.IPv6 + 1]atomic.Int64

func (n *perFamily) of(p socketAddr) *atomic.Int64 { return &n[api.FamilyOf(p.at.Addr())] }

// startsHere reports whether traffic with the source address client starts on this node.
func (e *engine) startsHere(client netip.Addr) bool {
	return client.IsLoopback() ||
		slices.ContainsFunc(e.opts.ClusterCIDRs, func(p netip.Prefix) bool { return p.Contains(client) }) ||
		e.local.hasUsers(client) || e.isMachines(client)
}

// isMachines reports whether addr is an address of an interface of this machine.
func (e *engine) isMachines(addr netip.Addr) bool {
	addrs, _ := e.machine.Addresses()
	_, found := slices.BinarySearchFunc(addrs, addr.WithZone(""), netip.Addr.Compare)
	return found
}

// serves reports whether this process itself listens at an endpoint of p. A connection to
// such an endpoint would return to this process in an endless loop.
func (e *engine) serves(p *port, endpoint netip.AddrPort) bool {
	if e.sockets.owner(socketAddr{p.protocol, endpoint}) == nil {
		return false
	}
	p.warnOfLoop.Do(func() {
		e.log.Error(nil, "Ignoring endpoints that this proxy serves itself", "service", p.service, "endpoint", endpoint)
	})
	return true
}

func (e *engine) logEndpoint(p *port, client net.Addr, pool *pool, endpoint netip.AddrPort) {
	if log := e.log.V(3); log.Enabled() {
		log.Info("NextEndpoint for service", "servicePortName", p.name, "address", client, "endpoints", pool.endpoints())
		log.Info("Mapped service to endpoint", "service", p.name, "endpoint", endpoint)
	}
}

// complain logs err with a message. It logs the same message at most once in ten seconds.
func (e *engine) complain(err error, message string, keysAndValues ...any) {
	if e.complaints.due(message, time.Now()) {
		e.log.WithCallDepth(1).Error(err, message, keysAndValues...)
	}
}

// complaints has, for each message of complain, the time of the last log entry. It is
// safe for concurrent use.
type complaints struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func (c *complaints) due(message string, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last, ok := c.last[message]; ok && now.Sub(last) <= 10*time.Second {
		return false
	}
	if c.last == nil {
		c.last = map[string]time.Time{}
	}
	c.last[message] = now
	return true
}
