// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"maps"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"k8s.io/apimachinery/pkg/types"
)

// servicePort is the service port of a virtual server.
type servicePort struct {
	service types.NamespacedName
	name    string
}

// Stats implements [backends.Counter]. IPVS counts connections and bytes of IP packets in
// any case, so Options.Stats costs nothing for connections. For TCP and SCTP, Stats.Active
// counts the established connections. For UDP, it counts all connections that IPVS
// remembers. Each virtual server has its own numbers, so Stats yields an endpoint for each
// frontend of a port. The kernel adds up its counters every two seconds, unless
// net.ipv4.vs.run_estimation is 0. For services that IPVS cannot serve, Stats yields the
// numbers of the backend nftables.
//
// The kernel lists destinations only for one virtual server at a time, so Stats needs a
// request for each virtual server. Stats reads the kernel with a socket of its own. A Sync
// waits only while Stats copies the names of the service ports.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("read counters of IPVS: the option Stats is not set")
	}
	b.mu.Lock()
	ports := maps.Clone(b.dataplane.ports)
	others, _ := b.rest.dataplane.(backends.Counter)
	b.mu.Unlock()
	c := &conn{netNS: b.opts.NetNS}
	defer c.close()
	for id, port := range ports {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var s server
		if err := c.readDestinations(id, &s); err != nil {
			return err
		}
		for at, to := range s.destinations {
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
