// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"k8s.io/apimachinery/pkg/types"
)

// servicePort is the service port of a virtual server.
type servicePort struct {
	service types.NamespacedName
	name    string
}

// counts are the counters of a virtual server as Stats has read them last.
type counts struct {
	state *frontendState // the record of the virtual server at that time
	total traffic
	// destinations are read again before the time settled, and while there are connections.
	destinations map[netip.AddrPort]destination
	settled      time.Time
	connected    bool
}

// settlingTime is how long the counters of destinations may change after those of their
// virtual server. The kernel adds up each of them every two seconds, at different times.
const settlingTime = 4 * time.Second

// Stats implements [backends.Counter]. IPVS counts connections and bytes of IP packets in
// any case, so Options.Stats costs nothing for connections. For TCP and SCTP, the present
// connections are those that are established; for UDP, all that IPVS remembers. Each virtual
// server has its own numbers, so Stats yields an endpoint for each frontend of a port. The
// kernel adds up its counters every two seconds, unless net.ipv4.vs.run_estimation is 0. Of
// services that IPVS cannot serve, Stats yields what the backend nftables counts.
//
// The kernel lists all virtual servers with their counters in one answer, but destinations
// only for each virtual server. So Stats reads the destinations of a virtual server only if
// its counters have changed or if it has connections. It reads the kernel with a socket of its
// own. A Sync waits only while Stats copies the names of the service ports.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("read counters of IPVS: the option Stats is not set")
	}
	b.counting.Lock()
	defer b.counting.Unlock()
	b.mu.Lock()
	ports, states := maps.Clone(b.dataplane.ports), maps.Clone(b.dataplane.servers)
	others, _ := b.rest.dataplane.(backends.Counter)
	b.mu.Unlock()
	c := &conn{netNS: b.opts.NetNS}
	defer c.close()
	var totals map[serverID]*server
	if len(ports) > 0 {
		var err error
		if totals, err = c.list(); err != nil {
			return err
		}
	}
	known := b.counts
	b.counts = make(map[serverID]*counts, len(ports))
	for id, port := range ports {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		known := known[id]
		if known == nil || known.state != states[id] {
			known = &counts{state: states[id]}
		}
		b.counts[id] = known
		if err := known.read(c, id, totals[id]); err != nil {
			return err
		}
		for at, to := range known.destinations {
			active := to.established
			if id.protocol == api.UDP {
				active = to.connections
			}
			if !yield(backends.Stats{
				Service: port.service, Port: port.name, Protocol: id.protocol, Endpoint: at,
				Connections: int64(to.total), Active: int64(active),
				FromClients: int64(to.bytesIn), ToClients: int64(to.bytesOut),
			}) {
				return nil
			}
		}
	}
	if others == nil {
		return nil
	}
	return others.Stats(ctx, yield)
}

// read reads the destinations of a virtual server if they may have changed. The argument now
// is the virtual server as the kernel lists it, or nil if the listing omits it.
func (k *counts) read(c *conn, id serverID, now *server) error {
	switch {
	case k.destinations == nil || now == nil || now.traffic != k.total:
		k.settled = time.Now().Add(settlingTime)
	case !k.connected && time.Now().After(k.settled):
		return nil
	}
	if now == nil {
		now = &server{}
	}
	if err := c.readDestinations(id, now); err != nil {
		return err
	}
	k.total, k.destinations, k.connected = now.traffic, now.destinations, false
	for _, to := range k.destinations {
		k.connected = k.connected || to.connections > 0
	}
	return nil
}
