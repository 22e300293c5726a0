// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// servicePort is the service port of a list of endpoints.
type servicePort struct {
	service  types.NamespacedName
	name     string
	protocol api.Protocol
}

// Stats implements [backends.Counter]. The elements that lead to endpoints have counters of
// new connections. The kernel does not count bytes and present connections. An endpoint
// begins with 0 again when its list changes its place.
//
// It reads the kernel with a connection of its own. A Sync waits only while Stats copies the
// names of the service ports.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("read counters of nftables: the option Stats is not set")
	}
	b.mu.Lock()
	ports, name := maps.Clone(b.table.ports), b.table.conn.Table
	b.mu.Unlock()
	if len(ports) == 0 {
		return nil // the table may not exist before the first pass
	}
	c := newConn(b.opts.NetNS, name)
	defer c.Close()
	for _, m := range allMaps() {
		if !m.canCount() {
			continue
		}
		counts, err := c.readCounts(ctx, m)
		if err != nil {
			return err
		}
		for i := range counts {
			port, ok := ports[counts[i].list]
			if ok && !yield(backends.Stats{
				Service: port.service, Port: port.name, Protocol: port.protocol, Endpoint: counts[i].endpoint,
				Connections: counts[i].connections, Active: -1, FromClients: -1, ToClients: -1,
			}) {
				return nil
			}
		}
	}
	return nil
}

// count is the counter of an element.
type count struct {
	list        listNumber
	endpoint    netip.AddrPort
	connections int64
}

// readCounts reads the counters of a map. It repeats a dump that raced with a transaction or
// with a resize of the hash table, see readSnapshot.
func (c *conn) readCounts(ctx context.Context, m mapID) (counts []count, err error) {
	for attempt := 0; ; attempt++ {
		before, err := c.Generation(ctx)
		if err != nil {
			return nil, err
		}
		counts, hasDuplicates, err := c.dumpCounts(ctx, m)
		if err != nil {
			return nil, err
		}
		after, err := c.Generation(ctx)
		if err != nil || after == before && !hasDuplicates || attempt == maxDumpRetries {
			return counts, err
		}
		if err := waitForResize(ctx, attempt); err != nil {
			return nil, err
		}
	}
}

// dumpCounts reads each element of a map that has a counter, once.
func (c *conn) dumpCounts(ctx context.Context, m mapID) (counts []count, hasDuplicates bool, err error) {
	seen := map[[12]byte]bool{} // keys of elements
	err = c.Dump(ctx, m.name(), func(item []byte) {
		connections, ok := nft.Counted(item)
		key, data := nft.Value(item, unix.NFTA_SET_ELEM_KEY), nft.Value(item, unix.NFTA_SET_ELEM_DATA)
		if !ok || len(key) != m.keyLen() || len(data) != m.dataLen() {
			return
		}
		var id [12]byte
		copy(id[:], key)
		if seen[id] {
			hasDuplicates = true
			return
		}
		seen[id] = true
		number := binary.NativeEndian.Uint32(key)
		if isNumbered(number) {
			number &^= endpointMask
		}
		addr, port := data[:nft.AddrLen(m.family)], uint16(0)
		if m.match != matchAddress {
			port = binary.BigEndian.Uint16(data[len(addr):])
		}
		counts = append(counts, count{listNumber{m.family, number}, netip.AddrPortFrom(addrOf(addr), port), int64(connections)})
	})
	return counts, hasDuplicates, err
}
