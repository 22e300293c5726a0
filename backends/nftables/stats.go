// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// maxStats limits the counters that Stats keeps in memory.
const maxStats = 10_000

// Stats implements [backends.Counter]. The elements that lead to endpoints have counters of
// new connections. The kernel counts neither bytes nor present connections. In a list
// without numbers, the counter of an endpoint begins at 0 again when the endpoint gets
// another slot.
//
// A Sync waits only while Stats copies the references to the lists.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("read counters of nftables: the option Stats is not set")
	}
	b.mu.Lock()
	services, name := maps.Clone(b.table.services), b.table.conn.Table
	b.mu.Unlock()
	r := counterReader{reader: &b.table.reader, table: name, elements: map[mapID][]counterElement{}}
	for service, lists := range services {
		for i := range lists {
			l := &lists[i]
			for slot := range l.len() {
				id := l.slotID(slot)
				if isNumbered(l.number) {
					id = l.numberID(l.record(slot).number())
				}
				r.elements[id.m] = append(r.elements[id.m], counterElement{service, l, id})
				if len(r.elements[id.m]) < maxStats {
					continue
				}
				if more, err := r.read(ctx, id.m, yield); !more {
					return err
				}
			}
		}
	}
	for m := range r.elements {
		if more, err := r.read(ctx, m, yield); !more {
			return err
		}
	}
	return nil
}

// counterReader reads the counters of elements.
type counterReader struct {
	reader   *reader
	table    string
	elements map[mapID][]counterElement // the elements whose counters are needed
}

// counterElement is an element that leads to an endpoint of a list.
type counterElement struct {
	service types.NamespacedName
	list    *list
	id      elementID
}

// read reads the elements of a map. Elements that a Sync has just removed are missing. The
// method read returns false if yield returns false or if an error occurs.
func (r *counterReader) read(ctx context.Context, m mapID, yield func(backends.Stats) bool) (more bool, err error) {
	elements := r.elements[m]
	r.elements[m] = elements[:0]
	all := make([]backends.Stats, 0, len(elements))
	found := func(i int, item []byte) bool {
		connections, ok := nft.Counted(item)
		data := nft.Value(item, unix.NFTA_SET_ELEM_DATA)
		if !ok || len(data) != m.dataLen() {
			return true
		}
		addr, port := data[:nft.AddrLen(m.family)], uint16(0)
		if m.match != matchAddress {
			port = binary.BigEndian.Uint16(data[len(addr):])
		}
		l := elements[i].list
		all = append(all, backends.Stats{
			Service: elements[i].service, Port: l.name, Protocol: l.protocol, Endpoint: netip.AddrPortFrom(addrOf(addr), port),
			Connections: int64(connections), Active: -1, FromClients: -1, ToClients: -1,
		})
		return true
	}
	err = r.reader.read(r.table, func(c *conn) error {
		return c.Get(ctx, m.name(), len(elements), func(w *nft.Writer, i int) { elements[i].id.encodeKey(w) }, found)
	})
	if err != nil {
		return false, fmt.Errorf("read counters of %s: %w", m.name(), err)
	}
	for _, s := range all {
		if !yield(s) {
			return false, nil
		}
	}
	return true, nil
}
