// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
)

// Stats implements [backends.Counter]. UDP clients count as connections. Only the bytes of
// data are counted, without headers.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("count traffic: the option Stats is not set")
	}
	for _, p := range b.served.list() {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if !p.counted.report(p, yield) {
			break
		}
	}
	return nil
}

// endpointCounters counts the traffic of a port by endpoint. It is safe for concurrent use.
type endpointCounters struct {
	mu sync.Mutex
	// The map all has the endpoints that have had connections.
	all map[netip.AddrPort]*endpointCounter
}

// endpointCounter has the numbers of one endpoint of a port. The nil *endpointCounter counts
// nothing.
type endpointCounter struct {
	connections, active, fromClients, toClients atomic.Int64
}

// begin counts a connection to an endpoint. The caller calls the method end of the result.
func (c *endpointCounters) begin(endpoint netip.AddrPort) *endpointCounter {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.all[endpoint]
	if e == nil {
		if c.all == nil {
			c.all = map[netip.AddrPort]*endpointCounter{}
		}
		e = &endpointCounter{}
		c.all[endpoint] = e
	}
	e.connections.Add(1)
	e.active.Add(1)
	return e
}

// prune drops an endpoint if it has no connections and serves returns false.
func (c *endpointCounters) prune(serves func(netip.AddrPort) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for endpoint, e := range c.all {
		if e.active.Load() == 0 && !serves(endpoint) {
			delete(c.all, endpoint)
		}
	}
}

// report calls yield for each present endpoint of p, and for each removed endpoint that
// still has connections. It returns false if yield returns false.
func (c *endpointCounters) report(p *port, yield func(backends.Stats) bool) bool {
	c.mu.Lock()
	var counted []backends.Stats
	for endpoint, e := range c.all {
		counted = append(counted, backends.Stats{
			Service: p.service, Port: p.portName, Protocol: p.protocol, Endpoint: endpoint,
			Connections: e.connections.Load(), Active: e.active.Load(), FromClients: e.fromClients.Load(), ToClients: e.toClients.Load(),
		})
	}
	c.mu.Unlock()
	known := make(map[netip.AddrPort]struct{}, len(counted))
	for _, s := range counted {
		if !yield(s) {
			return false
		}
		known[s.Endpoint] = struct{}{}
	}
	now := p.existing.Load()
	if now == nil {
		return true
	}
	for _, family := range [...]api.Family{api.IPv4, api.IPv6} {
		for t := range (*now)[family].All() {
			if _, ok := known[t.AddrPort()]; ok {
				continue
			}
			if !yield(backends.Stats{Service: p.service, Port: p.portName, Protocol: p.protocol, Endpoint: t.AddrPort()}) {
				return false
			}
		}
	}
	return true
}

// count counts a connection of p to an endpoint, if the backend counts.
func (e *engine) count(p *port, endpoint netip.AddrPort) *endpointCounter {
	if !e.opts.Stats {
		return nil
	}
	return p.counted.begin(endpoint)
}

// end records the end of a connection.
func (c *endpointCounter) end() {
	if c != nil {
		c.active.Add(-1)
	}
}

// add counts bytes in both directions.
func (c *endpointCounter) add(fromClients, toClients int) {
	if c != nil {
		c.fromClients.Add(int64(fromClients))
		c.toClients.Add(int64(toClients))
	}
}
