// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// pair is the key of the map connections. Its value is a number for each CPU.
type pair struct {
	Frontend frontendKey
	Endpoint address
}

// owner is the service port of a frontend, with the list of the frontend.
type owner struct {
	service types.NamespacedName
	port    *api.PortMapping
	*endpointList
}

var errNoStats = errors.New("the option Stats is not set")

// Stats implements [backends.Counter]. It first yields the connections through the
// programs, by service port and endpoint. Then it yields the numbers of the other sink. For
// UDP, each new use of a service by a socket counts as a connection. Numbers begin at 0
// again when the process starts.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errNoStats
	}
	m, err := b.connections()
	if err != nil {
		return err
	}
	defer m.Close()
	stopped, sets := false, endpointSets{}
	err = eachPair(ctx, m, func(pairs []pair, numbers []int64) {
		if stopped {
			return
		}
		for _, s := range b.statsOf(pairs, numbers, sets) {
			if stopped = !yield(s); stopped {
				return
			}
		}
	})
	if err != nil || stopped {
		return err
	}
	if c, ok := sink.As[backends.Counter](b.proxy); ok {
		return c.Stats(ctx, yield)
	}
	return nil
}

// connections returns the map connections, which the caller closes.
func (b *backend) connections() (*ebpf.Map, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.programs == nil {
		return nil, errNotStarted
	}
	return b.programs.Connections.Clone()
}

// statsOf returns the pairs that belong to a service port.
func (b *backend) statsOf(pairs []pair, numbers []int64, sets endpointSets) (all []backends.Stats) {
	b.mu.Lock()
	defer b.mu.Unlock()
	all = make([]backends.Stats, 0, len(pairs))
	for i, p := range pairs {
		o, ok := b.dataplane.owners[p.Frontend]
		if !ok || !sets.has(o.endpointList, p.Endpoint) {
			continue
		}
		endpoint := netip.AddrPortFrom(netip.AddrFrom16(p.Endpoint.IP).Unmap(), binary.BigEndian.Uint16(p.Endpoint.Port[:]))
		all = append(all, backends.Stats{
			Service: o.service, Port: o.port.Name, Protocol: o.port.Protocol, Endpoint: endpoint,
			Connections: numbers[i], Active: -1, FromClients: -1, ToClients: -1,
		})
	}
	return all
}

// forgetPairs deletes the pairs whose frontend does not have the endpoint any more.
func (b *backend) forgetPairs(ctx context.Context) error {
	var stale []pair
	sets := endpointSets{}
	m := b.programs.Connections
	err := eachPair(ctx, m, func(pairs []pair, _ []int64) {
		for _, p := range pairs {
			if o, ok := b.dataplane.owners[p.Frontend]; !ok || !sets.has(o.endpointList, p.Endpoint) {
				stale = append(stale, p)
			}
		}
	})
	return errors.Join(err, kernelTable[pair, uint64]{"connections", m}.delete(stale))
}

// endpointSets has the endpoints of long lists.
type endpointSets map[*endpointList]map[address]struct{}

// has reports whether a list has an endpoint, for new or for existing clients.
func (s endpointSets) has(l *endpointList, endpoint address) bool {
	same := func(a address) bool { return a.IP == endpoint.IP && a.Port == endpoint.Port }
	if len(l.endpoints)+len(l.members) <= 32 {
		return slices.ContainsFunc(l.endpoints, same) || slices.ContainsFunc(l.members, same)
	}
	set := s[l]
	if set == nil {
		set = make(map[address]struct{}, len(l.endpoints))
		for _, a := range slices.Concat(l.endpoints, l.members) {
			a.Other = 0
			set[a] = struct{}{}
		}
		s[l] = set
	}
	_, ok := set[endpoint]
	return ok
}

// eachPair calls f with parts of the map connections. A number is the sum over all CPUs.
func eachPair(ctx context.Context, m *ebpf.Map, f func([]pair, []int64)) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	keys, perCPU, numbers := make([]pair, maxBatch), make([]uint64, maxBatch*cpus), make([]int64, maxBatch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, perCPU, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read map connections: %w", err)
		}
		for i := range n {
			numbers[i] = 0
			for _, c := range perCPU[i*cpus : (i+1)*cpus] {
				numbers[i] += int64(c)
			}
		}
		f(keys[:n], numbers[:n])
		if err != nil || ctx.Err() != nil { // the end of the map, or of ctx
			return context.Cause(ctx)
		}
	}
}
